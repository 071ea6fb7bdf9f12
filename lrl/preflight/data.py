"""Checks of what a run reads: the data sets, and the checkpoint that it resumes; and of the
callbacks that monitor what an evaluation gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lrl.checkpoints.checkpoint_file import READ_ERRORS
from lrl.errors import EXPECTED, ConfigError
from lrl.rewards import Reward
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.prompts import Prompts
from lrl.system.import_by_name import did_you_mean

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation
    from lrl.datamodule import RolloutDataModule
    from lrl.run import Run


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
    """Checks that checkpoints and early stopping monitor an evaluation of this run: Lightning would
    end the run at the first one."""
    given = {f"eval/{one.prompts.name}/reward": one for one in evaluations}
    for callback in trainer.callbacks if trainer.state.fn == "fit" else ():
        metric = callback.monitor if isinstance(callback, ModelCheckpoint | EarlyStopping) else None
        if not metric or not metric.startswith("eval/"):
            continue
        of_binary = metric.rpartition("/")[2].startswith(("accuracy", "pass@"))
        gives = (
            metric.startswith(tag.removesuffix("reward")) and (not of_binary or one.is_binary(data))
            for tag, one in given.items()
        )
        if not any(gives):
            known = did_you_mean(metric, given) or f" It gives {', '.join(given) or 'nothing'}."
            raise ConfigError(
                f"{type(callback).__name__}.monitor is {metric!r}, which no lrl.callbacks.Evaluation "
                f"of this run gives.{known}"
            )


def check_checkpoint(run: Run, ckpt_path: str, trained: dict[str, tuple[int, ...]]) -> None:
    """Checks that the checkpoint can be read, and is one of this run: of its `trained` weights and
    its groups. Does not look at one at an address."""
    # Here: most runs begin anew.
    from lrl.checkpoints.checkpoint_folder import META, is_checkpoint_folder, shapes

    # Lightning resolves the words itself.
    words = ("last", "best", "hpc")
    if "://" in ckpt_path or ckpt_path in words or ckpt_path.startswith("registry"):
        return
    named, path = f"--ckpt_path {ckpt_path!r}", Path(ckpt_path)
    in_parts = is_checkpoint_folder(path)
    if not path.exists() or (path.is_dir() and not in_parts):
        raise ConfigError(f"{named}: there is no checkpoint.")
    if in_parts and not run.strategy.resumes_parts:
        raise ConfigError(
            f"{named} is a folder of parts, which only lrl.AsyncFSDP resumes. Train with that, or "
            "begin anew with the policy in it (`lrl export`)."
        )
    try:
        file = path / META if in_parts else path
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        sizes = (
            shapes(path)
            if in_parts
            else {name: weight.shape for name, weight in state["state_dict"].items()}
        )
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{named} is no checkpoint that can be read ({reason:.200}).") from error
    for name, size in trained.items():
        if (found := sizes.get(f"network.{name}")) != size:
            raise ConfigError(
                f"{named} is of another model than model.model={run.policy.model!r}: {name} is "
                f"{list(found or ())} in it and {list(size)} here. Resume with the model, and the "
                "model.lora, it was made with."
            )
    data, module = run.data, type(run.data).__qualname__
    if not data.trains:
        return
    if module not in state:
        raise ConfigError(
            f"{named} has no state of {module}: it is not of a run with this data module."
        )
    ledger = state[module]["ledger"]
    if data.prompts.loaded and ledger is not None:
        Ledger(data.pacing).load_state_dict(ledger, data.prompts.__getitem__)
        data.check_prompts(ledger)
