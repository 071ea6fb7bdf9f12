"""The quickstart's calculator as a slow tool. The processes of the environment import this file: it
imports little."""

import asyncio

from lrl.environments.turns import Answer
from lrl.quickstart.calculator import Calculator


class SlowCalculator(Calculator):
    """Answers after some seconds; the last turn, too.

    Args:
        seconds: How many.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def reply(self, turn: str) -> Answer:  # type: ignore[override]
        """See `Turns.reply`."""
        await asyncio.sleep(self.seconds)
        return super().reply(turn)
