"""Weights that did not arrive under a new version's name, on real vLLM servers.

Covers lrl/weights/proof.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lrl.errors import GeneratorError
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.system.event_loop import LoopThread
from lrl.weights.proof import Proof
from lrl.weights.shared_memory import SharedMemory
from lrl.weights.sync import Sync
from lrl.weights.transport import Policy
from tests.lent_server import LentServer, start_server
from tests.weights.policy_in_memory import PolicyInMemory
from tests.weights.whole_weights import WholeWeights

TOKENS = [5 + (7 * place) % 250 for place in range(64)]


class Stale(SharedMemory):
    """May send what it was told to keep."""

    sends: Policy | None = None

    def stage(self, policy: Policy) -> None:
        super().stage(self.sends or policy)


class Scene:
    """A generator, its syncs, and the proof of each."""

    def __init__(self, server: LentServer, folder: Path) -> None:
        torch.manual_seed(0)
        self.policy = PolicyInMemory(folder)
        self.loop = LoopThread()
        self.version = 0
        self.generator = Generator(server, 8)  # type: ignore[arg-type]
        self.transport = Stale()
        self.syncs = Sync(
            GeneratorPool([self.generator]),
            self.loop,
            lambda: self.transport,
            WholeWeights(self.policy.network.named_parameters),
            self._make_proof,
            name=f"{server.run_id}-stale",
            deadline_s=60.0,
            silence_s=60.0,
            prove_every_n_syncs=2,
        )

    def sync(self) -> None:
        """Raises GeneratorError if it is due, and not proved."""
        assert self.syncs.sync_now(self.version) == {}
        self.version += 1
        for why in self.syncs.wait().values():
            raise GeneratorError(why)

    def _make_proof(self, generators: list[Generator]) -> Proof:
        return Proof(
            self.policy.prompt_logprobs,
            "float32",
            TOKENS,
            generators,
            version=self.version,
            tolerance=None,
            deadline_s=60.0,
        )

    def close(self) -> None:
        self.loop.wait(self.generator.client.close(), 5.0, "closing")
        self.syncs.close()
        self.loop.close()


@pytest.fixture(scope="module")
def half_server(
    policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LentServer]:
    """A server in bfloat16."""
    server = start_server(policy_folder, tmp_path_factory.mktemp("half"), dtype="bfloat16")
    try:
        yield LentServer(server)
    finally:
        server.stop()


@pytest.fixture(params=["lent_server", "half_server"])
def scene(request: pytest.FixtureRequest, policy_folder: Path) -> Iterator[Scene]:
    found = Scene(request.getfixturevalue(request.param), policy_folder)
    yield found
    found.close()


def test_weights_a_hundred_steps_old_are_seen_at_the_sync_that_is_proved(scene: Scene) -> None:
    scene.sync()
    stale = copy.deepcopy(scene.policy.network)
    scene.transport.sends = WholeWeights(stale.named_parameters)
    scene.policy.step(1e-3)  # a hundred steps of 1e-5 in one direction
    scene.sync()
    with pytest.raises(GeneratorError, match="nats a token, and .* is allowed"):
        scene.sync()
