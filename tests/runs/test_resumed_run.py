"""A run on a real vLLM server that ends in the middle of its responses, and the one that continues
with them."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lrl.callbacks import RolloutFile, RolloutLog
from lrl.training.optimizers import lr_factor
from lrl.types import Rollout
from lrl.viewer.rollout_file import RolloutIndex
from tests.environments.worlds import Echo
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, LEARNING_RATE, STEPS, Witness, data_module, fit

CUT_AT = 2
CAPACITY = 4
"""Responses that the generator writes at once: so few that it is never done, and some are always
half-written."""
DEADLINE_S = 30.0


def half_written(path: Path) -> dict[tuple[int, int], Rollout]:
    """(index, place) -> what a checkpoint has of each response that is not whole; of an episode
    what was recorded, which is at least a turn."""
    running = torch.load(path, weights_only=True)["RolloutDataModule"]["ledger"]["running"]
    found = {}
    for group in running:
        versions = group["versions"].repeat_interleave(group["spans"])
        columns = [
            values.split(group["lengths"])
            for values in (group["token_ids"], group["logprobs"], versions)
        ]
        for place, episode in enumerate(group["episodes"]):
            length = (episode["recorded"] or 0) if episode else len(columns[0][place])
            turn_ends = episode.get("turn_ends", [])
            if length and (turn_ends if episode else not group["finish_reasons"][place]):
                ids, logprobs, wrote = (column[place][:length].tolist() for column in columns)
                found[group["index"], place] = Rollout(
                    token_ids=ids, logprobs=logprobs, versions=wrote, turn_ends=turn_ends
                )
    return found


class CutInTheMiddle(L.Callback):
    """Saves while responses are being written, and ends the run; after another step, if there were
    none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        end = time.monotonic() + DEADLINE_S
        while trainer.global_step >= CUT_AT and time.monotonic() < end:
            trainer.save_checkpoint(self.path)
            if half_written(self.path):
                raise RuntimeError("power cut")
            time.sleep(0.005)


Resumed = tuple[list[tuple[Rollout, Rollout]], Witness, Witness]


def cut_and_resumed(
    server: LentServer, policy: Path, folder: Path, *callbacks: L.Callback, **settings: Any
) -> Resumed:
    """Cuts a run, and resumes it with the callbacks; checks that each group was trained once and
    that each half-written response was continued, and returns these and both witnesses."""
    path, first = folder / "cut.ckpt", Witness()
    cut = [first, RolloutFile(), CutInTheMiddle(path)]
    with pytest.raises(RuntimeError, match="power cut"):
        fit(server, policy, folder, callbacks=cut, max_lag=2, capacity=CAPACITY, **settings)
    resumed = [RolloutFile(), *callbacks]
    rest = fit(
        server, policy, folder, callbacks=resumed, max_lag=2, ckpt_path=str(path), **settings
    )
    trained = [group.index for _, group in [*first.groups, *rest.groups]]
    assert sorted(trained) == list(range(STEPS * GROUPS))
    whole = {group.index: group.rollouts for _, group in rest.groups}
    begun = [(one, whole[index][place]) for (index, place), one in half_written(path).items()]
    for beginning, rollout in begun:
        length, turns = len(beginning.token_ids), len(beginning.turn_ends)
        assert rollout.token_ids[:length] == beginning.token_ids
        assert rollout.logprobs[:length] == beginning.logprobs
        assert rollout.versions[:length] == beginning.versions
        assert rollout.turn_ends[:turns] == beginning.turn_ends
    return begun, first, rest


def test_a_resumed_run_continues_its_half_written_responses_at_the_same_learning_rates(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    begun, first, rest = cut_and_resumed(lent_server, policy_folder, tmp_path, RolloutLog())
    for beginning, whole in begun:
        rest_of_it = whole.versions[len(beginning.versions) :]
        assert rest_of_it and min(rest_of_it) >= CUT_AT
    tokens = sum(len(beginning.token_ids) for beginning, _ in begun)
    assert (rest.resumed.responses, rest.resumed.tokens) == (len(begun), tokens)
    # Linear to 0 at the last step, behind a rise of two.
    expected = [lr_factor("linear", 2, STEPS, step) * LEARNING_RATE for step in range(STEPS)]
    assert [*first.lrs, *rest.lrs] == pytest.approx(expected)
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.refresh()
    trained = [group.index for _, group in [*first.groups, *rest.groups]]
    assert [group.shown["index"] for group in index.groups] == trained, "each group once"
    assert all(
        step - version <= 2 for step, rollout in rest.rollouts for version in rollout.versions
    )


def test_a_resumed_run_continues_its_open_episodes(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"environment": Echo(), "rewards": [], "max_turn_tokens": 20}
    begun, _, rest = cut_and_resumed(lent_server, policy_folder, tmp_path, **settings)
    assert rest.data.environment.pool.counts == Counter({"replayed": len(begun)})


def test_without_a_controller_the_saved_state_is_the_loaded_one() -> None:
    data = data_module()
    state = data.state_dict() | {"ledger": {"steps_done": 3}}
    data.load_state_dict(state)
    assert data.state_dict() == state
