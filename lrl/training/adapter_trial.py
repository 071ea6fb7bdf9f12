"""Trial of whether a network with adapters computes W + scale * B A, and whether a generator can
merge them.

Some models read a layer's weight without calling the layer (Mamba's step size), so that its adapter
does nothing in the trainer, and all in the generators, which merge it. Some have layers in memory
that are one packed weight in their files. No config says so. So before a server starts

- every W must be in a checkpoint what it is in memory;
- a few tokens go forward and back, and the gradient of B must be scale * dW A^T (2106.09685,
  equation 3, at B = 0), where dW is the gradient of W as the network uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lrl.errors import ConfigError
from lrl.training.lora import NAME, adapted_layers
from lrl.training.model import checkpoint_weights, label_logprobs, text_as_micro_batch

Layers = dict[str, Any]
"""The layers with adapters (peft's `LoraLayer`) by their names."""

TOKENS = 32
ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.1}
"""Largest difference of the two gradients, relative to the larger one (L2 norms), by the format of
W."""


def check_adapters(network: PreTrainedModel) -> None:
    """Checks adapters whose B are all 0, as before training; leaves weights, gradients and random
    state as they were.

    Raises:
        ConfigError: A layer cannot have one; it names the layers and the remedy.
    """
    layers = dict(adapted_layers(network))
    if bad := _not_in_files(network, layers):
        _refuse(
            network,
            layers,
            bad,
            "is a part of another weight in the model's files: no generator could merge it",
        )
    if bad := _read_past(network, layers):
        why = (
            "the model also reads without it: generators, which merge it, would compute something "
            "else"
        )
        _refuse(network, layers, bad, why)


def _not_in_files(network: PreTrainedModel, layers: Layers) -> list[str]:
    shapes = {name: weight.shape for name, weight in checkpoint_weights(network)}
    bad = []
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight.detach()
        ((saved_as, saved), *more) = revert_weight_conversion(
            network, {f"{name}.weight": weight}
        ).items()
        if more or shapes.get(saved_as) != weight.shape or not torch.equal(saved, weight):
            bad.append(name)
    return bad


def _read_past(network: PreTrainedModel, layers: Layers) -> list[str]:
    expected: dict[str, Tensor] = {}
    with _gradients_of_weights(layers, expected), torch.enable_grad():
        with _named(network, layers):
            logprobs = _logprobs(network)
        # Reformer computes its layers without autograd unless its input has a gradient.
        if not logprobs.requires_grad:
            _refuse(network, {}, list(layers), "gets no gradient if the embedding has none")
        (torch.linspace(-1, 1, len(logprobs), device=logprobs.device) * logprobs).sum().backward()
    bad = []
    for name, layer in layers.items():
        up = layer.lora_B[NAME].weight
        # The tokens have not reached the layer, an expert for example.
        nothing = torch.zeros_like(up)
        found = nothing if up.grad is None else up.grad
        wanted = expected.get(name, nothing)
        limit = ROUNDING[layer.get_base_layer().weight.dtype] * max(found.norm(), wanted.norm())
        if not (found - wanted).norm() <= limit:  # NaN, too
            bad.append(name)
    network.zero_grad()
    return bad


def _logprobs(network: PreTrainedModel) -> Tensor:
    ends = network.get_input_embeddings(), network.get_output_embeddings()
    vocabulary = min(len(end.weight) for end in ends)  # some models have tokens that they only read
    tokens = torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(0))
    micro = text_as_micro_batch(tokens.tolist(), network.device)
    with torch.random.fork_rng([network.device] if network.device.type == "cuda" else []):
        return label_logprobs(network, micro, chunk_tokens=TOKENS)[micro.mask]


@contextmanager
def _gradients_of_weights(layers: Layers, expected: dict[str, Tensor]) -> Iterator[None]:
    """Writes the expected gradient of each B in the block; one gradient of a W is in memory at a
    time."""

    def take(name: str, layer: Any, weight: Tensor) -> None:
        down = layer.lora_A[NAME].weight.detach()
        expected[name] = layer.scaling[NAME] * cast(Tensor, weight.grad).to(down.dtype) @ down.T
        weight.grad = None

    hooks: list[Any] = []
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight.requires_grad_()
        hooks.append(
            weight.register_post_accumulate_grad_hook(lambda w, n=name, one=layer: take(n, one, w))
        )
    try:
        yield
    finally:
        for hook, layer in zip(hooks, layers.values(), strict=True):
            hook.remove()
            layer.get_base_layer().weight.requires_grad_(False)


@contextmanager
def _named(network: PreTrainedModel, layers: Layers) -> Iterator[None]:
    """Turns an exception of the model in the block into one that names the last layer with an
    adapter that began."""
    last = [next(iter(layers))]
    hooks = [
        layer.register_forward_pre_hook(lambda *_, name=name: last.__setitem__(0, name))
        for name, layer in layers.items()
    ]
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        _refuse(
            network,
            layers,
            last,
            f"makes it fail ({type(error).__name__}: {' '.join(str(error).split()):.200})",
        )
    finally:
        for hook in hooks:
            hook.remove()


def _refuse(network: PreTrainedModel, layers: Layers, bad: list[str], why: str) -> None:
    """Raises a ConfigError that names the layers, and the endings of the layers that may keep their
    adapters."""
    right = sorted({_end(name) for name in layers} - {_end(name) for name in bad})
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    raise ConfigError(
        f"model.lora: {type(network).__name__} cannot have an adapter at {bad[0]}{more}, which "
        f"{why}. "
        + (
            f"Set model.lora.target_modules to [{', '.join(right)}]."
            if right
            else "Leave model.lora out."
        )
    )


def _end(name: str) -> str:
    return name.rpartition(".")[2]
