"""Checks of the data sets: readable, with the columns that rewards and evaluations read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrl.rewards import Reward
from lrl.rollouts.prompts import Prompts
from lrl.system.config_errors import EXPECTED, fault, noting

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation
    from lrl.datamodule import RolloutDataModule


def check_datasets(data: RolloutDataModule, evaluations: Sequence[Evaluation]) -> list[Prompts]:
    """Reads every data set of the run, which needs no model; returns the usable ones."""
    usable = []
    if data.trains and _check_columns(data.prompts, "data.prompts", data.reward_pool.rewards):
        usable.append(data.prompts)
        check_prompts_per_step(data, len(data.prompts.rows))
    for evaluation in evaluations:
        with noting():
            prompts = evaluation.prompts
            rewards = evaluation.rewards_for_evaluation(data)
            pool = data.reward_pool.like(rewards, workers=1)
            if not _check_columns(prompts, "Evaluation.prompts", pool.rewards):
                continue
            usable.append(prompts)
            if unknown := [column for column in evaluation.by if column not in prompts.columns]:
                fault(
                    f"Evaluation.by names {', '.join(unknown)}, and {prompts.name} has the columns "
                    f"{', '.join(prompts.columns) or 'none'}: name one of them."
                )
    return usable


def check_prompts_per_step(data: RolloutDataModule, count: int) -> None:
    """Checks that a step finds its groups among `count` prompts: all rows, or those that are not
    skipped."""
    if count >= data.groups_per_step:
        return
    skipped = len(data.prompts.rows) - count
    why = (
        f" of at most data.max_prompt_tokens={data.max_prompt_tokens} tokens ({skipped} longer "
        "ones are skipped)"
    )
    fault(
        f"data.groups_per_step is {data.groups_per_step}, and {data.prompts.name} has {count} "
        f"prompts{why if skipped else ''}: no step could have that many. Set it to at most "
        f"{count}, or give more prompts."
    )


def _check_columns(prompts: Prompts, setting: str, rewards: Sequence[Reward]) -> bool:
    """Reads a data set and checks its columns; returns whether it can be read."""
    try:
        prompts.read()
    except EXPECTED as error:
        fault(f"{setting}: {error}")
        return False
    for reward in rewards:
        if column := reward.missing_column(prompts.columns):
            fault(
                f"{setting}: {prompts.name} has no column {column}, which the reward "
                f"{reward.name!r} reads. Its other columns: "
                f"{', '.join(prompts.columns) or 'none'}. Rename one, or choose another reward."
            )
        else:
            _check_rows(prompts, setting, reward)
    return True


def _check_rows(prompts: Prompts, setting: str, reward: Reward) -> None:
    """Checks that the reward can judge a response to every row; names the first one for which it
    cannot."""
    first, count = "", 0
    for number, row in enumerate(prompts.rows):
        columns = {name: value for name, value in row.items() if name != prompts.prompt_column}
        try:
            reward.check_row(columns)
        except ValueError as error:
            first = first or f"row {number} of {prompts.name}: {error}"
            count += 1
    if count:
        more = f" {count} rows are like that." if count > 1 else ""
        fault(
            f"{setting}: the reward {reward.name!r} can judge no response to {first}.{more} "
            "Correct the data, leave such rows out, or choose another reward."
        )
