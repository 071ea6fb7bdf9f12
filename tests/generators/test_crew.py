"""A crew on a virtual clock: its generators' clients are models that write each answer in one second."""

import asyncio
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.data import Prompt, Rollout
from lrl.generators.client import GeneratorError
from lrl.generators.crew import Crew, Generator
from lrl.generators.sampling import Sampling
from lrl.rollouts.dispatch import Dispatch
from tests.virtual_clock import Deadlock, run


class ModelClient:
    """Writes the answers to a prompt in `prompt.token_ids[0]` seconds and records what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, float]] = []
        """(first token of the prompt, version, priority, deadline)"""
        self.posted: list[tuple[str, Any]] = []
        self.writing = self.most = 0
        self.error: GeneratorError | None = None

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, version: int, priority: int, deadline_s: float
    ) -> list[Rollout]:
        self.asked.append((token_ids[0], version, priority, deadline_s))
        self.writing += sampling.n
        self.most = max(self.most, self.writing)
        await asyncio.sleep(token_ids[0])
        self.writing -= sampling.n
        if self.error is not None:
            raise self.error
        return []

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        self.posted.append((route, body))
        await asyncio.sleep(0.1)


def make_crew(*capacities: int, dispatch: Dispatch | None = None) -> tuple[Crew, list[ModelClient]]:
    clients = [ModelClient() for _ in capacities]
    generators = []
    for number, (capacity, client) in enumerate(zip(capacities, clients, strict=True)):
        server: Any = SimpleNamespace(
            url="", name=f"generator {number}", token="", alive=False, log_tail=lambda lines: "CUDA out of memory"
        )
        generator = Generator(server, capacity)
        generator.client = client  # type: ignore[assignment]
        generators.append(generator)
    return Crew(generators, dispatch), clients


def ask(crew: Crew, n: int = 2, seconds: int = 1, priority: int = 0) -> Coroutine[Any, Any, list[Rollout]]:
    prompt = Prompt(id=0, token_ids=[seconds], text="")
    return crew.answer(prompt, Sampling(n=n), priority=priority, deadline_s=9.0)


async def gather(questions: Sequence[Coroutine[Any, Any, Any]]) -> None:
    await asyncio.gather(*questions)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(4, 9), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=20),
)
def test_no_generator_writes_more_than_its_capacity(capacities: list[int], groups: list[tuple[int, int]]) -> None:
    crew, clients = make_crew(*capacities)
    run(gather([ask(crew, n, seconds) for n, seconds in groups]))
    assert all(client.most <= capacity for client, capacity in zip(clients, capacities, strict=True))
    assert sum(len(client.asked) for client in clients) == len(groups)
    assert all(generator.in_flight == 0 for generator in crew.generators)
    assert crew.capacity == sum(capacities)


def test_a_group_larger_than_a_generator_goes_to_an_idle_one_alone() -> None:
    crew, (client,) = make_crew(4)
    run(gather([ask(crew, 2), ask(crew, 8), ask(crew, 2)]))
    assert client.most == 8 and len(client.asked) == 3


def test_the_least_loaded_generator_is_asked() -> None:
    crew, clients = make_crew(8, 8)
    run(gather([ask(crew) for _ in range(6)]))
    assert [len(client.asked) for client in clients] == [3, 3]


def test_what_waits_at_the_door_goes_in_the_order_it_came() -> None:
    crew, (client,) = make_crew(2)
    run(gather([ask(crew, priority=number) for number in range(9)]))
    assert [priority for _, _, priority, _ in client.asked] == list(range(9))


def test_a_closed_door_lets_nothing_through_until_resume_and_then_the_new_version() -> None:
    crew, clients = make_crew(4, 4)

    async def scene() -> None:
        await crew.pause()
        waiting = [asyncio.create_task(ask(crew)) for _ in range(3)]
        await asyncio.sleep(1000)
        assert not clients[0].asked and not clients[1].asked
        await crew.resume(5)
        await gather(waiting)  # type: ignore[arg-type]

    run(scene())
    asked = clients[0].asked + clients[1].asked
    assert [version for _, version, _, _ in asked] == [5, 5, 5]
    assert [route for route, _ in clients[1].posted] == ["/pause?mode=keep", "/resume"]


def test_the_door_is_closed_before_the_generators_are_told_to_pause() -> None:
    crew, (client,) = make_crew(4)

    async def scene() -> None:
        pausing = asyncio.create_task(crew.pause())
        await asyncio.sleep(0.05)  # the pause is on its way: what comes now would start behind it
        waiting = asyncio.create_task(ask(crew))
        await pausing
        assert not client.asked
        waiting.cancel()

    run(scene())


def test_priority_and_deadline_pass_through() -> None:
    crew, (client,) = make_crew(4)
    run(ask(crew, priority=17))
    assert client.asked == [(1, 0, 17, 9.0)]


def spare(crew: Crew) -> Coroutine[Any, Any, list[Rollout]]:
    return crew.spare(Prompt(id=0, token_ids=[1], text=""), Sampling(n=2), priority=-1, deadline_s=9.0)


def test_spare_places_neither_wait_for_rollouts_nor_take_their_places() -> None:
    crew, (client,) = make_crew(4)

    async def scene() -> float:
        await gather([ask(crew), ask(crew), spare(crew), spare(crew)])
        return asyncio.get_running_loop().time()

    assert run(scene()) == 1.0
    assert client.most == 8


def test_spare_places_wait_at_a_closed_door_too() -> None:
    crew, (client,) = make_crew(4)

    async def scene() -> None:
        await crew.pause()
        await spare(crew)

    with pytest.raises(Deadlock):
        run(scene())
    assert not client.asked


def test_a_failure_gives_its_places_back_and_carries_the_servers_log() -> None:
    crew, (client,) = make_crew(2)
    client.error = GeneratorError("generator 0: /inference/v1/generate answered 500: no")

    async def scene() -> list[Any]:
        return await asyncio.gather(ask(crew), ask(crew), return_exceptions=True)

    first, second = run(scene())
    assert "generator 0: /inference" in str(first) and "has ended" in str(first) and "CUDA out of memory" in str(first)
    assert isinstance(second, GeneratorError) and crew.generators[0].in_flight == 0


def test_a_cancelled_answer_gives_its_places_back() -> None:
    crew, (client,) = make_crew(2)

    async def scene() -> None:
        first = asyncio.create_task(ask(crew, seconds=10**6))
        await asyncio.sleep(1)
        first.cancel()
        await ask(crew)

    run(scene())
    assert len(client.asked) == 2


def test_one_body_goes_to_all_and_a_list_one_to_each() -> None:
    crew, clients = make_crew(4, 4)
    run(crew.post("/same", {"version": "1"}))
    run(crew.post("/own", [{"rank": 1}, {"rank": 2}]))
    assert [client.posted for client in clients] == [
        [("/same", {"version": "1"}), ("/own", {"rank": 1})],
        [("/same", {"version": "1"}), ("/own", {"rank": 2})],
    ]
    with pytest.raises(ValueError):
        run(crew.post("/own", [{"rank": 1}]))
