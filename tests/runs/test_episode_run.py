"""A whole run with an environment on a real vLLM server, played by a member that is killed.

Covers lrl/rollouts/episodes/environment_of_run.py.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lrl
from lrl.callbacks import Evaluation, RolloutFile
from lrl.members.launchers import Command
from lrl.rewards.pool import EPISODE_KINDS
from lrl.run import Run
from lrl.types import ENVIRONMENT
from lrl.viewer.rollout_file import RolloutIndex
from tests.environments.worlds import Echo
from tests.leftovers import wait_for, words
from tests.lent_server import LentServer
from tests.runs.test_async_run import (
    GROUPS,
    PROMPTS,
    STEPS,
    TEMPERATURE,
    Before,
    fit,
    recomputed,
    spelled,
)
from tests.runs.test_resumed_run import CUT_AT, DEADLINE_S

KIND = {"join", "--kind", "worker"}
"""Words of the command of a member."""


def kill_the_member(run: Run) -> None:
    """Kills the member that plays, in the middle of its episodes."""
    workers = run.data.environment.pool.workers  # type: ignore[union-attr]
    busy = lambda: any(not member.idle for member in workers.members.ready)  # noqa: E731
    wait_for(busy, DEADLINE_S, "an episode of the member")
    (member,) = [one for one in psutil.Process().children() if set(words(one)) >= KIND]
    member.kill()


def test_episodes_are_trained_as_sampled_by_a_member_and_by_the_next_when_it_is_killed(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    held_out = lrl.Prompts(PROMPTS[:4], name="held_out", shuffle=False)
    evaluation = Evaluation(held_out, every_n_steps=100, samples=2, temperature=TEMPERATURE)
    run = fit(
        lent_server,
        policy_folder,
        tmp_path,
        environment=Echo(),
        environment_workers=0,
        worker_launcher=Command(1, "env --unset=LRL_TOKEN {join}"),
        rewards=[],
        max_turn_tokens=20,
        max_lag=1,
        callbacks=[evaluation, RolloutFile(groups=GROUPS), Before({CUT_AT: kill_the_member})],
    )
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    network = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    assert sorted(group.index for _, group in run.groups) == list(range(STEPS * GROUPS))
    turns = 0
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.refresh()
    for step, group in run.groups:
        found = index.read(step, group.index)
        assert found is not None
        for written, rollout in zip(found["responses"], group.rollouts, strict=True):
            assert spelled(written["trained"]) == rollout.mask
            assert [None if one == ENVIRONMENT else one for one in rollout.versions] == spelled(
                written["versions"]
            )
            assert written["turn_ends"] == rollout.turn_ends
            assert len(written["log_ratios"]) == sum(rollout.mask)
        for rollout in group.rollouts:
            turns += len(rollout.turns)
            assert rollout.reward == sum(rollout.turn_rewards) and rollout.failure == ""
            assert [turn.stop for turn in rollout.turns] == rollout.turn_ends
            for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False):
                turn = rollout.token_ids[earlier.start : earlier.stop]
                last = tokenizer.decode(turn, skip_special_tokens=True)[-1:]
                between = rollout.token_ids[earlier.stop : later.start]
                assert tokenizer.decode(between) == f"[{last}]"
                assert set(rollout.versions[earlier.stop : later.start]) == {ENVIRONMENT}
            for version in sorted(set(rollout.policy_versions)):
                assert 0 <= step - version <= 1
                network.load_state_dict(run.weights[version])
                ours = recomputed(network, group.prompt.token_ids, rollout)
                pairs = zip(ours, rollout.logprobs, rollout.versions, strict=True)
                assert all(abs(mine - logp) < 1e-3 for mine, logp, by in pairs if by == version)
    assert turns > 1.5 * sum(len(group.rollouts) for _, group in run.groups)
    for step, report in evaluation.reports:
        assert report.versions == [step] and report.failures == 0 and report.reward > 0
    (*_, last) = sorted(tmp_path.rglob("held_out-step*.jsonl"))
    assert sum("[" in line for line in last.read_text().splitlines()) > 1, "it plays episodes"
    data = run.data
    assert not any(data.reward_pool.counts[kind] for kind in EPISODE_KINDS)
    played = sorted(data.environment.pool.answered_by)
    assert [name.partition(" on ")[0] for name in played] == ["worker 0", "worker 1"]
    said = [(tmp_path / f"env-worker-{number}.log").read_text() for number in (0, 1)]
    assert "serves with" in said[0] and "the run has ended, and so does it" in said[1]
