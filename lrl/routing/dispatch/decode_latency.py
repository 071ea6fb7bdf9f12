"""Decode latency of a generator: StreamRL's model (2504.15930, section 5), with which placements
are compared."""

import math
from dataclasses import dataclass

from lrl.system.config_errors import above, at_least


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Milliseconds of decoding; only their ratios matter.

    The defaults are StreamRL's 7B model on an H800 (figure 6: 8.4 ms for one response, 37 ms for
    512; the line meets the points between them within 5 %).

    Args:
        step_ms: Time of a decoding step, however many responses get a token.
        response_ms: Added time for each response of the step.

    Raises:
        ValueError: A setting is outside its range.
    """

    step_ms: float = 8.4
    response_ms: float = 0.056

    def __post_init__(self) -> None:
        above(0, "decode_latency", step_ms=self.step_ms)
        at_least(0, "decode_latency", response_ms=self.response_ms)

    def per_token(self, responses: int) -> float:
        """Returns PTL(BS), the milliseconds of a step in which each of `responses` gets one
        token."""
        return self.step_ms + self.response_ms * responses

    def latency(self, responses: int, tokens: float, capacity: int) -> float:
        """Returns the milliseconds for responses of `tokens` tokens each on one generator of
        `capacity` (equation 2)."""
        if responses == 0:
            return 0.0
        at_once = min(responses, capacity)
        return self.per_token(at_once) * tokens * math.ceil(responses / at_once)
