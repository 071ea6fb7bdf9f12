"""Prompts from reasoning-gym: tasks whose items are made by code, each with a scorer of its own.

Whether an item is held out follows from its question alone. So no question is both trained and
evaluated, also of a task that has few of them, and no two seeds have to be kept apart. The items
are those of the package's seed 0, from the first: a run's seed changes their order and nothing
else.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator
from itertools import accumulate, islice, pairwise
from typing import Any, Literal, get_args

from lrl.errors import ConfigError
from lrl.rewards.reasoning_gym import registered
from lrl.rollouts.prompts import Prompts, TooLong
from lrl.rollouts.source_files import Row
from lrl.system.config_errors import fault, one_of
from lrl.system.import_by_name import did_you_mean

Split = Literal["train", "test"]
Settings = dict[str, Any]

HELD_OUT = 5
"""One question of so many is held out."""
TRIED_TRAINED, TRIED_HELD_OUT = 3, 2 * HELD_OUT
"""Items that are looked at for each row, at most: twice or more what a task without repeated
questions needs."""
WEIGHT = "weight"
RESERVED = {"seed": "the items are always those of seed 0", "size": "it stands beside `tasks`"}


class ReasoningGym(Prompts):
    """Items of one task of reasoning-gym, or a mix of several: Stojanovski et al., 2505.24760.

    A row has the columns `prompt`, `answer` (one right answer), `task`, and two more that the
    reward `lrl.rewards.ReasoningGym` reads: `item`, as the package made it, and its `settings`.

    Args:
        tasks: Name of a task, several names, or a mapping from each name to the task's settings;
            `weight` among these is its share of the rows beside the others', by default 1.
        size: Number of rows.
        split: `train`, or `test` for questions that `train` never has.
        template: Format string for the prompt, as for `lrl.Prompts`.
        system_prompt: System message before the chat.
        chat: Use the tokenizer's chat template: "auto" when it has one, true or false always or
            never.
        shuffle: Whether every epoch has a new order; false keeps one task after the other.
        seed: Seed of the order.
        too_long: What to do with prompts over the token limit: "refuse" to start, or "skip" and
            count them.
        name: Name in metrics and logs; by default the task's, or `reasoning_gym` of a mix.

    Raises:
        ValueError: A setting is outside its range, or the package is missing.
    """

    def __init__(
        self,
        tasks: str | list[str] | dict[str, dict[str, Any] | None],
        *,
        size: int = 1000,
        split: Split = "train",
        template: str | None = None,
        system_prompt: str | None = None,
        chat: bool | Literal["auto"] = "auto",
        shuffle: bool = True,
        seed: int = 0,
        too_long: TooLong = "refuse",
        name: str | None = None,
    ) -> None:
        given = {tasks: None} if isinstance(tasks, str) else tasks
        self.tasks: dict[str, Settings] = {
            task: dict((given[task] if isinstance(given, dict) else None) or {}) for task in given
        }
        """Settings of each task, `weight` included."""
        self.size = size
        one_of("ReasoningGym", split=(get_args(Split), split))
        self._check_tasks()
        super().__init__(
            "reasoning-gym",
            split=split,
            template=template,
            system_prompt=system_prompt,
            chat=chat,
            shuffle=shuffle,
            seed=seed,
            too_long=too_long,
            name=name or (next(iter(self.tasks)) if len(self.tasks) == 1 else "reasoning_gym"),
        )

    def _check_tasks(self) -> None:
        if not self.tasks:
            fault("`tasks` names no task of reasoning-gym.")
        for task, settings in self.tasks.items():
            _check_settings(task, settings)
        if few := [task for task, count in self._counts().items() if count < 1]:
            fault(
                f"`size={self.size}` leaves no row for the task {few[0]}: give more rows, or a "
                "greater weight."
            )

    def _counts(self) -> dict[str, int]:
        """Returns the number of rows of each task; they sum to `size`."""
        weights = [float(settings.get(WEIGHT, 1.0)) for settings in self.tasks.values()]
        ends = [round(self.size * part / sum(weights)) for part in accumulate(weights, initial=0.0)]
        return {
            task: end - start for task, (start, end) in zip(self.tasks, pairwise(ends), strict=True)
        }

    def _source_rows(self) -> Iterator[Row]:
        for task, count in self._counts().items():
            settings = {name: one for name, one in self.tasks[task].items() if name != WEIGHT}
            found = _rows(task, settings, count, held_out=self.split == "test")
            rows = list(islice(found, count))
            if len(rows) < count:
                raise ConfigError(
                    f"The task {task} of reasoning-gym has only {len(rows)} of the {count} rows "
                    f"asked for of the split {self.split}: its questions repeat. Lower `size`, or "
                    "choose settings with more questions."
                )
            yield from rows


def _rows(task: str, settings: Settings, count: int, held_out: bool) -> Iterator[Row]:
    dataset_class, config_class = registered(task)
    tried = (count + HELD_OUT) * (TRIED_HELD_OUT if held_out else TRIED_TRAINED)
    dataset = dataset_class(config_class(**settings, seed=0, size=tried))
    for index in range(tried):
        item = dataset[index]
        if _is_held_out(item["question"]) == held_out:
            yield {
                "prompt": item["question"],
                "answer": item["answer"],
                "task": task,
                "settings": settings,
                "item": item,
            }


def _is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def _check_settings(task: str, settings: Settings) -> None:
    """Raises a ConfigError for an unknown task, or settings that it refuses."""
    _, config_class = registered(task)
    settings = dict(settings)
    weight = settings.pop(WEIGHT, 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"`weight={weight!r}` of the task {task}: it must be a positive number.")
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in settings:
        if name in RESERVED:
            raise ConfigError(f"`{name}` of the task {task}: {RESERVED[name]}. Remove it.")
        if name not in known:
            free = ", ".join(one for one in known if one not in RESERVED)
            raise ConfigError(
                f"The task {task} of reasoning-gym has no setting {name!r}."
                f"{did_you_mean(name, known)} It has {WEIGHT}, {free}."
            )
    try:
        config = config_class(**settings, seed=0, size=1)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        asked = ", ".join(f"{name}={one!r}" for name, one in settings.items())
        raise ConfigError(
            f"The task {task} of reasoning-gym refuses {asked or 'to be made without settings'}: "
            f"{error or type(error).__name__}."
        ) from error
