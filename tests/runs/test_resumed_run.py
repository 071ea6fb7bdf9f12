"""A run on a real vLLM server that ends in the middle of its responses, and the one that continues
with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lrl.callbacks import RolloutFile, RolloutLog
from lrl.callbacks.base import run_of
from lrl.training.optimizers import lr_factor
from lrl.viewer.rollout_file import RolloutIndex
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, LEARNING_RATE, STEPS, Witness, data_module, fit

CUT_AT = 2
CAPACITY = 4
"""Responses that the generator writes at once: so few that it is never done, and some are always
half-written."""
DEADLINE_S = 30.0


def half_written(path: Path) -> dict[tuple[int, int], tuple[list[int], list[float], list[int]]]:
    """(index, place) -> tokens, log-probs and versions of each response that a checkpoint has the
    beginning of."""
    running = torch.load(path, weights_only=True)["RolloutDataModule"]["ledger"]["running"]
    found = {}
    for group in running:
        versions = group["versions"].repeat_interleave(group["spans"])
        columns = (
            values.split(group["lengths"])
            for values in (group["token_ids"], group["logprobs"], versions)
        )
        for place, answer in enumerate(zip(*columns, group["finish_reasons"], strict=True)):
            if len(answer[0]) and not answer[3]:
                found[group["index"], place] = tuple(column.tolist() for column in answer[:3])
    return found


class CutInTheMiddle(L.Callback):
    """Saves while responses are being written, and ends the run; after another step, if there were
    none."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step < CUT_AT:
            return
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            trainer.save_checkpoint(self.path)
            if half_written(self.path):
                raise RuntimeError("power cut")
            time.sleep(0.005)


class Beginning(L.Callback):
    """Remembers what the run has resumed."""

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.resumed: Any = run_of(trainer).calls.controller.resumed


def test_a_resumed_run_continues_its_half_written_responses_at_the_same_learning_rates(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    path, first, told = tmp_path / "cut.ckpt", Witness(), Beginning()
    with pytest.raises(RuntimeError, match="power cut"):
        fit(
            lent_server,
            policy_folder,
            tmp_path,
            callbacks=[first, RolloutFile(), CutInTheMiddle(path)],
            max_lag=2,
            capacity=CAPACITY,
        )
    begun = half_written(path)
    rest = fit(
        lent_server,
        policy_folder,
        tmp_path,
        callbacks=[RolloutLog(), RolloutFile(), told],
        max_lag=2,
        ckpt_path=str(path),
    )
    written = {
        (group.index, place): rollout
        for _, group in rest.groups
        for place, rollout in enumerate(group.rollouts)
    }
    for answer, (token_ids, logprobs, versions) in begun.items():
        rollout, length = written[answer], len(token_ids)
        assert rollout.token_ids[:length] == token_ids and len(rollout.token_ids) > length
        assert rollout.logprobs[:length] == logprobs and rollout.versions[:length] == versions
        assert all(version >= CUT_AT for version in rollout.versions[length:])
    tokens = sum(len(token_ids) for token_ids, _, _ in begun.values())
    assert (told.resumed.responses, told.resumed.tokens) == (len(begun), tokens)
    trained = [group.index for _, group in [*first.groups, *rest.groups]]
    assert sorted(trained) == list(range(STEPS * GROUPS))
    # Linear to 0 at the last step, behind a rise of two.
    expected = [lr_factor("linear", 2, STEPS, step) * LEARNING_RATE for step in range(STEPS)]
    assert [*first.lrs, *rest.lrs] == pytest.approx(expected)
    index = RolloutIndex(tmp_path / "rollouts.jsonl")
    index.refresh()
    assert [group.shown["index"] for group in index.groups] == trained, "each group once"
    assert all(
        step - version <= 2 for step, rollout in rest.rollouts for version in rollout.versions
    )


def test_without_a_controller_the_saved_state_is_the_loaded_one() -> None:
    data = data_module()
    state = data.state_dict() | {"ledger": {"steps_done": 3}}
    data.load_state_dict(state)
    assert data.state_dict() == state
