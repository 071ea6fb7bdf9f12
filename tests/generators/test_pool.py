"""A pool on a virtual clock: its generators' clients are models that write a token of each response
every second.

Covers lrl/generators/generator.py, lrl/routing/request_queue.py.
"""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from lrl.errors import GeneratorError, RequestRejected
from lrl.generators.generator import Generator, GeneratorStats, State
from lrl.generators.pool import Prove
from lrl.planning.clock import run
from lrl.routing.dispatch import GeneratorLoad, LeastLoaded, Request
from lrl.types import Prompt, Rollout, Sampling
from tests.generators.model_fleet import (
    TOKENS,
    Uneven,
    ask,
    gather,
    make_generator,
    make_pool,
    on_a_virtual_clock,
    request,
    resync,
)


def test_a_flush_goes_on_without_a_generator_that_does_not_answer_and_the_log_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, (silent, other) = make_pool(4, 4)
    silent.error = GeneratorError("generator 0: /lrl/flush did not answer within 5 s.")
    asyncio.run(pool.flush())
    assert other.posted == ["flush"] and pool.serving == pool.generators
    assert "are not waited for: generator 0: /lrl/flush" in caplog.text


def test_the_slot_of_an_ended_response_is_free_before_the_longest_of_its_group_ends() -> None:
    pool, (client,) = make_pool(4, clients=[Uneven()])

    async def response(n: int, priority: int) -> None:
        prompt, rollouts = Prompt(id=0, token_ids=[1], text=""), [Rollout() for _ in range(n)]
        await pool.generate(prompt, rollouts, Sampling(n=n), priority=priority, deadline_s=9.0)

    run(gather([response(4, 0), response(2, 1), response(1, 2)]))
    assert [asked.at for asked in client.asked] == [0.0, 2.0, 3.0]
    assert pool.generators[0].in_flight == 0 and not pool.generators[0].load


def test_an_error_of_a_dispatch_policy_is_raised_in_the_waiting_requests() -> None:
    class Broken(LeastLoaded):
        def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
            raise ZeroDivisionError("in the rule")

    pool, _ = make_pool(2, dispatch=Broken())
    with pytest.raises(ZeroDivisionError, match="in the rule"):
        run(ask(pool))


@on_a_virtual_clock
async def test_the_generators_time_is_divided_by_state_and_adds_up() -> None:
    pool, _ = make_pool(2, 2)
    await resync(pool, 0)  # 0.1 s for each of its two calls
    await pool.lap()
    long = asyncio.create_task(ask(pool, seconds=10))
    await ask(pool, seconds=4)
    await resync(pool, 1)
    await long
    await asyncio.sleep(1.0)
    seconds = await pool.lap()
    frozen = 0.2  # the model client writes on through a pause, which is not counted as writing
    assert seconds == pytest.approx(
        {"writing": 10 - frozen + 4, "paused": 2 * frozen, "starved": 1 + 7 - frozen}
    )
    assert sum(seconds.values()) == pytest.approx(2 * 11)


@on_a_virtual_clock
async def test_a_request_chosen_in_the_turn_of_a_drain_waits() -> None:
    class ClosesBehindTheSecond(LeastLoaded):
        sent = 0

        def send(self, generators: Sequence[GeneratorLoad]) -> tuple[Request, int] | None:
            if (chosen := super().send(generators)) is not None:
                self.sent += 1
                if self.sent == 2:
                    pool.generators[0].state = State.DRAINING
            return chosen

    pool, (client,) = make_pool(2, dispatch=ClosesBehindTheSecond())
    questions = [asyncio.create_task(ask(pool)) for _ in range(2)]
    await asyncio.sleep(1000)
    assert len(client.asked) == 1
    await resync(pool, 1)
    await asyncio.wait(questions)
    assert [asked.under for asked in client.asked] == [0, 1]


@pytest.mark.parametrize("turns", range(6))
@on_a_virtual_clock
async def test_a_cancelled_waiting_request_leaves_its_slots_to_others(turns: int) -> None:
    pool, (client,) = make_pool(2)
    questions = [asyncio.create_task(ask(pool, priority=number)) for number in range(4)]
    await asyncio.sleep(0.5)
    await asyncio.sleep(0.5)  # the first is about to end, and the second to be sent
    for _ in range(turns):
        await asyncio.sleep(0)
    questions[1].cancel()
    await asyncio.wait(questions)
    assert {0, 2, 3} <= {asked.priority for asked in client.asked}
    assert pool.generators[0].in_flight == 0 and client.most == 2


@on_a_virtual_clock
async def test_no_request_is_sent_between_a_pause_and_the_resume_under_the_new_version() -> None:
    pool, clients = make_pool(4, 4)
    pausing = [asyncio.create_task(generator.pause()) for generator in pool.generators]
    await asyncio.sleep(0.05)  # a pause is on its way: what comes now would start behind it
    waiting = [asyncio.create_task(ask(pool)) for _ in range(3)]
    await asyncio.wait(pausing)
    await asyncio.sleep(1000)
    assert not clients[0].asked and not clients[1].asked
    await gather([generator.resume(5) for generator in pool.generators])
    await pool.finish_sync({})
    await asyncio.gather(*waiting)
    asked = clients[0].asked + clients[1].asked
    assert [one.under for one in asked] == [5, 5, 5]
    assert clients[1].posted == ["/pause?mode=keep&clear_cache=true", "/resume"]


