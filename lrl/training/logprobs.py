"""Log-probs of given tokens, without a tensor of tokens x vocabulary.

The head runs over chunks of tokens, forwards and backwards, through one buffer of a chunk's logits:

    forward    for each chunk:               logits -> log-probs of the labels
    backward   for each chunk, last first:   logits again -> their gradient, in place -> gradients of hidden and head

The last chunk's logits are still in the buffer when the backward pass begins, so with a single
chunk nothing is computed twice.

Logits have the dtype of the weights (of autocast if it is on) and become float32 for the softmax,
as in vLLM; then the temperature divides them. docs/logprobs.md has measurements.

Eager kernels write each of these steps to memory, so they work on a few rows at a time. Compiled,
they are fused, and work on a whole chunk.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.training import varlen
from lrl.types import MicroBatch

FUSED_HEAD = "lrl_fused_head"
"""The attribute of a network whose head is compiled (`lrl.training.kernels`)."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """A model's change of its logits: a scale (Granite, Cohere), then cap * tanh(logit / cap) (Gemma,
    xLSTM)."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Reads the transform from a Hugging Face text config, under all names in use."""

        def named(*names: str) -> Iterator[float]:
            # Neither null nor 0.
            return (value for name in names if (value := getattr(config, name, None)))

        divisor = math.prod(named("logits_scaling", "logits_mup_width_multiplier"))
        scale = math.prod(named("logit_scale")) / divisor
        caps = named("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
        return cls(scale=scale, cap=next(caps, None))

    def __call__(self, logits: Tensor) -> Tensor:
        """Returns the transformed logits, same shape and dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def slope(self, transformed: Tensor) -> Tensor | float:
        """Returns the derivative of each transformed logit by its original."""
        if self.cap is None:
            return self.scale
        return self.scale * (1 - (transformed / self.cap).square())


IDENTITY = LogitTransform()


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    chunk_tokens: int = 1024,
    fused: bool = False,
) -> Tensor:
    """Returns the log-prob of each label, float32 [N], nats: log_softmax(transform(hidden @ weight.T
    + bias) / temperature)[label]. Differentiable by hidden, weight and bias, once.

    Args:
        hidden: [N, H], where the label is predicted; dtype of the weight.
        weight: [V, H], the head.
        labels: int64 [N].
        bias: [V], if the head has one.
        temperature: Above 0.
        transform: The model's change of its logits.
        chunk_tokens: chunk_tokens x V logits are in memory until the backward pass ends.
        fused: Whether torch compiles what comes behind the products.
    """
    device = hidden.device.type
    # It does not apply to the products below, which have `out`.
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    softmax = _Softmax(
        labels, transform, temperature=temperature, chunk_tokens=chunk_tokens, fused=fused
    )
    return _TokenLogprobs.apply(hidden, weight, bias, softmax)


@dataclass(frozen=True, slots=True)
class _Softmax:
    """Logits to log-probs and gradients in float32."""

    labels: Tensor
    """int64 [N]."""
    transform: LogitTransform
    temperature: float
    chunk_tokens: int
    fused: bool

    def logprobs(self, logits: Tensor, part: slice, out: Tensor) -> None:
        """Writes log-probs, float32 [n], of a part of the labels; keeps logits [n, V]."""
        labels = self.labels[part, None]
        for rows in self._blocks(logits):
            out[rows] = self._run(_logprobs, logits[rows], labels[rows])

    def to_gradient_(self, logits: Tensor, part: slice, logprobs: Tensor, upstream: Tensor) -> None:
        """Overwrites logits [n, V] of a part of the labels with the gradient by them; log-probs
        and upstream are float32 [n]."""
        labels = self.labels[part, None]
        for rows in self._blocks(logits):
            numbers = logprobs[rows, None], upstream[rows, None]
            of_labels = self._run(_gradient_, logits[rows], labels[rows], *numbers)
            logits[rows].scatter_(-1, labels[rows], of_labels)

    def _run(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        run = _compiled(function) if self.fused else function
        return run(*tensors, self.transform, self.temperature)

    def _blocks(self, logits: Tensor) -> Iterator[slice]:
        if self.fused:
            return iter([slice(0, len(logits))])
        # On the CPU a block fits the cache; on a GPU it is worth the launch of a kernel.
        numbers = 1 << 21 if logits.device.type == "cpu" else 1 << 24
        return _slices(len(logits), max(1, numbers // logits.shape[1]))


def _logprobs(
    logits: Tensor, labels: Tensor, transform: LogitTransform, temperature: float
) -> Tensor:
    """Returns the log-probs, float32 [n], of labels [n, 1]."""
    scaled = transform(logits.float()) / temperature
    return scaled.log_softmax(-1).gather(-1, labels).squeeze(-1)


def _gradient_(
    logits: Tensor,
    labels: Tensor,
    logprobs: Tensor,
    upstream: Tensor,
    transform: LogitTransform,
    temperature: float,
) -> Tensor:
    """Overwrites logits [n, V] with the gradient by them, wrong at the labels [n, 1]; returns the
    right one there, [n, 1].

    The softmax's divisor follows from the label's logit and log-prob, so nothing is summed over the
    vocabulary again.
    """
    of_labels = transform(logits.gather(-1, labels).float())
    log_divisor = of_labels / temperature - logprobs
    factor = upstream / temperature
    transformed = transform(logits.float())
    probabilities = (transformed / temperature).sub_(log_divisor).exp_()
    logits.copy_(probabilities.mul_(-factor * transform.slope(transformed)))
    return (-torch.expm1(logprobs) * factor * transform.slope(of_labels)).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, softmax: _Softmax
    ) -> Tensor:
        logprobs = torch.empty(len(hidden), device=hidden.device)
        buffer = _buffer(hidden, weight, softmax.chunk_tokens)
        for part in _slices(len(hidden), softmax.chunk_tokens):
            logits = _logits(hidden[part], weight, bias, buffer)
            softmax.logprobs(logits, part, out=logprobs[part])
        ctx.save_for_backward(hidden, weight, bias, logprobs)
        ctx.softmax = softmax
        ctx.buffer = buffer  # freed with the node, at once if no input needs a gradient
        return logprobs

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("token_logprobs has no second derivative: leave create_graph out")
        hidden, weight, bias, logprobs = ctx.saved_tensors
        chunk_tokens = ctx.softmax.chunk_tokens
        by_hidden, by_weight, by_bias = (
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        )
        # The buffer is overwritten here, so a second pass over a retained graph computes every
        # chunk again.
        kept, ctx.buffer = ctx.buffer, None
        buffer = _buffer(hidden, weight, chunk_tokens) if kept is None else kept
        for part in reversed(list(_slices(len(hidden), chunk_tokens))):
            rows = hidden[part]
            logits = _logits(rows, weight, bias, buffer) if kept is None else buffer[: len(rows)]
            kept = None
            ctx.softmax.to_gradient_(logits, part, logprobs[part], upstream[part])
            if by_hidden is not None:
                torch.mm(logits, weight, out=by_hidden[part])
            if by_weight is not None:
                by_weight.addmm_(logits.T, rows)
            if by_bias is not None:
                by_bias.add_(logits.sum(0))
        return by_hidden, by_weight, by_bias, None


def _buffer(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    return weight.new_empty(min(chunk, len(hidden)), len(weight))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Returns hidden @ weight.T + bias, [n, V], in the first rows of the buffer."""
    out = buffer[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.T, out=out)
    return torch.addmm(bias, hidden, weight.T, out=out)


def _slices(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


# ---- of a model


def last_hidden(decoder: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Returns the last hidden state of a micro-batch: [R, L, H]."""
    hidden: Tensor = decoder(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        use_cache=False,
        **varlen.arguments(decoder, micro),
    ).last_hidden_state
    return hidden


def label_logprobs(network: PreTrainedModel, micro: MicroBatch, chunk_tokens: int) -> Tensor:
    """Returns the log-probs of a micro-batch's labels at its temperature: float32 [R, L], nats, 0
    where the mask is false. `chunk_tokens` is as for `token_logprobs`."""
    return head_logprobs(network, last_hidden(decoder_of(network), micro), micro, chunk_tokens)


def head_logprobs(
    network: PreTrainedModel, hidden: Tensor, micro: MicroBatch, chunk_tokens: int
) -> Tensor:
    """Returns the log-probs of `label_logprobs` from the last hidden state."""
    head = network.get_output_embeddings()
    # Mamba's residual stream is float32 whatever the weights are.
    logprobs = token_logprobs(
        micro.of_labels(hidden).to(head.weight.dtype),
        head.weight,
        micro.of_labels(micro.labels),
        bias=getattr(head, "bias", None),
        temperature=micro.temperature,
        transform=LogitTransform.from_config(network.config.get_text_config()),
        chunk_tokens=chunk_tokens,
        fused=getattr(network, FUSED_HEAD, False),
    )
    return micro.at_labels(logprobs)


class LabelLogprobs(nn.Module):
    """`label_logprobs` of a network as a module, which can be sharded as the root."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, micro: MicroBatch, chunk_tokens: int) -> Tensor:
        return label_logprobs(self.network, micro, chunk_tokens)


def decoder_of(network: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a causal language model that computes the last hidden state."""
    decoder = network.get_decoder()
    # Llama 4 and the text side of Mllama name another part as their base, so get_decoder returns
    # the whole.
    return network.model if decoder is network else decoder
