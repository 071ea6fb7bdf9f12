"""Generators of other processes join and leave a live fleet through its registry; the processes are
models.

Covers lrl/members/run_members.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.errors import GeneratorError, ServerError
from lrl.generators import fleet
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator, State
from lrl.generators.server import JoinedServer
from lrl.generators.settings import ServerSettings
from lrl.members.registry import Kind, Member, Registry, Status
from lrl.planning.clock import run
from lrl.system.endpoint import Location
from tests.event_loop import LOOP
from tests.generators.model_fleet import ModelClient, ModelServer, ask, resync
from tests.leftovers import wait_for
from tests.members.served_run import TOKEN, begin_sync, end_sync, live_fleet, spec_of, sync

SOMEWHERE = Location("http://127.0.0.1:1")


class LiveRun:
    """A fleet of two models of servers, open to others, and a trainer that syncs on request."""

    def __init__(self, fleet: Fleet, registry: Registry) -> None:
        self.fleet = fleet
        self.registry = registry
        self.servers: list[Any] = [generator.server for generator in fleet.generators]

    def joining(self) -> tuple[int, Generator]:
        number = self.speaks(SOMEWHERE)
        wait_for(lambda: bool(self.fleet.rollouts.pending))
        wait_for(lambda: self.status(number) is Status.PENDING)
        return number, self.fleet.rollouts.pending[0]

    def serving(self, version: int = 7) -> tuple[int, Generator]:
        number, generator = self.joining()
        sync(self.fleet, version)
        wait_for(lambda: self.serves(number, version))
        return number, generator

    def speaks(self, location: Location) -> int:
        number = self.registry.claim(Kind.GENERATOR)
        self.registry.register(Kind.GENERATOR, number, location)
        return number

    def member(self, number: int) -> Member:
        return self.registry.view(Kind.GENERATOR, number)

    def status(self, number: int) -> Status:
        return self.member(number).status

    def serves(self, number: int, version: int) -> bool:
        return (self.status(number), self.member(number).version) == (Status.SERVING, version)

    def ask_to_leave(self, number: int) -> str:
        self.registry.ask_to_leave(Kind.GENERATOR, number)
        wait_for(lambda: not self.member(number).leaving)
        return self.member(number).leave_refusal


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveRun]:
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.01)
    registry = Registry(spec_of(generators=2))
    with live_fleet([ModelServer(0, TOKEN), ModelServer(1, TOKEN)], registry, TOKEN) as made:
        yield LiveRun(made, registry)


def test_a_joining_generator_with_a_failed_probe_never_serves_and_is_not_restarted(
    live: LiveRun,
) -> None:
    number, joining = live.joining()
    begin_sync(live.fleet)
    end_sync(live.fleet, 7, failing=joining.name)
    wait_for(lambda: live.status(number) is Status.REFUSED)
    assert live.member(number).why == "it does not compute what the policy does"
    wait_for(lambda: joining not in live.fleet.generators)
    assert joining.served_from is None and live.fleet.alive == 2
    assert (live.fleet.joined, live.fleet.left, live.fleet.restarts) == (0, 0, 0)


def test_an_invalid_certificate_refuses_its_generator_and_no_other(live: LiveRun) -> None:
    number = live.speaks(Location("https://127.0.0.1:1", "no certificate"))
    wait_for(lambda: live.status(number) is Status.REFUSED)
    assert live.joining()[0] == number + 1


def test_a_joined_generator_that_dies_is_lost_and_the_run_starts_nothing(live: LiveRun) -> None:
    number, generator = live.serving()
    live.registry.withdraw(Kind.GENERATOR, number)
    wait_for(lambda: live.status(number) is Status.LOST)
    wait_for(lambda: live.fleet.left == 1)
    assert "its process has ended" in (generator.eviction or "") and len(live.fleet.generators) == 2
    assert live.fleet.restarts == 0 and [server.starts for server in live.servers] == [1, 1]
    assert live.registry.claim(Kind.GENERATOR) == number + 1, "a number is never given twice"


def test_a_generator_that_leaves_stays_out_and_the_run_stops_its_own_server(live: LiveRun) -> None:
    number, joined = live.serving()
    assert live.ask_to_leave(number) == "" and live.status(number) is Status.LEFT
    assert live.ask_to_leave(0) == "" and not live.servers[0].alive and live.servers[1].alive
    assert [one.server.number for one in live.fleet.generators] == [1] and live.fleet.left == 2
    sync(live.fleet, 8)
    assert live.fleet.alive == 1 and live.servers[0].starts == 1
    assert joined.eviction == "generator 2 has left the run."
    assert live.status(number) is Status.LEFT and live.member(number).version == 7, "and not lost"


def test_the_last_serving_generator_and_an_unknown_one_cannot_leave(live: LiveRun) -> None:
    number, _ = live.joining()  # it has not served yet, so the run cannot rely on it
    assert live.ask_to_leave(1) == ""
    assert "the last one that serves" in live.ask_to_leave(0)
    assert live.servers[0].alive and live.fleet.alive == 1
    assert "no generator 9" in live.ask_to_leave(9)
    sync(live.fleet, 7)
    assert live.ask_to_leave(0) == "" and "the last one" in live.ask_to_leave(number)


def test_no_generator_leaves_during_a_sync(live: LiveRun) -> None:
    number, generator = live.serving()
    begin_sync(live.fleet)
    live.registry.ask_to_leave(Kind.GENERATOR, number)
    looks = threading.Event()
    LOOP.loop.call_soon_threadsafe(LOOP.loop.call_later, 0.2, looks.set)
    assert looks.wait(60) and live.member(number).leaving and generator.eviction is None
    end_sync(live.fleet, 8)
    wait_for(lambda: live.status(number) is Status.LEFT)
    assert live.member(number).version == 8


def fleet_with_joined(count: int) -> Fleet:
    fleet = Fleet([ModelServer(0)], LOOP, capacity=4)  # type: ignore[list-item]
    for number in range(1, count + 1):
        server = JoinedServer(number, SOMEWHERE, TOKEN, ServerSettings())
        fleet.generators.append(Generator(server, 4))
    fleet.rollouts.generators = list(fleet.generators)
    for generator in fleet.generators:
        generator.client = ModelClient()  # type: ignore[assignment]
        generator.client.close = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
    return fleet


@pytest.mark.parametrize("dies", [False, True])
def test_a_generator_sends_the_tokens_that_it_holds_before_it_leaves_and_may_die_meanwhile(
    dies: bool,
) -> None:
    async def scene() -> tuple[Fleet, list[State]]:
        fleet, states = fleet_with_joined(1), list[State]()
        leaving = fleet.generators[1]

        async def flush(deadline_s: float) -> None:
            states.append(leaving.state)
            if dies:
                fleet.rollouts.evict(leaving, "it died")

        leaving.client.flush = flush  # type: ignore[method-assign]
        await resync(fleet.rollouts, 0)
        await fleet.remove(leaving)
        return fleet, states

    fleet, states = run(scene())
    assert states == [State.DRAINING] and len(fleet.rollouts.generators) == 1
    fleet.stop()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=12),
    st.lists(st.integers(0, 60), min_size=2, max_size=2),
    st.lists(st.integers(1, 60), max_size=2, unique=True),
)
def test_leaving_loses_no_token_and_no_response(
    groups: list[tuple[int, int]], leaves: list[int], syncs: list[int]
) -> None:
    """Two of three leave at any moment, in quarters of a second; `ask` counts every response's
    tokens."""

    async def scene() -> Fleet:
        fleet = fleet_with_joined(2)
        await resync(fleet.rollouts, 0)
        events = [
            (moment, fleet.remove(one))
            for moment, one in zip(leaves, fleet.generators[1:], strict=True)
        ]
        events += [(moment, resync(fleet.rollouts, moment)) for moment in syncs]

        async def later(moment: int, work: Any) -> None:
            await asyncio.sleep(moment / 4)
            await work

        await asyncio.gather(
            *(ask(fleet.rollouts, n, seconds) for n, seconds in groups),
            *(later(*event) for event in events),
        )
        return fleet

    fleet = run(scene())
    assert len(fleet.generators) == 1 and fleet.left == 2 and fleet.generators[0].in_flight == 0
    fleet.stop()


@pytest.mark.parametrize("fault", ["it ends", "its first request fails"])
def test_a_server_that_fails_while_it_starts_again_is_started_once_more(
    fault: str, live: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = live.servers[0]

    def ready() -> bool:
        if fault == "it ends" and server.starts == 2:
            raise ServerError("Generator 0 ended with exit status 1.")
        return True

    async def answers(generator: Generator, deadline_s: float) -> None:
        if fault == "its first request fails" and generator.server is server and server.starts == 2:
            raise GeneratorError("generator 0 is silent")

    monkeypatch.setattr(server, "ready", ready)
    monkeypatch.setattr(fleet, "answer_of", answers)
    server.alive = False
    wait_for(lambda: live.fleet.restarts == 1)
    assert server.starts == 3
