"""What answers the policy's turns: a tool that adds."""

import re

from lrl.environments import Turns

SUM = re.compile(r"(\d+)\+(\d+)=$")


class Adder(Turns):
    """Writes the sum before a `=`. A turn that does not end with `=` ends the episode."""

    stop = ("=",)  # tokens that end a turn
    deterministic = True  # the same turns get the same replies, so a resumed run continues them

    def reply(self, turn: str) -> tuple[str, bool, float]:
        """Returns what the policy reads next, whether the episode has ended, and a reward of the
        turn; the reward of the whole response is in rewards.py."""
        if not turn.endswith("="):
            return "", True, 0.0
        found = SUM.search(turn)
        return str(int(found[1]) + int(found[2])) if found else "", False, 0.0