@on_a_virtual_clock
async def test_an_evaluation_that_follows_a_sync_waits_for_its_end_while_generators_serve() -> None:
    pool, (client,) = make_pool(4)
    await pool.admit_pending()  # a sync begins; while they fetch, generators go on serving
    evaluation = asyncio.create_task(ask(pool, priority=-1, spare=True))
    await asyncio.sleep(10)
    begun = len(client.asked)
    await pool.finish_sync({})
    await evaluation
    assert begun == 0 and len(client.asked) == 1


@on_a_virtual_clock
async def test_spare_places_neither_wait_for_rollouts_nor_take_their_places() -> None:
    pool, (client,) = make_pool(4)
    await gather(
        [
            ask(pool),
            ask(pool),
            ask(pool, priority=-1, spare=True),
            ask(pool, priority=-1, spare=True),
        ]
    )
    assert asyncio.get_running_loop().time() == 1.0
    assert client.most == 8


def test_a_failed_generator_is_left_out_and_another_continues_after_every_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, (first, second) = make_pool(4, 4)
    lost: list[Generator] = []
    pool.on_evicted = lost.append
    failing = pool.generators[0]
    failing.server.log_tail = lambda: "out of memory"  # type: ignore[method-assign]

    async def scene() -> None:
        asking = asyncio.create_task(ask(pool, seconds=9))
        await asyncio.sleep(4.5)
        first.error = GeneratorError("generator 0: the stream broke")
        await asking

    with caplog.at_level(logging.WARNING):
        run(scene())
    # Behind the four tokens they had, each with a prompt of its own.
    assert [(len(one.rollouts), one.had) for one in second.asked] == [(1, 4), (1, 4)]
    assert lost == [failing] and failing.in_flight == 0 and pool.reissued == 2
    assert len(pool.generators) == 1 and failing not in pool.generators
    assert all(text in caplog.text for text in ("the stream broke", "has ended", "out of memory"))


def test_a_request_that_no_generator_accepts_is_an_error_and_evicts_none() -> None:
    pool, (client,) = make_pool(2)
    client.error = RequestRejected("generator 0: /lrl/write answered 400: no such token")
    with pytest.raises(RequestRejected, match="no such token"):
        run(ask(pool))
    assert pool.generators[0].in_flight == 0 and pool.generators[0].serving


@on_a_virtual_clock
async def test_a_replacement_that_fails_before_its_first_sync_does_not_join() -> None:
    pool, _ = make_pool(4)
    newcomer, lost = make_generator(1, 4), list[Generator]()
    pool.on_evicted = lost.append
    pool.pending.append(newcomer)
    pool.evict(newcomer, "its process has ended")
    await pool.admit_pending()
    assert lost == [newcomer] and len(pool.generators) == 1


def fails_for(liar: Generator) -> Prove:
    async def compare(generator: Generator) -> None:
        if generator is liar:
            raise GeneratorError("it does not compute what the policy computes")

    return compare


@pytest.mark.parametrize("event", ["its proof fails", "its process dies", "it leaves"])
@on_a_virtual_clock
async def test_a_finished_rollout_stays_finished_whatever_evicts_its_generator(event: str) -> None:
    pool, _ = make_pool(4, 4, clients=[Uneven(), Uneven()])
    pool.has_served = True
    first, second = pool.generators
    rollouts = [Rollout() for _ in range(3)]
    second.state = State.DRAINING
    prompt, sampling = Prompt(id=0, token_ids=[9], text=""), Sampling(n=3, max_tokens=TOKENS)
    work = pool.generate(prompt, rollouts, sampling, priority=0, deadline_s=9.0)
    asking = asyncio.create_task(work)
    await asyncio.sleep(1.5)
    await first.pause()
    await first.resume(1)
    await asyncio.sleep(0.5)
    match event:
        case "its proof fails":
            await pool.prove([first], fails_for(first))
        case "its process dies":
            pool.evict(first, event)
        case "it leaves":
            pool.remove(first, event)
    assert [rollout.finished for rollout in rollouts] == [True, True, False]
    second.state = State.SERVING
    pool.requests.send_soon()
    await asking
    assert all(rollout.finished for rollout in rollouts)
    assert second.client.asked[0].rollouts == rollouts[2:]  # type: ignore[attr-defined]


@on_a_virtual_clock
async def test_a_cancelled_request_frees_its_slots_and_ends_its_responses() -> None:
    pool, (client,) = make_pool(2)
    first = asyncio.create_task(ask(pool, seconds=10**6))
    await asyncio.sleep(1)
    first.cancel()
    await ask(pool)
    assert len(client.asked) == 2 and not client.open


def test_a_prompt_is_read_once_by_its_request_and_not_before_a_token_of_it() -> None:
    stats = GeneratorStats()
    first, second = Rollout(), Rollout(token_ids=[7, 8])
    shared, continued = stats.begin(request(5, first, Rollout(), second))
    assert stats.snapshot().read == 0
    first.token_ids.append(1)
    assert (stats.snapshot().read, stats.snapshot().written) == (5, 1)
    stats.end([shared])
    second.token_ids += [1, 2]
    assert (stats.snapshot().read, stats.snapshot().written) == (5 + 5 + 2, 3)
    stats.end([continued])
    assert not stats.requests and stats.snapshot().written == 3
    stats.end(stats.begin(request(5, Rollout())))
    assert stats.snapshot().read == 12, "a prompt of which nothing was written was not read"
