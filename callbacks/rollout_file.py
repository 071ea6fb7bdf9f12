"""Rollouts of finished steps as `rollouts.jsonl` in the run's folder, for `lrl view`."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from lrl.callbacks.base import OnRankZero, run_of
from lrl.callbacks.rollout_log import reference
from lrl.checkpoints.run_folder import run_folder
from lrl.errors import above, at_least
from lrl.rollouts.policy_text import TokenTexts
from lrl.rollouts.stream import StepStream
from lrl.system.output import best_effort
from lrl.training.prefix_tree import TrainingSample
from lrl.types import ENVIRONMENT, Group, Prompt, Rollout
from lrl.viewer import rollout_file
from lrl.viewer.rollout_file import Record

log = logging.getLogger(__name__)

MB = 2**20
SHOWN_PROMPT = 200
RARE = 16
"""One of so many steps is written when the file is half full: it then has something of every part of
a run."""
DIGITS = 4
"""Digits after the point of a number in the file."""


class RolloutFile(OnRankZero):
    """Writes rollouts of each step to `rollouts.jsonl` in the run's folder, for `lrl view`: every
    token with its text, log-prob, version, ratio and advantage; some 30 bytes a token.

    A run that resumes in the same folder removes the groups that it trains again. From half of
    `max_mb` on it writes one in 16 of its steps.

    Args:
        groups: Groups of a step that are written, spread evenly over the order in which they
            arrived.
        every_n_steps: Optimizer steps between steps that are written.
        max_mb: Most MiB of the file.
    """

    def __init__(self, groups: int = 4, every_n_steps: int = 1, max_mb: float = 256.0) -> None:
        at_least(1, "RolloutFile", groups=groups, every_n_steps=every_n_steps)
        above(0, "RolloutFile", max_mb=max_mb)
        self.groups = groups
        self.every_n_steps = every_n_steps
        self.max_mb = max_mb
        self._texts: TokenTexts | None = None
        self._warned: set[str] = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        path = self.path(trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with best_effort("The file of rollouts", path):
            if removed := rollout_file.truncate(path, trainer.global_step):
                text = "%s: %d groups of step %d and later ones are removed, as they are trained again."
                log.warning(text, path, removed, trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        stream = run_of(trainer).step_stream
        path = self.path(trainer)
        size = path.stat().st_size if path.exists() else 0
        every = self.every_n_steps
        if size > self.max_mb * MB / 2:
            every *= RARE
            self._warn(f"is half full: from now on it gets one in {RARE} of its steps.")
        if stream.step % every:
            return
        text = self._lines(stream, pl_module)
        if size + len(text) > self.max_mb * MB:
            self._warn("has no room for further steps.")
            return
        with best_effort("The file of rollouts", path):
            rollout_file.append(path, text)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning(f"rollouts.jsonl {text} Raise RolloutFile.max_mb, or lower groups.")

    def _lines(self, stream: StepStream, policy: Any) -> str:
        if self._texts is None:
            self._texts = TokenTexts(policy.tokenizer)
        ratios = log_ratios(stream, policy)
        samples: dict[int, list[TrainingSample]] = defaultdict(list)
        for sample in stream.packer.samples:
            samples[id(sample.rollout)].append(sample)
        text = ""
        for group in spread(stream.groups, self.groups):
            of_group = [samples[id(rollout)] for rollout in group.rollouts]
            text += group_lines(group, of_group, ratios, step=stream.step, texts=self._texts)
        return text

    @staticmethod
    def path(trainer: L.Trainer) -> Path:
        return run_folder(trainer) / rollout_file.FILE


def spread(groups: Sequence[Group], count: int) -> list[Group]:
    """Returns `count` groups, evenly spread: the first ones to arrive have the shortest responses."""
    count = min(count, len(groups))
    return [groups[number * len(groups) // count] for number in range(count)]


def log_ratios(stream: StepStream, policy: Any) -> dict[int, dict[int, float]]:
    """Returns the log of pi / mu of each token that this rank has trained, by the `id` of its
    rollout and its place there; empty for a policy whose `compute_loss` keeps no diagnostics."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    passes = policy.diagnostics.log_ratios
    if len(passes) != len(stream.packer.on_first_rank):
        return found
    for samples, (owners, ratios) in zip(stream.packer.on_first_rank, passes, strict=True):
        owners = owners.cpu()
        ratios = ratios.cpu()
        for number, sample in enumerate(samples):
            own = ratios[owners == number].tolist()
            # A `compute_loss` of one's own may measure a part of the tokens, nobody knows which.
            if len(own) == len(sample.trained_places):
                found[id(sample.rollout)].update(zip(sample.trained_places, own, strict=True))
    return found


