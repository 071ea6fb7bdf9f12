"""What a number format's rounding does to a model's log-probs, by its parts and by its weights.

Two programs with the same weights in 16 bits differ by 0.0006 nats a token for a tiny random model,
by 0.05 for a trained one. So the limit is measured: the output of every part of the model gets a
relative error as large as the format's rounding. The log-probs then moved by 0.8 to 1.3 times as
much as vLLM's on eight policies (`benchmarks/agreement.py` at tag before-0.3).

A generator in 16 bits also rounds weights: in float32 it takes 60 steps of 1e-6 until a bfloat16
weight of 0.02 rounds to the next number. So a proof rounds them, too (`rounded_weights`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.training.logprobs import decoder_of

Rounded = Literal["bfloat16", "float16"]
UNIT: dict[Rounded, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative error of rounding a number to that format."""
PHASE_FACTOR = 1e5
"""Factor on a number whose sine stands for its error. As in rounding, the error follows from the
number alone: a layer that is computed again for its gradient has the same."""


@contextmanager
def rounding_errors(network: PreTrainedModel, dtype: Rounded) -> Iterator[None]:
    """Adds errors as large as the format's rounding to the outputs of parts and layers."""
    parts = [module for module in network.modules() if not any(module.children())]
    decoder = decoder_of(network)
    layers = [list(each) for each in decoder.modules() if isinstance(each, nn.ModuleList)]

    def add(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(_with_error(each, UNIT[dtype]) for each in output)
        return _with_error(output, UNIT[dtype])

    with ExitStack() as hooks:
        for module in dict.fromkeys(parts + (layers[0] if layers else [])):
            hooks.callback(module.register_forward_hook(add).remove)
        yield


@contextmanager
def rounded_weights(network: PreTrainedModel, dtype: Rounded) -> Iterator[None]:
    """Lets a model compute with its weights as a generator in that format holds them.

    Each module has rounded ones while it computes, so there is no second copy of the model.
    """
    head = network.get_output_embeddings()
    # Each weight, and the rounded one.
    held: dict[nn.Module, dict[str, tuple[nn.Parameter, nn.Parameter]]] = {}

    def round_(module: nn.Module, *_: Any) -> None:
        own = module.named_parameters(recurse=False)
        held[module] = {name: (weight, _rounded(weight, dtype)) for name, weight in own}
        module._parameters.update({name: half for name, (_, half) in held[module].items()})

    def put_back(module: nn.Module, *_: Any) -> None:
        for name, (weight, half) in held.pop(module).items():
            # What shards a model may have put its own back before.
            if module._parameters[name] is half:
                module._parameters[name] = weight

    def put_all_back() -> None:
        for module in list(held):
            put_back(module)

    with ExitStack() as hooks:
        hooks.callback(put_all_back)
        for module in network.modules():
            if module is not head and next(module.parameters(recurse=False), None) is not None:
                hooks.callback(module.register_forward_pre_hook(round_).remove)
                hooks.callback(module.register_forward_hook(put_back).remove)
        # lrl reads the head's weight behind the decoder (`lrl.training.logprobs.head_logprobs`).
        behind = decoder_of(network).register_forward_hook(lambda *_: round_(head))
        hooks.callback(behind.remove)
        yield


def _rounded(weight: nn.Parameter, dtype: Rounded) -> nn.Parameter:
    half = weight.detach().to(getattr(torch, dtype))
    return nn.Parameter(half.to(weight.dtype), requires_grad=False)


def _with_error(output: Any, unit: float) -> Any:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    error = unit * torch.sin(PHASE_FACTOR * output.detach().float())
    return (output.float() * (1.0 + error)).to(output.dtype)
