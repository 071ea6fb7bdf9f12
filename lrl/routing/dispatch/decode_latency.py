"""How long a generator takes: StreamRL's model of it (2504.15930, section 5), which rules compare placements with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lrl.runtime.config_errors import above, at_least


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Milliseconds of decoding. Only their ratios matter to a rule.

    The defaults are StreamRL's 7B model on an H800 (figure 6: 8.4 ms for one response, 37 ms for 512; the line meets
    the points between them within 5 %).

    Args:
        step_ms: For the next token, however many responses get one.
        response_ms: On top, for each response that gets one.

    Raises:
        ValueError: A setting is outside its range.
    """

    step_ms: float = 8.4
    response_ms: float = 0.056

    def __post_init__(self) -> None:
        above(0, "decode_latency", step_ms=self.step_ms)
        at_least(0, "decode_latency", response_ms=self.response_ms)

    def per_token(self, responses: int) -> float:
        """PTL(BS): milliseconds in which each of `responses` answers gets one token."""
        return self.step_ms + self.response_ms * responses

    def latency(self, responses: int, tokens: float, capacity: int) -> float:
        """Milliseconds for responses of `tokens` tokens each on one generator (equation 2), in waves of its
        capacity."""
        if responses == 0:
            return 0.0
        at_once = min(responses, capacity)
        return self.per_token(at_once) * tokens * math.ceil(responses / at_once)
