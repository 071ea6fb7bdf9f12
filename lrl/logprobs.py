"""Log-probs of chosen tokens, without ever holding (tokens x vocabulary) in float32.

A vocabulary of 150,000 and 16,000 answer tokens would take 10 GB in float32, and as much again for the gradient. So the
head runs over chunks of tokens, each recomputed in the backward pass: one chunk's logits are alive at a time, for one
more multiplication.

Logits are computed in the dtype of the weights and turned into float32 for the softmax, as vLLM does; the temperature
divides them after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model does to its logits after the head: scale them (Granite, Cohere), then cap them (Gemma)."""

    scale: float = 1.0
    """Factor on every logit."""
    cap: float | None = None
    """Logits are squeezed into (-cap, cap) by cap * tanh(logit / cap)."""

    @classmethod
    def from_config(cls, config: Any) -> LogitTransform:
        """Read from a Hugging Face text config, by the three names its models use."""
        factor = getattr(config, "logit_scale", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return cls(scale=factor / divisor, cap=getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        """The transformed logits, same shape and dtype."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


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
) -> Tensor:
    """Log-prob of each label: log_softmax(transform(hidden @ weight.T + bias) / temperature)[label].

    Args:
        hidden: [N, H], last hidden state at the position that predicts the label.
        weight: [V, H], the head.
        labels: int64 [N].
        bias: [V], if the head has one.
        temperature: Divides the logits; above 0.
        transform: What the model does to its logits.
        chunk_tokens: Tokens per chunk; chunk_tokens x V float32 numbers are alive at once.

    Returns:
        float32 [N], nats.
    """
    # No tokens still make one (empty) chunk, so the result stays part of the graph.
    chunks = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    recompute = partial(checkpoint, _chunk_logprobs, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recompute(*chunk, weight, bias, temperature, transform) for chunk in chunks])


def _chunk_logprobs(
    hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, transform: LogitTransform
) -> Tensor:
    logits = transform(torch.nn.functional.linear(hidden, weight, bias).float()) / temperature
    return logits.gather(-1, labels[:, None]).squeeze(-1) - logits.logsumexp(-1)
