"""Syncs by pull: who fetches what from whom, and what a failure costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.weight_links import Trainer, generators_on, slow_links
from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.vllm_plugin import fetched_files
from lrl.weights import pull
from lrl.weights.parts import FETCH, PARTS
from lrl.weights.pool_calls import Failures, PoolCalls
from lrl.weights.pull import Pull
from lrl.weights.version_file import check_file
from tests.certificates import self_signed
from tests.http_call import call
from tests.leftovers import wait_for
from tests.network_namespace import network_namespace
from tests.weights.fetching_generators import FetchingGenerator, fetching_generators
from tests.weights.scene import Scene, give
from tests.weights.whole_weights import SmallPolicy

SETTINGS = ServerSettings(dtype="bfloat16")
OPEN = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


class PullScene(Scene):
    """Generators that fetch what a policy of a few tensors is."""

    weights: SmallPolicy

    def __init__(self, generators: list[FetchingGenerator]) -> None:
        super().__init__(generators, SmallPolicy(), Pull)
        self.transport: Any = self.syncs.transport

    def move(self, generators: list[FetchingGenerator] | None = None) -> dict[Generator, str]:
        """Makes a step and syncs; returns the generators that failed."""
        self.weights.step()
        self.version += 1
        return give(self.syncs, self.version, generators or self.generators)

    def hold(self, *generators: FetchingGenerator) -> bool:
        """Whether all of them hold exactly the policy."""
        versions = {one.vllm.version for one in generators}
        return versions == {str(self.version)} and all(
            self.weights.is_in(one.vllm.holds) for one in generators
        )


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a generator that failed try again at once."""
    monkeypatch.setattr(fetched_files, "BACKOFF_S", 0.001)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[PullScene]:
    with fetching_generators(getattr(request, "param", 2), SETTINGS) as generators:
        made = PullScene(generators)
        yield made
        made.close()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the transport take each generator as one of a machine of its own."""
    monkeypatch.setattr(pull, "is_here", lambda generator: False)
    monkeypatch.setattr(pull, "machine_of", lambda generator: generator.name)


def test_a_newcomer_gets_the_whole_while_the_others_get_the_delta(
    scene: PullScene, elsewhere: None
) -> None:
    first, newcomer = scene.generators
    scene.move([first])
    size = scene.transport.fetched_bytes
    scene.move()
    assert scene.hold(first, newcomer)
    # The newcomer serves no differences, so the other one takes them all from the trainer.
    assert 2 * size < scene.transport.fetched_bytes < 2.2 * size


def test_a_generator_that_did_not_fetch_stands_still_and_is_retried(
    scene: PullScene, elsewhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "STALL_S", 2.0)
    scene.move()
    healthy, behind = scene.generators
    answers = [OSError("No space left on device"), mock.DEFAULT]
    files = behind.routes.files
    files.fetch = mock.Mock(wraps=files.fetch, side_effect=answers)
    calls = len(behind.vllm.posted)
    assert scene.move() == {} and scene.hold(healthy, behind)
    paused = ["/pause", "/is_paused"]
    again = ["/finish_weight_update", *paused, *OPEN, "/weight_info", "/resume", "/is_paused"]
    assert behind.vllm.posted[calls:] == [*paused, *again]
    assert healthy.vllm.posted.count("/pause") == 2


@pytest.mark.parametrize("scene", [8], indirect=True)
def test_each_block_leaves_the_trainer_once_however_many_machines_fetch(
    scene: PullScene, elsewhere: None
) -> None:
    for _ in range(2):
        sent, fetched = scene.transport.sent_bytes, scene.transport.fetched_bytes
        assert scene.move() == {} and scene.hold(*scene.generators)
        sent, fetched = scene.transport.sent_bytes - sent, scene.transport.fetched_bytes - fetched
        assert fetched == 8 * sent > 0


def test_generators_of_one_machine_load_one_file(scene: PullScene) -> None:
    first, second = scene.generators
    assert scene.move() == {} and scene.hold(first, second)
    assert first.routes.files._whole is not None and second.routes.files._whole is None
    size = scene.transport.fetched_bytes
    first.die()
    assert list(scene.move([second])) == [] and scene.hold(second)
    assert scene.transport.fetched_bytes == 2 * size, "without the other one it fetches by itself"
    assert scene.weights.staging.parts.keys() == {"run-0"}, "the trainer keeps one version"


def test_neither_route_of_a_generator_answers_without_the_token(scene: PullScene) -> None:
    scene.move()
    url = scene.generators[0].server.url
    version = scene.transport._checksum
    block = f"{PARTS}{version}/0/0"
    for header in ({}, {"Authorization": "Bearer wrong"}):
        assert call(url, "GET", block, header)[0] == 401
        assert call(url, "POST", FETCH, header, b"{}")[0] == 401
    allowed = {"Authorization": "Bearer secret"}
    assert call(url, "GET", block, allowed)[0] == 200
    places = "0", "../trainer/0/0", "%2e%2e%2ftrainer/0/0", f"{version}/0/x", f"{version}/9/0"
    for place in places:
        assert call(url, "GET", PARTS + place, allowed)[0] == 404
    assert call(url, "GET", f"{PARTS}another/0/0", allowed)[0] == 409, "it may still come"


def test_with_tls_the_trainer_and_its_generators_speak_nothing_else(
    tmp_path: Path, elsewhere: None
) -> None:
    cert, key = self_signed(tmp_path)
    settings = ServerSettings(dtype="bfloat16", tls_cert=cert, tls_key=key)
    with fetching_generators(3, settings) as generators:
        scene = PullScene(generators)
        assert scene.move() == {} and scene.hold(*generators)
        locations = [
            scene.transport._location(scene.transport._served[0], generators[0]),
            *(one.server.location for one in generators),
        ]
        assert all(one.url.startswith("https://") and one.certificate for one in locations)
        assert scene.transport.sent_bytes < scene.transport.fetched_bytes
        scene.close()


def test_another_attempt_at_a_version_keeps_its_delta(scene: PullScene) -> None:
    scene.move()
    scene.move()
    before = dict(scene.weights.staging.parts)
    scene.transport.stage()
    assert scene.weights.staging.parts == before


def test_while_they_fetch_generators_take_requests(scene: PullScene) -> None:
    scene.move()
    serving: list[bool] = []
    distribute = scene.transport.distribute

    def watched(calls: PoolCalls) -> Failures:
        serving.append(all(generator.serving for generator in scene.generators))
        return distribute(calls)

    scene.transport.distribute = watched
    scene.weights.step()
    scene.version += 1
    scene.syncs.sync(scene.version, in_background=True)
    assert scene.syncs.wait() == {} and serving == [True] and scene.hold(*scene.generators)


@pytest.mark.parametrize("whose", ["a generator's", "a trainer rank's"])
def test_a_link_that_is_cut_in_mid_transfer_and_mended_costs_only_time(
    whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_files, "BACKOFF_S", 0.5)  # its attempts outlast the cut
    with network_namespace(), slow_links(4, mbit=100) as machines, ThreadPoolExecutor() as pool:
        trainer, generators = Trainer(machines[:2], 10.0), generators_on(machines[2:])
        checksum = trainer.stage().checksum
        fetches = [
            pool.submit(fetch) for fetch in trainer.fetches(checksum, generators, machines[2:])
        ]
        files = generators[0].routes.files
        wait_for(lambda: files._draft and files._draft.here, what="the first block")
        cut = machines[2 if whose == "a generator's" else 1]
        cut.cut()
        time.sleep(1.0)
        assert not any(fetch.done() for fetch in fetches)
        cut.mend()
        for fetch in fetches:
            check_file(fetch.result(300).file, checksum)
        for staging in trainer.stagings:
            staging.close()
        for generator in generators:
            generator.die()
