"""What the data module restores from a checkpoint, and the parts of a run that get its settings."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lrl
from lrl.datamodule import RolloutDataModule
from lrl.rollouts.learners import Replay
from lrl.rollouts.prompts import Prompts
from lrl.routing.dispatch import LeastLoaded, LeastTokens, RoundRobin
from lrl.routing.length_predictor import LengthPredictor
from lrl.routing.migration import Migration
from lrl.types import Group
from tests import made
from tests.checkpoints.through_files import through_a_file
from tests.event_loop import LOOP
from tests.tiny_policies import byte_tokenizer

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
OTHERS = {
    "another seed": (ROWS, {"seed": 1}),
    "the order of the file": (ROWS, {"shuffle": False}),
    "other rows": ([{"prompt": f"{number}+2=", "answer": ""} for number in range(8)], {}),
    "rows in another order": (ROWS[::-1], {}),
    "another template": (ROWS, {"template": "{prompt} "}),
}


def test_a_checkpoint_of_other_prompts_is_refused_although_no_group_of_it_is_open() -> None:
    def with_prompts(rows: list[dict[str, str]], **settings: Any) -> RolloutDataModule:
        data = RolloutDataModule(Prompts(rows, **settings), rewards="tests.odd_lengths:brevity")
        data.prompts.load(byte_tokenizer(), 64)
        return data

    state = {"prompts": with_prompts(ROWS).prompts.fingerprint}
    with_prompts(ROWS).check_prompts(state)
    with_prompts([row | {"answer": "corrected"} for row in ROWS]).check_prompts(state)
    for what, (rows, settings) in OTHERS.items():
        with pytest.raises(ValueError, match="another order of them: data.prompts has changed"):
            with_prompts(rows, **settings).check_prompts(state)
            pytest.fail(what)


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({}, []),
        ({"temperature": 0.5}, ["replay"]),
        ({"rewards": lrl.rewards.ExactMatch()}, ["advantages", "replay"]),
    ],
)
def test_a_resumed_run_says_what_it_does_not_restore(
    settings: dict[str, Any], lost: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def data(**others: Any) -> RolloutDataModule:
        own: dict[str, Any] = {"rewards": "tests.odd_lengths:brevity", "replay": Replay(1, 4)}
        found = RolloutDataModule(
            ROWS, advantages=lrl.advantages.ReinforcePlusPlus(), **own | others
        )
        found.prompts.load(byte_tokenizer(), 64)
        return found

    first = data()
    rollouts = [made.rollout(1, float(number)) for number in range(2)]
    first.learners.end_step(0, [Group(index=3, prompt=first.prompts[3], rollouts=rollouts)])
    resumed = data(**settings)
    resumed.load_state_dict(through_a_file(first.state_dict()))
    said = [record.getMessage().partition(" begins anew")[0] for record in caplog.records]
    assert said == [f"data.{name}" for name in lost]
    assert resumed.replay is not None and len(resumed.replay) == (not settings)


def data_module(**settings: Any) -> lrl.RolloutDataModule:
    return lrl.RolloutDataModule(ROWS, lrl.rewards.ExactMatch(), groups_per_step=2, **settings)


def test_the_rollout_pool_gets_the_policies_of_the_data_module() -> None:
    data = data_module(dispatch=RoundRobin(), migration=Migration())
    strategy = lrl.AsyncSingleDevice()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    fleet = strategy.make_fleet(SimpleNamespace(data=data, loop=LOOP), [])  # type: ignore[arg-type]
    try:
        requests = fleet.rollouts.requests
        assert requests.dispatch is data.dispatch and requests.migration is data.migration
        assert requests.dispatch.lengths is data.length_predictor is not None
    finally:
        fleet.stop()


def test_only_policies_that_need_lengths_get_a_length_predictor() -> None:
    assert data_module().length_predictor is None and isinstance(
        data_module().dispatch, LeastLoaded
    )
    assert data_module(dispatch=RoundRobin()).length_predictor is None
    assert isinstance(data_module(migration=Migration()).length_predictor, LengthPredictor)
    mine = LengthPredictor(seen_prompts=7)
    data = data_module(dispatch=LeastTokens(), length_predictor=mine)
    assert data.length_predictor is mine
