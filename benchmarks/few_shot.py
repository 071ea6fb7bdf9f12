"""The quickstart's problems behind solved ones: prompts as long as a chat's, for timing."""

from __future__ import annotations

import json
from pathlib import Path

from lrl.quickstart.task import problems


def rows(examples: int) -> list[dict[str, str]]:
    """Returns the training rows, the prompt of each behind so many solved problems.

    No two prompts begin alike, so a generator finds none of them in its prefix cache.
    """
    own = problems()
    solved = [f"{row['prompt']}{row['answer']}," for row in own]
    around = solved + solved[:examples]
    return [
        row | {"prompt": "".join(around[index + 1 : index + 1 + examples]) + row["prompt"]}
        for index, row in enumerate(own)
    ]


def write(examples: int, folder: Path) -> Path:
    path = folder / f"few-shot-{examples}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(examples)))
    return path
