"""A head tied to the embedding follows every sync: vLLM's CPU build would keep the one it packed at load."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lent_server import LentServer, start_server
from tests.runs.test_async_run import fit
from tests.tiny_policies import tiny_qwen2


@pytest.fixture(scope="module")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen2(tmp_path_factory.mktemp("tied"))


def test_every_sync_of_a_tied_policy_is_proved(tied_policy: Path, tmp_path: Path) -> None:
    server = start_server(tied_policy, tmp_path)
    try:
        witness = fit(LentServer(server), tied_policy, tmp_path, steps=4, max_lag=0)
    finally:
        server.stop()
    head = [weights["lm_head.weight"] for _, weights in sorted(witness.weights.items())]
    assert (head[-1] - head[0]).abs().max() > 1e-3, "the run changed the head, so a probe could tell"
    assert {version for _, rollout in witness.rollouts for version in rollout.versions} == {0, 1, 2, 3}
