"""Checks of the data sets, and of the callbacks that evaluate and monitor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lrl.errors import ConfigError
from lrl.evaluation import may_give
from lrl.rewards import Reward
from lrl.rollouts.prompts import Prompts
from lrl.system.config_errors import EXPECTED
from lrl.system.import_by_name import did_you_mean

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation
    from lrl.datamodule import RolloutDataModule


def check_data(data: RolloutDataModule, evaluations: Sequence[Evaluation]) -> list[Prompts]:
    """Reads every data set of the run, which needs no model; returns them."""
    read = []
    if data.trains:
        _check_columns(data.prompts, "data.prompts", data.reward_pool.rewards)
        check_prompts_per_step(data, len(data.prompts.rows))
        read.append(data.prompts)
    for evaluation in evaluations:
        prompts = evaluation.prompts
        rewards = evaluation.rewards_for_evaluation(data)
        _check_columns(prompts, "Evaluation.prompts", data.reward_pool.like(rewards, 1).rewards)
        if unknown := [column for column in evaluation.by if column not in prompts.columns]:
            raise ConfigError(
                f"Evaluation.by names {', '.join(unknown)}, and {prompts.name} has the columns "
                f"{', '.join(prompts.columns)}."
            )
        read.append(prompts)
    return read


def check_prompts_per_step(data: RolloutDataModule, count: int) -> None:
    """Checks that a step finds its groups among `count` prompts: all rows, or those that are not
    skipped."""
    if count < data.groups_per_step:
        raise ConfigError(
            f"data.groups_per_step is {data.groups_per_step}, and {data.prompts.name} has {count} "
            f"prompts of at most data.max_prompt_tokens={data.max_prompt_tokens} tokens. Set it to "
            f"at most {count}."
        )


def _check_columns(prompts: Prompts, setting: str, rewards: Sequence[Reward]) -> None:
    """Reads a data set, and checks that each reward can judge a response to every row."""
    try:
        prompts.read()
    except EXPECTED as error:
        raise ConfigError(f"{setting}: {error}") from error
    for reward in rewards:
        if column := reward.missing_column(prompts.columns):
            raise ConfigError(
                f"{setting}: {prompts.name} has no column {column}, which the reward "
                f"{reward.name!r} reads. Its other columns: {', '.join(prompts.columns) or 'none'}."
            )
        for number, row in enumerate(prompts.rows):
            columns = {name: value for name, value in row.items() if name != prompts.prompt_column}
            try:
                reward.check_row(columns)
            except ValueError as error:
                raise ConfigError(
                    f"{setting}: the reward {reward.name!r} can judge no response to row {number} of "
                    f"{prompts.name}: {error}"
                ) from error


def check_monitors(
    trainer: Any, data: RolloutDataModule, evaluations: Sequence[Evaluation]
) -> None:
    """Checks that checkpoints and early stopping monitor what an evaluation gives: Lightning would
    end the run at the first one."""
    binary = [one.is_binary(data) for one in evaluations]
    given = [
        f"eval/{one.prompts.name}/{'accuracy' if right_or_wrong else 'reward'}"
        for one, right_or_wrong in zip(evaluations, binary, strict=True)
    ]
    for callback in trainer.callbacks if trainer.state.fn == "fit" else ():
        if not isinstance(callback, ModelCheckpoint | EarlyStopping) or callback.monitor is None:
            continue
        metric = callback.monitor
        gives = (
            may_give(metric, one.prompts.name, one.sampling.n, binary=right_or_wrong, by=one.by)
            for one, right_or_wrong in zip(evaluations, binary, strict=True)
        )
        if metric.startswith("eval/") and not any(gives):
            known = did_you_mean(metric, given) or f" It gives {', '.join(given) or 'nothing'}."
            name = type(callback).__name__
            raise ConfigError(
                f"{name}.monitor is {metric!r}, which no lrl.callbacks.Evaluation of this run "
                f"gives.{known}"
            )
