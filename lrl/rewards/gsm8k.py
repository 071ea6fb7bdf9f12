r"""Grade-school sums: the answer is one number, and only the number counts.

It is looked for in this order: in the last `\boxed{}`, after the last `#### ` (the data set's own form), anywhere (the
last number then counts). The first form found decides, right or wrong: a box is a commitment.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any

from lrl.rewards.base import Reward
from lrl.rewards.boxed import last_boxed

# The look-ahead changes nothing but makes a search nine times faster. A minus right after a word or a bracket is a
# subtraction ("20-10"), not a sign.
_NUMBER = r"(?=[-.\d])(?:(?<![\w)}\]])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)"
_NOISE = {r"\$": "", "$": "", "{,}": ",", r"\,": "", r"\!": "", "−": "-"}
_UNIT_POWER = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}\s*\^\s*(?:\d|\{\s*-?\d+\s*\})")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?!\d)")
"""Thousands set apart by spaces; only in a box, as elsewhere two numbers may follow one another."""


class GSM8K(Reward):
    r"""1 if the answer's final number is the right one, else 0. Data set: Cobbe et al., 2110.14168.

    Thousands separators, currency and percent signs and trailing zeros do not matter.

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    def __init__(self, weight: float = 1.0, name: str = "gsm8k") -> None:
        super().__init__(weight, name)

    def missing_column(self, columns: Collection[str]) -> str:
        """See `Reward.missing_column`."""
        return "" if "answer" in columns else "'answer'"

    def __call__(self, prompt: str, response: str, *, answer: object = None, **columns: Any) -> float:
        """1.0 or 0.0. `answer` is the gold answer in GSM8K's own form (`... #### 72`), or a bare number.

        Raises:
            ValueError: If the row's `answer` holds no number, or there is no such column.
        """
        gold = final_number(str(answer))
        if gold is None:
            raise ValueError(f"the column `answer` is {answer!r}; it must be a number or end with `#### ` and one")
        return float(final_number(response) == gold)


def final_number(text: str) -> Decimal | None:
    """The number that `text` ends up with, or None; a box counts if it holds exactly one (after its last `=`)."""
    for written, meant in _NOISE.items():
        text = text.replace(written, meant)
    if (boxed := last_boxed(text)) is not None:
        boxed = _SPACED.sub(lambda spaced: "".join(spaced[0].split()), _UNIT_POWER.sub("", boxed.rpartition("=")[2]))
        found = re.findall(_NUMBER, boxed)
        return _decimal(found[0]) if len(found) == 1 else None
    found = re.findall(rf"####\s*({_NUMBER})", text) or re.findall(_NUMBER, text)
    return _decimal(found[-1]) if found else None


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
