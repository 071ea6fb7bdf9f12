"""The quickstart's task with a calculator: `=` ends a turn, and the calculator writes the sum."""

import re

from lrl.environments import Turns
from lrl.environments.turns import Answer

_SUM = re.compile(r"[0-9]+(?:\+[0-9]+)+=$")
_LONGEST = 3
"""Digits of the display: a sum of two numbers has no more."""


class Calculator(Turns):
    """Writes the sum of the numbers before a `=`, or nothing if there is none. A turn that does not
    end with `=` ends the episode."""

    stop = ("=",)
    deterministic = True

    def reply(self, turn: str) -> Answer:
        """See `Turns.reply`."""
        if not turn.endswith("="):
            return "", True, 0.0
        found = _SUM.search(turn)
        total = sum(map(int, found.group()[:-1].split("+"))) if found else ""
        return str(total)[:_LONGEST], False, 0.0
