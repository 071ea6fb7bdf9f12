"""A fleet with models of server processes: lost generators are replaced, and an outage of all has a
limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from lrl.errors import NoGenerators, ServerError
from lrl.generators.client import GeneratorClient
from lrl.generators.fleet import Fleet
from lrl.system import job_supervisor
from tests.generators.model_fleet import ModelServer
from tests.leftovers import wait_for
from tests.scripted_run import let_requests_succeed


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, list[ModelServer]]]:
    let_requests_succeed(monkeypatch)
    monkeypatch.setattr(job_supervisor, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(job_supervisor, "POLL_S", 0.005)
    servers = [ModelServer(0), ModelServer(1)]
    made = Fleet(servers, capacity=4, heartbeat_s=0.02, outage_timeout_s=0.05)  # type: ignore[arg-type]
    made.start()
    yield made, servers
    made.stop()
    assert not any(server.alive for server in servers)


def test_the_error_of_a_first_request_is_what_the_servers_log_says() -> None:
    made = Fleet([ModelServer(0)], capacity=4, heartbeat_s=0.02, outage_timeout_s=0.05)  # type: ignore[list-item]
    with pytest.raises(ServerError, match="Generator 0 has started, and its first request failed:"):
        made.start()  # nothing answers at its address
    made.stop()


def test_an_ended_process_is_evicted_and_its_replacement_waits_for_a_sync(
    fleet: tuple[Fleet, list[ModelServer]],
) -> None:
    made, servers = fleet
    survivor, lost = made.rollouts.generators
    servers[1].alive = False
    wait_for(lambda: bool(made.rollouts.pending))
    assert made.rollouts.generators == [survivor] and "its process has ended" in (
        lost.eviction or ""
    )
    (replacement,) = made.rollouts.pending
    assert (
        replacement is not lost
        and replacement.server is lost.server
        and replacement in made.generators
    )
    assert not replacement.serving and replacement.version == -1 and made.restarts == 1
    assert len(servers[1].starts) == servers[1].looks == 2


def test_a_replacement_that_fails_is_started_again_after_ever_longer_pauses(
    fleet: tuple[Fleet, list[ModelServer]],
) -> None:
    made, servers = fleet
    servers[1].failing = 3
    servers[1].alive = False
    wait_for(lambda: bool(made.rollouts.pending))
    starts = servers[1].starts
    pauses = [after - before for before, after in zip(starts[1:], starts[2:], strict=False)]
    assert len(starts) == 5 and pauses[0] >= 0.02 and pauses[1] >= 0.04 and pauses[2] >= 0.08


def test_a_run_without_a_generator_logs_it_and_ends_at_the_outage_limit(
    fleet: tuple[Fleet, list[ModelServer]], caplog: pytest.LogCaptureFixture
) -> None:
    made, servers = fleet
    for server in servers:
        server.failing = 10**6
        server.alive = False
    wait_for(lambda: not made.rollouts.generators)
    made.outage_limit.check_outage(made.rollouts)
    # It never served: its first sync is still to come.
    assert "No generator serves" not in caplog.text
    made.rollouts.has_served = True
    made.outage_limit.check_outage(made.rollouts)
    assert "No generator serves; waiting" in caplog.text
    time.sleep(0.06)
    with pytest.raises(NoGenerators, match=r"strategy.generator_timeout_s=0.05.*process has ended"):
        made.outage_limit.check_outage(made.rollouts)


def test_a_request_that_reads_when_the_run_ends_evicts_no_generator(
    fleet: tuple[Fleet, list[ModelServer]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, _ = fleet
    disconnected = asyncio.Event()

    async def close(self: GeneratorClient) -> None:
        disconnected.set()
        await asyncio.sleep(0.05)

    async def read() -> None:
        await disconnected.wait()
        made.rollouts.evict(made.rollouts.generators[0], "Server disconnected")

    monkeypatch.setattr(GeneratorClient, "close", close)
    made.loop.submit(read())
    made.stop()
    assert "is evicted" not in caplog.text
