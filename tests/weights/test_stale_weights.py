"""Weights that did not arrive under a new version's name, on a real vLLM server.

Covers lrl/weights/proof.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

from lrl.errors import GeneratorError
from lrl.generators.generator import Generator
from lrl.weights.shared_memory import SharedMemory
from tests.lent_server import LentServer
from tests.weights.scene import PolicyInMemory, ProvedScene
from tests.weights.whole_weights import WholeWeights


class StaleScene(ProvedScene):
    """A generator whose syncs may bring stale weights."""

    def __init__(self, server: LentServer, folder: Path) -> None:
        policy = PolicyInMemory(folder)
        super().__init__(
            policy,
            [Generator(server, 8)],
            WholeWeights(policy.network.named_parameters),
            SharedMemory,
            name=f"{server.run_id}-stale",
            prove_every_n_syncs=2,
        )

    def sync(self) -> None:
        """Raises GeneratorError if it is due, and not proved."""
        assert self.syncs.sync_now(self.version) == {}
        self.version += 1
        for why in self.syncs.wait().values():
            raise GeneratorError(why)


@pytest.fixture
def scene(lent_server: LentServer, policy_folder: Path) -> Iterator[StaleScene]:
    found = StaleScene(lent_server, policy_folder)
    yield found
    found.close()


def test_weights_a_hundred_steps_old_are_seen_at_the_sync_that_is_proved(scene: StaleScene) -> None:
    scene.sync()
    stale = copy.deepcopy(scene.policy.network)
    scene.syncs.transport.policy = WholeWeights(stale.named_parameters)
    scene.policy.step(1e-3)  # a hundred steps of 1e-5 in one direction
    scene.sync()
    with pytest.raises(GeneratorError, match="nats a token, and .* is allowed"):
        scene.sync()
