"""Syncs by `nccl` from two ranks to real vLLM servers, of which some are lost; gloo stands for the
communicator.

Covers lrl/weights/nccl.py.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.policy import PolicyModule
from lrl.weights import nccl
from tests.leftovers import wait_for
from tests.policies import opened
from tests.weights.nccl_over_gloo import GlooServer, install
from tests.weights.scene import Scene, step
from tests.weights.whole_weights import WholeWeights

STEP = 1e-2
"""Moves a log-prob by far more than a proof allows."""
BUCKET = 2**16
"""Bytes: the policy has half a dozen of them, which end within layers."""
WORKERS = {"one": 1, "two": 2}
"""Workers of each server."""


class Fleet(Scene):
    """A pool whose members come and go."""

    def __init__(self, policy: PolicyModule) -> None:
        parameters = sorted(policy.network.named_parameters())  # as a policy's are
        weights = WholeWeights(lambda: parameters, ranks=2)
        how = {"tolerance": 1e-4, "prove_every_n_syncs": 1}
        super().__init__([], weights, nccl.Nccl, policy, **how)

    def join(self, *servers: GlooServer) -> list[Generator]:
        generators = [Generator(server, 8) for server in servers]
        self.pool.pending += generators
        self.generators += generators
        return generators

    def leave(self, generator: Generator) -> None:
        async def remove() -> None:
            self.pool.remove(generator, "It has left.")

        self.loop.wait(remove(), 60.0, "leaving")

    def sync(self) -> list[Generator]:
        """Syncs a new version; returns the generators that did not get it."""
        step(self.policy, STEP)
        self.version += 1
        failed = self.syncs.sync_now(self.version)
        self.syncs.finish_sync(failed)
        unproved = self.syncs.wait()
        assert unproved == {}, unproved
        return list(failed)


def holds(generator: Generator, version: int) -> bool:
    """Whether it is proved that it has the weights of `version`."""
    return generator.serving and generator.version == version


def broadcasts() -> list[str]:
    """The threads of broadcasts that have not ended."""
    return [thread.name for thread in threading.enumerate() if thread.name == "lrl-nccl-broadcast"]


@pytest.fixture(scope="module")
def servers(
    policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, GlooServer]]:
    """Two servers, started at once."""
    folder, token = tmp_path_factory.mktemp("nccl"), secrets.token_urlsafe(32)
    common: dict[str, Any] = {
        "max_model_len": 160,
        "max_num_seqs": 8,
        "dtype": "float32",
        "kv_cache_gib": 0.1,
    }
    found = {}
    for number, (name, workers) in enumerate(WORKERS.items()):
        settings = ServerSettings(**common, tensor_parallel_size=workers)
        place = (str(policy_folder), settings, "nccl", [], folder, number, token)
        found[name] = GlooServer(*place, told=folder / f"{name}.told")
    try:
        for server in found.values():
            server.start()
        for server in found.values():
            server.wait_ready()
        yield found
    finally:
        for server in found.values():
            server.stop()


@pytest.fixture
def scene(
    servers: dict[str, GlooServer],
    policy_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Fleet]:
    install(tmp_path_factory.mktemp("nccl"), monkeypatch.setattr)
    monkeypatch.setattr(nccl, "BUCKET_BYTES", BUCKET)
    found = Fleet(opened(str(policy_folder), dtype="float32"))
    yield found
    found.close()


def test_generators_join_and_leave_and_each_worker_gets_its_part(
    scene: Fleet, servers: dict[str, GlooServer]
) -> None:
    (one,) = scene.join(servers["one"])
    assert scene.sync() == [] and holds(one, 1)
    (two,) = scene.join(servers["two"])
    assert scene.sync() == [] and holds(one, 2) and holds(two, 2)
    assert scene.sync() == [] and holds(one, 3) and holds(two, 3)
    scene.leave(one)
    assert scene.sync() == [] and holds(two, 4)


def test_a_worker_that_gets_a_wrong_bit_says_so_and_is_evicted(
    scene: Fleet, servers: dict[str, GlooServer]
) -> None:
    (one,) = scene.join(servers["one"])
    assert scene.sync() == [] and holds(one, 1)
    # ranks: the trainer's two, the worker.
    servers["one"].told.write_text("damage 2")
    assert scene.sync() == [one] and "a checksum does not fit" in str(one.eviction)


def test_a_worker_that_is_killed_in_the_middle_of_a_broadcast_costs_those_that_wait_for_it(
    scene: Fleet, servers: dict[str, GlooServer]
) -> None:
    one, two = scene.join(servers["one"], servers["two"])
    assert scene.sync() == [] and holds(one, 1) and holds(two, 1)
    # ranks: the trainer's two, the worker of `one`, both workers of `two`.
    servers["two"].told.write_text("kill 4")
    assert set(scene.sync()) == {one, two} and one.eviction and two.eviction
    assert not servers["two"].told.exists(), "it died in the broadcast"
    wait_for(lambda: not broadcasts(), 60.0, "the end of the threads that sent")
    assert scene.pool.generators == []