def group_lines(
    group: Group,
    samples: Sequence[Sequence[TrainingSample]],
    ratios: dict[int, dict[int, float]],
    *,
    step: int,
    texts: TokenTexts,
) -> str:
    """Returns the lines of a group that a step has trained; `samples` has what was trained of each
    response: a sample, one for each branch, or none."""
    responses = [
        response_record(rollout, of_rollout, ratios.get(id(rollout)), texts)
        for rollout, of_rollout in zip(group.rollouts, samples, strict=True)
    ]
    shown = {
        "step": step,
        "index": group.index,
        "prompt_id": group.prompt.id,
        "prompt": group.prompt.text[:SHOWN_PROMPT],
        "responses": [_summary(rollout, step) for rollout in group.rollouts],
    }
    return rollout_file.lines_of(shown, prompt_record(group.prompt, texts), responses)


def _summary(rollout: Rollout, step: int) -> Record:
    versions = rollout.policy_versions
    failure = rollout.failure or rollout.reward_failure or ""
    return {
        "reward": _rounded(rollout.reward),
        "lag": step - min(versions) if versions else None,
        "tokens": rollout.num_tokens,
        "turns": len(rollout.turns),
        "finish_reason": rollout.finish_reason,
        "failure": failure.partition(":")[0],
    }


def prompt_record(prompt: Prompt, texts: TokenTexts) -> Record:
    messages = None
    if prompt.chat is not None:
        shown = ("role", "content")
        messages = [{name: str(one.get(name)) for name in shown} for one in prompt.chat.messages]
    return {
        "text": prompt.text,
        "answer": reference(prompt),
        "messages": messages,
        "token_ids": prompt.token_ids,
        "texts": texts(prompt.token_ids),
    }


def response_record(
    rollout: Rollout,
    samples: Sequence[TrainingSample],
    ratios: dict[int, float] | None,
    texts: TokenTexts,
) -> Record:
    """Returns a response with its tokens; runs of equal values stand once, with their length."""
    places = sorted(place for sample in samples for place in sample.trained_places)
    trained = [False] * len(rollout.token_ids)
    for place in places:
        trained[place] = True
    versions = [None if version == ENVIRONMENT else version for version in rollout.versions]
    return {
        "token_ids": rollout.token_ids,
        "texts": texts(rollout.token_ids),
        "logprobs": list(map(_rounded, rollout.logprobs)),
        "versions": _run_lengths(versions),
        "trained": _run_lengths(trained),
        "log_ratios": None if ratios is None else [_rounded(ratios.get(one)) for one in places],
        "advantages": _run_lengths(_advantages(samples[0])) if samples else None,
        "forks": [list(fork) for fork in rollout.forks],
        "turn_ends": rollout.turn_ends,
        "turn_rewards": list(map(_rounded, rollout.turn_rewards)),
        "reward": _rounded(rollout.reward),
        "parts": {name: _rounded(part) for name, part in rollout.reward_parts.items()},
        "finish_reason": rollout.finish_reason,
        "failure": rollout.failure or rollout.reward_failure or "",
        "text": rollout.text,
    }


def _advantages(sample: TrainingSample) -> list[float | None]:
    values: Tensor = sample.advantages.expand(len(sample.rollout.token_ids))
    return [_rounded(value) for value in values.tolist()]


def _run_lengths(values: Iterable[Any]) -> list[list[Any]]:
    """Returns each value once, with the number of times that it stands in a row."""
    return [[value, len(list(equal))] for value, equal in groupby(values)]


def _rounded(number: float | None) -> float | None:
    """Returns a number of a line; None for one that JSON has not."""
    if number is None or not math.isfinite(number):
        return None
    return round(float(number), DIGITS)
