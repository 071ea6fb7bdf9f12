"""How answers are drawn: the few settings that leave the log-probs true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one request. Nothing that changes the distribution behind the log-probs' back (top-p, penalties) is
    here.

    Args:
        n: Answers per prompt.
        max_tokens: Most tokens of an answer.
        temperature: Logits are divided by it before sampling; 0 is greedy.
    """

    n: int = 1
    max_tokens: int = 1024
    temperature: float = 1.0

    def as_vllm(self, n: int, written: int) -> dict[str, Any]:
        """The `sampling_params` of a request for `n` answers that have `written` tokens already.

        `logprobs: 0` asks for the sampled token's own log-prob. Nobody reads the server's text: without `detokenize:
        false` it decodes every token twice, for the answer and for its log-prob.
        """
        length = {"n": n, "max_tokens": self.max_tokens - written}
        return length | {"temperature": self.temperature, "logprobs": 0, "detokenize": False}
