"""Prompts from reasoning-gym: tasks whose items are made by code, each with a scorer of its own.

Whether an item is held out follows from its question alone, so no question is both trained and
evaluated. The items are those of the package's seed 0: a run's seed changes only their order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import accumulate, islice, pairwise
from typing import Any, Literal, get_args

from lrl.errors import ConfigError, one_of
from lrl.rewards.simple import registered
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.sources import Row

Split = Literal["train", "test"]
Settings = dict[str, Any]

HELD_OUT = 5
"""One question of so many is held out."""
TRIED_TRAINED, TRIED_HELD_OUT = 3, 2 * HELD_OUT
"""Most items that are looked at for each row."""


class ReasoningGym(Prompts):
    """Items of one task of reasoning-gym, or a mix of several: Stojanovski et al., 2505.24760.

    A row has the columns `prompt`, `answer` (one right answer), `task`, and two more that the
    reward `lrl.rewards.ReasoningGym` reads: `item`, as the package made it, and its `settings`.

    Args:
        tasks: Name of a task, several names, or a mapping from each name to the task's settings;
            `weight` among these is its share of the rows beside the others', by default 1.
        size: Number of rows.
        split: `train`, or `test` for questions that `train` never has.
        name: Name in metrics and logs; by default the task's, or `reasoning_gym` of a mix.
        settings: The other settings of `lrl.Prompts`, but for its source, columns and limit.
    """

    def __init__(
        self,
        tasks: str | list[str] | dict[str, dict[str, Any] | None],
        *,
        size: int = 1000,
        split: Split = "train",
        name: str | None = None,
        **settings: Any,
    ) -> None:
        given = {tasks: None} if isinstance(tasks, str) else tasks
        self.tasks: dict[str, Settings] = {
            task: dict((given[task] if isinstance(given, dict) else None) or {}) for task in given
        }
        """Settings of each task, `weight` included."""
        self.size = size
        one_of("ReasoningGym", split=(get_args(Split), split))
        super().__init__(
            "reasoning-gym",
            subset=None,
            split=split,
            prompt_column=None,
            limit=None,
            name=name or (next(iter(self.tasks)) if len(self.tasks) == 1 else "reasoning_gym"),
            **settings,
        )

    def _source_rows(self) -> Iterator[Row]:
        weights = [float(settings.get("weight", 1.0)) for settings in self.tasks.values()]
        # They sum to `size`.
        ends = [0, *(round(self.size * part / sum(weights)) for part in accumulate(weights))]
        for task, (start, end) in zip(self.tasks, pairwise(ends), strict=True):
            count = end - start
            settings = {name: one for name, one in self.tasks[task].items() if name != "weight"}
            found = _rows(task, settings, count, held_out=self.split == "test")
            rows = list(islice(found, count))
            if not 0 < len(rows) == count:
                raise ConfigError(
                    f"The task {task} of reasoning-gym gives {len(rows)} of the {count} rows asked "
                    f"for of the split {self.split}. Change `size` or `weight`, or choose settings "
                    "with more questions."
                )
            yield from rows


def _rows(task: str, settings: Settings, count: int, held_out: bool) -> Iterator[Row]:
    dataset_class, config_class = registered(task)
    tried = (count + HELD_OUT) * (TRIED_HELD_OUT if held_out else TRIED_TRAINED)
    try:
        dataset = dataset_class(config_class(**settings, seed=0, size=tried))
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"The task {task} of reasoning-gym: {error}") from error
    for index in range(tried):
        item = dataset[index]
        if (zlib.crc32(item["question"].encode()) % HELD_OUT == 0) == held_out:
            yield {
                "prompt": item["question"],
                "answer": item["answer"],
                "task": task,
                "settings": settings,
                "item": item,
            }
