"""The data module's settings of dispatch, and the parts of a run that get them.

Covers lrl/datamodule.py, lrl/strategies/generator_servers.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lrl
from lrl.routing.dispatch import LeastLoaded, LeastTokens, RoundRobin
from lrl.routing.length_predictor import LengthPredictor
from lrl.routing.migration import Migration
from lrl.strategies.generator_servers import make_fleet
from tests.checkpoints.through_files import through_a_file
from tests.routing.test_length_predictor import answered, make_prompt

ROWS = [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2"}]


def data_module(**settings: Any) -> lrl.RolloutDataModule:
    return lrl.RolloutDataModule(ROWS, [lrl.rewards.ExactMatch()], groups_per_step=2, **settings)


def test_the_rollout_pool_gets_the_policies_of_the_data_module() -> None:
    data = data_module(dispatch=RoundRobin(), migration=Migration())
    strategy = lrl.AsyncSingleDevice()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    fleet = make_fleet(SimpleNamespace(strategy=strategy, data=data), [])  # type: ignore[arg-type]
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


def test_learned_lengths_are_in_the_checkpoint_and_may_be_absent() -> None:
    data, resumed = data_module(dispatch=LeastTokens()), data_module(dispatch=LeastTokens())
    data.learners.end_step(0, [answered(make_prompt(id, id), 10 * id) for id in range(1, 9)])
    state = through_a_file(data.state_dict())
    resumed.load_state_dict(state)
    assert resumed.length_predictor.expected(make_prompt(8, 8)) == pytest.approx(80) != 1
    plain = data_module()
    plain.load_state_dict(state)
    resumed.load_state_dict(through_a_file(plain.state_dict()))
    assert "length_predictor" not in plain.state_dict()
