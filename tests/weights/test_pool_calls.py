"""The calls of a sync, as they reach each generator."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lrl.errors import CollectiveBroken, GeneratorError
from lrl.system.event_loop import LoopThread
from lrl.weights.pool_calls import PoolCalls


class Recorder:
    """The client of one generator; remembers routes and bodies."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        self.error: GeneratorError | None = None
        self.slow = False

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        self.posted.append((route, body))
        if self.error is not None:
            raise self.error
        await asyncio.sleep(30 if self.slow else 0)


class Stand:
    """A generator that is only its server and its client."""

    def __init__(self, server: Any, client: Recorder) -> None:
        self.server = server
        self.client = client
        self.eviction = None


def make_generator(workers: int) -> Any:
    server = SimpleNamespace(settings=SimpleNamespace(tensor_parallel_size=workers))
    return Stand(server, Recorder())


def calls_of(
    generators: list[Any], loop: LoopThread, version: int = 0, **settings: Any
) -> PoolCalls:
    calls = PoolCalls(loop, **{"deadline_s": 5.0, "silence_s": 5.0} | settings)
    calls.version = version
    calls.begin(generators)
    return calls


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    """A running loop."""
    thread = LoopThread()
    yield thread
    thread.close()


def test_every_generator_gets_the_same_call(loop: LoopThread) -> None:
    generators = [make_generator(1), make_generator(1)]
    calls_of(generators, loop).init({})
    assert [generator.client.posted for generator in generators] == [
        [("/init_weight_transfer_engine", {"init_info": {}})]
    ] * 2


def test_a_sync_ends_with_the_version_as_text(loop: LoopThread) -> None:
    generator = make_generator(1)
    calls = calls_of([generator], loop, 12)
    calls.start_update()
    calls.update(lambda one: {"file": "w"})
    calls.finish_update()
    assert generator.client.posted == [
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"file": "w"}}),
        ("/finish_weight_update", {"weight_version": "12"}),
    ]


def test_a_generator_that_fails_a_phase_is_left_out_of_the_next_and_the_others_continue(
    loop: LoopThread,
) -> None:
    generators = [make_generator(1), make_generator(1)]
    generators[1].client.error = GeneratorError(
        "generator 1: /start_weight_update answered 500: no"
    )
    calls = calls_of(generators, loop, 3)
    calls.start_update()
    calls.update(lambda one: {})
    assert [route for route, _ in generators[0].client.posted] == [
        "/start_weight_update",
        "/update_weights",
    ]
    assert [route for route, _ in generators[1].client.posted] == ["/start_weight_update"]
    assert calls.participants == generators[:1]
    (why,) = calls.failed.values()
    assert "/start_weight_update for weight version 3 failed after 0.0 s: generator 1" in why


def test_a_collective_transfer_ends_with_its_first_failure(loop: LoopThread) -> None:
    generators = [make_generator(1), make_generator(1)]
    generators[1].client.error = GeneratorError("generator 1: no")
    with pytest.raises(CollectiveBroken, match="/start_weight_update"):
        calls_of(generators, loop, collective=True).start_update()


def test_an_error_that_is_no_generators_failure_is_raised(loop: LoopThread) -> None:
    generator = make_generator(1)
    generator.client.error = KeyError("a fault of the program")  # type: ignore[assignment]
    with pytest.raises(KeyError):
        calls_of([generator], loop).start_update()


def test_a_call_that_never_ends_names_itself_and_the_version(loop: LoopThread) -> None:
    generator = make_generator(1)
    generator.client.slow = True
    # The loop adds 5 s to what the client is given.
    calls = calls_of([generator], loop, 3, deadline_s=-4.9)
    with pytest.raises(TimeoutError, match="/update_weights for weight version 3"):
        calls.update(lambda one: {})


def test_a_signal_ends_the_wait_for_a_phase(loop: LoopThread) -> None:
    generator = make_generator(1)
    generator.client.slow = True

    def told() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls_of([generator], loop, interrupted=told).update(lambda one: {})
