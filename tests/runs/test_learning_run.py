"""What learning needs beyond a plain run, on a real vLLM server: replay, a reference, adapters, and
steps from which equal groups, failed and cut responses are left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrl
from lrl.callbacks import RolloutLog, Summary
from lrl.callbacks.base import run_of
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, RESPONSES, STEPS, fit


def test_replayed_groups_are_trained_before_and_stay_within_their_own_bound(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "max_lag": 0,
        "replay": lrl.Replay(3, max_lag=2),
        "learning": {
            "objective": lrl.objectives.TBA(beta=0.1),
            "reference": lrl.Reference(refresh_every_n_steps=2),
        },
    }
    witness = fit(lent_server, policy_folder, tmp_path, **settings)
    trained = {group.index: step for step, group in witness.groups}
    assert len(trained) == len(witness.groups), "no group is fresh twice"
    assert [len(drawn) for drawn in witness.replayed[:1] + witness.replayed[2:]] == [0, 3, 3, 3, 3]
    for step, (drawn, metrics) in enumerate(zip(witness.replayed, witness.metrics, strict=True)):
        assert all(trained[group.index] < step for group in drawn)
        oldest = min([step, *(group.oldest_version for group in drawn)])
        assert metrics["policy/lag_max"] == step - oldest <= 2
        assert "policy/kl_reference" in metrics
    assert len(witness.metrics) == STEPS


def test_adapters_are_trained_and_every_sync_of_them_is_proved(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    learning = {"lora": lrl.LoRA(rank=4), "reference": lrl.Reference()}
    witness = fit(lent_server, policy_folder, tmp_path, max_lag=1, learning=learning)
    assert max(version for _, rollout in witness.rollouts for version in rollout.versions) >= 1
    kl = [metrics["policy/kl_reference"] for metrics in witness.metrics]
    assert kl[0] == 0.0 < kl[-1], "the reference is the policy without its adapters"
    assert all(metrics["policy/mismatch_kl"] < 1e-4 for metrics in witness.metrics)


class Skipped(L.Callback):
    """Checks what each step has left out, and remembers the groups that the run has skipped."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        run = run_of(trainer)
        stream: Any = run.step_stream
        lone = stream.packer.discarded_groups  # all other responses have failed
        groups = [group for group in stream.groups if group.index not in lone]
        scored = [rollout for group in groups for rollout in group.scored]
        cut = sum(len(one.token_ids) for one in scored if one.finish_reason == "length")
        assert stream.packer.masked_tokens == cut
        assert stream.num_tokens == sum(len(one.token_ids) for one in scored) - cut
        assert all(len(set(group.rewards)) > 1 for group in groups)
        self.groups = list(run.calls.controller.ledger.skipped)


def test_equal_groups_make_room_for_others_and_failed_responses_leave_the_others_their_rewards(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skipped = Skipped()
    witness = fit(
        lent_server,
        policy_folder,
        tmp_path,
        callbacks=[RolloutLog(), skipped, Summary()],
        steps=4,
        max_lag=1,
        rewards=["tests.odd_lengths:odd_lengths_of_even_sums"],
        max_reward_failures=1.0,
        max_skipped_per_step=60,
        mask_truncated=True,
    )
    done = [*skipped.groups, *(group.index for _, group in witness.groups)]
    assert len(witness.groups) == 4 * GROUPS and sorted(done) == list(range(len(done)))
    last = witness.metrics[-1]
    assert last["rollouts/skipped_groups"] == len(skipped.groups) > 0
    rollouts = [rollout for _, rollout in witness.rollouts]
    even = [rollout for rollout in rollouts if len(rollout.text) % 2 == 0]
    assert len(rollouts) == 4 * GROUPS * RESPONSES and 0 < len(even) < len(rollouts)
    for rollout in rollouts:
        if rollout in even:
            assert rollout.reward is None and rollout.reward_failure.startswith("nan: ")
        else:
            assert rollout.reward == float(len(rollout.text))
    # Groups that are skipped, or of the next step, which is never trained, are counted, too.
    assert last["rewards/nan"] == last["rewards/retried"] >= len(even)
    assert re.search(r"without a reward +│ nan [1-9]", capsys.readouterr().out)
    assert not {"rewards/crash", "rewards/replaced"} & last.keys()
