"""A process that asks a judge about many responses at once; it imports no torch."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from lrl.errors import JudgeError
from lrl.rewards import Judge


async def scores_of(judge: Judge, responses: list[str]) -> list[float | str]:
    """Returns the score of each response, or the kind of its failure."""
    found = await asyncio.gather(
        *(judge("", response) for response in responses), return_exceptions=True
    )
    return [one.kind if isinstance(one, JudgeError) else one for one in found]  # type: ignore[misc]


def judged(settings: dict[str, Any], responses: list[str]) -> tuple[list[float | str], bool]:
    """Returns the scores, and whether torch is loaded."""
    return asyncio.run(scores_of(Judge(**settings), responses)), "torch" in sys.modules
