r"""Grade-school arithmetic: the answer is one number, and only the number counts.

It is searched in this order: in the last `\boxed{}`, after the last `#### ` (the form of the data set), then anywhere
(the last number counts). The first form found decides, right or wrong.
"""

import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any

from lrl.rewards.base import Reward
from lrl.rewards.boxed import last_boxed

# The look-ahead changes no result and makes a search nine times faster. A minus right after a word or a bracket is a
# subtraction ("20-10"), not a sign.
_NUMBER = r"(?=[-.\d])(?:(?<![\w)}\]])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)"
_NOISE = {r"\$": "", "$": "", "{,}": ",", r"\,": "", r"\!": "", "−": "-"}
_UNIT_POWER = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}\s*\^\s*(?:\d|\{\s*-?\d+\s*\})")
# Thousands separated by spaces; only in a box, since elsewhere two numbers may follow one another.
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?:\s\d{3})+(?!\d)")


class GSM8K(Reward):
    r"""1 if the final number of the response is the right one, else 0. Data set: Cobbe et al., 2110.14168.

    Thousands separators, currency and percent signs and trailing zeros do not matter.
    """

    name = "gsm8k"

    def missing_column(self, columns: Collection[str]) -> str:
        return "" if "answer" in columns else "'answer'"

    def __call__(self, prompt: str, response: str, *, answer: object = None, **columns: Any) -> float:
        """Returns 1.0 or 0.0. `answer` is the gold answer in the form of GSM8K (`... #### 72`), or a bare number.

        Raises:
            ValueError: The row has no column `answer`, or there is no number in it.
        """
        gold = final_number(str(answer))
        if gold is None:
            raise ValueError(f"the column `answer` is {answer!r}; it must be a number or end with `#### ` and one")
        return float(final_number(response) == gold)


def final_number(text: str) -> Decimal | None:
    """Returns the final number of `text`, or None; a box counts if it holds exactly one (after its last `=`)."""
    for written, meant in _NOISE.items():
        text = text.replace(written, meant)
    if (boxed := last_boxed(text)) is not None:
        boxed = _SPACED.sub(lambda spaced: "".join(spaced[0].split()), _UNIT_POWER.sub("", boxed.rpartition("=")[2]))
        found = re.findall(_NUMBER, boxed)
        found = found if len(found) == 1 else []
    else:
        found = re.findall(rf"####\s*({_NUMBER})", text) or re.findall(_NUMBER, text)
    return Decimal(found[-1].replace(",", "")) if found else None
