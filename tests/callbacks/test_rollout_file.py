"""`RolloutFile`: which groups it writes, what a token has, and how large the file gets."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrl.advantages import GroupMean
from lrl.callbacks import RolloutFile
from lrl.callbacks.rollout_file import MB, group_lines, log_ratios, spread
from lrl.objectives import AIPO, Diagnostics, Tokens
from lrl.rollouts.packing import Packer
from lrl.rollouts.policy_text import TokenTexts
from lrl.types import ENVIRONMENT, Fork, Group
from lrl.viewer.rollout_file import RolloutIndex
from tests import made
from tests.tiny_policies import byte_tokenizer

TOKENIZER = byte_tokenizer()
PER_TOKEN = 0.01
"""The policy of these steps raises the log-prob of token k by k times this."""


group = partial(made.group, prompt=(5, 6, 7, 8))
rollout = partial(made.rollout, version=3)


def trained(step: int, groups: Sequence[Group], packer: Packer | None = None) -> tuple[Any, Any]:
    """The stream of a step, and the policy that has trained it."""
    packer = packer or Packer(64, GroupMean(), temperature=1.0)
    diagnostics = Diagnostics(version=step)
    rounds = [each for one in groups for each in packer.add(one)]
    for micro, *_ in (*rounds, *packer.flush()):
        if micro is None:
            continue
        logprobs = micro.behaviour_logprobs + PER_TOKEN * micro.labels
        diagnostics.add(AIPO(), Tokens.select(logprobs, micro, step))
    stream = SimpleNamespace(step=step, groups=list(groups), packer=packer)
    return stream, SimpleNamespace(diagnostics=diagnostics, tokenizer=TOKENIZER)


def run(folder: Path, callback: RolloutFile, steps: Sequence[Sequence[Group]]) -> RolloutIndex:
    """The index of the file of a run with these groups in its steps."""
    data = SimpleNamespace(run=SimpleNamespace())
    trainer: Any = SimpleNamespace(
        loggers=[], default_root_dir=folder, datamodule=data, global_step=0
    )
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]
    for step, groups in enumerate(steps):
        trainer.datamodule.run.step_stream, policy = trained(step, groups)
        callback.on_train_batch_end(trainer, policy)
    index = RolloutIndex(callback.path(trainer))
    index.refresh()
    return index


def test_groups_are_taken_from_the_whole_step() -> None:
    groups = [group(number, rollout([1], 1.0)) for number in range(12)]
    assert [one.index for one in spread(groups, 4)] == [0, 3, 6, 9]
    assert [one.index for one in spread(groups, 99)] == list(range(12))
    assert spread([], 4) == []


@pytest.mark.parametrize("attention_tokens", [0, 10**6])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_token_has_the_ratio_that_the_loss_had(attention_tokens: int, ranks: int) -> None:
    groups = [
        group(0, rollout([11, 12, 13], 1.0), rollout([14], 0.0), rollout([15, 16], 0.0)),
        group(1, rollout([21], 1.0), rollout([22] * 9, None), rollout([23, 24], 0.0)),
        group(2, rollout([31, 32, 33, 34], 1.0, version=0), rollout([35], 0.0)),
    ]
    how = {"data_parallel_size": ranks, "attention_tokens": attention_tokens}
    packer = Packer(16, GroupMean(), temperature=1.0, oldest_version=1, **how)
    stream, policy = trained(3, groups, packer)
    found = log_ratios(stream, policy)
    everything = [one for each in groups for one in each.rollouts]
    known = [one for one in everything if id(one) in found]
    for one in known:
        expected = [PER_TOKEN * token for token in one.token_ids]
        assert list(found[id(one)].values()) == pytest.approx(expected, abs=1e-5)
    # Not: a response without a reward, one that is too old, and those of another rank.
    assert len(known) == 6 if ranks == 1 else 0 < len(known) < 6
    policy.diagnostics.log_ratios = []  # a `compute_loss` of one's own may leave them out
    assert log_ratios(stream, policy) == {}


@pytest.mark.parametrize("attention_tokens", [0, 10**6])
def test_each_token_of_a_branch_stands_once_with_its_own_numbers(
    tmp_path: Path, attention_tokens: int
) -> None:
    branched = rollout([11, 12, 13, 14, 15], 1.0)
    branched.versions[2] = ENVIRONMENT
    branched.turn_ends = [2, 5]
    branched.forks = [Fork(2, 1)]  # 13 follows 11
    groups = [group(0, branched, rollout([16], 0.0))]
    packer = Packer(16, GroupMean(), temperature=1.0, attention_tokens=attention_tokens)
    stream, policy = trained(3, groups, packer)
    samples = [one for one in packer.samples if one.rollout is branched]
    assert len(samples) == 2
    how = {"step": 3, "texts": TokenTexts(TOKENIZER)}
    lines = group_lines(groups[0], [samples, []], log_ratios(stream, policy), **how)
    found = json.loads(lines.splitlines()[2])
    assert found["trained"] == [[True, 2], [False, 1], [True, 2]]
    expected = [PER_TOKEN * token for token in (11, 12, 14, 15)]
    assert found["log_ratios"] == pytest.approx(expected, abs=1e-4)
    assert found["forks"] == [[2, 1]] and found["advantages"] == [[0.5, 5]]


def test_a_number_that_json_has_not_is_none(tmp_path: Path) -> None:
    odd = rollout([11, 12], 1.0)
    odd.logprobs, odd.reward_parts = [float("-inf"), -0.123456], {"right": float("nan")}
    index = run(tmp_path, RolloutFile(), [[group(0, odd, rollout([1], 0.0))]])
    found = index.read(0, 0)
    assert found is not None
    assert found["responses"][0]["logprobs"] == [None, -0.1235]
    assert found["responses"][0]["parts"] == {"right": None}


def test_a_full_file_gets_fewer_steps_loses_none_and_never_passes_its_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = [[group(step, rollout([11] * 9, 1.0), rollout([12], 0.0))] for step in range(200)]
    size = run(tmp_path / "one", RolloutFile(), steps[:1]).path.stat().st_size
    limit = 30 * size
    with caplog.at_level(logging.WARNING):
        index = run(tmp_path / "all", RolloutFile(max_mb=limit / MB), steps)
    written = [one.shown["step"] for one in index.groups]
    assert index.path.stat().st_size <= limit
    assert written[:12] == list(range(12)), "all of them while there is room"
    assert written[-1] == 192, "and some of the end"
    assert "one in 16 of its steps. Raise RolloutFile.max_mb" in caplog.text
    little = run(tmp_path / "little", RolloutFile(max_mb=4.5 * size / MB), steps)
    assert caplog.text.count("has no room for further steps") == 1
    assert 3 * size < little.path.stat().st_size <= 4.5 * size
