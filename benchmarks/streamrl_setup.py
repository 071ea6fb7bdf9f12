"""StreamRL's set-up (2504.15930, section 7) for the simulator: models on H800, lengths, and random
FIFO.

From the paper: seconds per token of a 7B model on an H800 by batch size (figure 6), the models'
shapes and the devices (tables 1 and 2), 1,024 prompts with a response each (PPO), limits of 5, 10
and 20 thousand tokens. Assumed here, because the paper does not say it:

- Generators: 20 of one device for 7B, 10 of 4 for 32B, 10 of 8 for 72B. This is 5/8 of 32, 64 and
  128 devices, the share in figure 10 for 32B and 72B.
- Seconds per token of the other models: in proportion to a device's weights.
- Lengths: lognormal, median an eighth of the limit, sigma 0.9, cut at the limit; about 1 % reach
  it.
- KV cache: 90 % of the memory less the weights; prompts of 512 tokens, prefilled at half of the
  device's FLOP/s.

By default contexts do not slow a decode step down, as in the paper's model (equation 1). As an
option, a step also takes the time to read the keys and values of its responses (table 1: 3.35
TB/s).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lrl.planning.simulator.length_sampling import LengthSampler, Lognormal
from lrl.routing.dispatch import GeneratorLoad, LeastLoaded, Request
from lrl.routing.dispatch.decode_latency import DecodeLatency

PROMPTS = 1024
PROMPT_TOKENS = 512
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PTL_MS = (8.4, 8.7, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 22.0, 37.0)
"""Milliseconds per token of each response of such a batch, 7B on an H800 (figure 6, read off the
plot)."""
H800_BYTES = 80e9
H800_FLOPS = 989.5e12
H800_BYTES_PER_S = 3.35e12
SIGMA = 0.9
RANKER_BLUR = 0.2
"""Noise with which the longest 20 % of these lengths are found at the rate of the paper's ranker
(table 4: 0.87)."""


@dataclass(frozen=True)
class Model:
    """A model and its devices (`GeneratorCosts`)."""

    parameters: float
    layers: int
    devices: int
    generators: int
    reads_contexts: bool = False
    pause_s: float = 0.0

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token: 8 heads of 128 numbers of 2 bytes, for both, in each
        layer."""
        return self.layers * 2 * 8 * 128 * 2

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the rest of 90 % of the memory."""
        return int((0.9 * H800_BYTES * self.devices - 2 * self.parameters) / self.token_bytes)

    @property
    def slower(self) -> float:
        """Ratio of a device's weights to those of the 7B model."""
        return self.parameters / self.devices / 7e9

    def decode_s(self, responses: int, context_tokens: int) -> float:
        """Returns the seconds of figure 6, for this model's weights; and of reading contexts, if
        asked for."""
        by_batch = float(np.interp(responses, BATCH_SIZES, PTL_MS)) / 1e3 * self.slower
        return by_batch + self._reading_s(context_tokens) * self.reads_contexts

    def _reading_s(self, context_tokens: float) -> float:
        return self.token_bytes * context_tokens / (H800_BYTES_PER_S * self.devices)

    def prefill_s(self, tokens: int) -> float:
        """Returns the seconds of two operations for each parameter and token."""
        return 2 * self.parameters * tokens / (0.5 * H800_FLOPS * self.devices)

    def sync_pause_s(self) -> float:
        """See `GeneratorCosts.sync_pause_s`."""
        return self.pause_s

    def decode_latency(self, answer_tokens: float) -> DecodeLatency:
        """Returns the latency model for a dispatch policy, with responses of so many tokens on
        average: they are half written."""
        seven = DecodeLatency()
        reading_ms = 1e3 * self._reading_s(PROMPT_TOKENS + answer_tokens / 2) * self.reads_contexts
        return DecodeLatency(
            seven.step_ms * self.slower, seven.response_ms * self.slower + reading_ms
        )


MODELS = {"7B": Model(7e9, 28, 1, 20), "32B": Model(32e9, 64, 4, 10), "72B": Model(72e9, 80, 8, 10)}


def drawn(longest: int, seed: int) -> LengthSampler:
    """Returns the responses' lengths."""
    return Lognormal(longest / 8, SIGMA, longest, prompt_share=0.0, seed=seed)


class Random(LeastLoaded):
    """Random FIFO: every generator gets as many prompts, chosen at random, and writes them as they
    come."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random(0)
        self._turn: list[int] = []

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int:
        """See `DispatchPolicy.pick`; all have room for all that is sent here."""
        if not self._turn:
            self._turn = self._draw.sample(range(len(generators)), len(generators))
        return self._turn.pop()
