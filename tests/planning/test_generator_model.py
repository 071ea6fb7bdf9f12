"""The event-driven model of a generator against a token-by-token one."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.clock import run
from lrl.planning.costs import LinearGenerator
from lrl.planning.generator_model import ModelGenerator, SimulatedResponse
from lrl.rollouts.timeline import GeneratorRecord

COSTS = LinearGenerator(
    kv_tokens=10_000, step_s=1.0, response_s=0.1, context_token_s=0.01, prefill_token_s=0.001
)


@dataclass
class Asked:
    """A response and the time of its request."""

    at: float
    prompt: int
    length: int


# At no moment at which a decode step of these costs ends: rounding decides such a tie.
moments = st.floats(0, 40).map(lambda at: at + math.pi / 1e4)
asked = st.builds(Asked, moments, st.integers(1, 9), st.integers(1, 30))


def write(
    costs: LinearGenerator, work: list[Asked], syncs: Sequence[float] = ()
) -> tuple[ModelGenerator, list[tuple[float, SimulatedResponse]], list[GeneratorRecord]]:
    """Runs `work` on a generator with syncs at these times; returns it, ends with responses, and
    records."""
    ended: list[tuple[float, SimulatedResponse]] = []
    records: list[GeneratorRecord] = []

    async def scene() -> ModelGenerator:
        loop = asyncio.get_running_loop()
        generator = ModelGenerator(costs, 99, records.append)

        async def ask(one: Asked, number: int) -> None:
            await asyncio.sleep(one.at)
            done = loop.create_future()
            order = (number, number)
            generator.write([SimulatedResponse(one.prompt, one.length, order, done.set_result)])
            response = await done
            ended.append((loop.time(), response))

        async def sync() -> None:
            for version, at in enumerate(sorted(syncs), 1):
                await asyncio.sleep(max(0.0, at - loop.time()))
                await generator.pause()
                await asyncio.sleep(5.0)
                generator.resume(version)

        await asyncio.gather(sync(), *(ask(one, number) for number, one in enumerate(work)))
        generator.end()
        whole_s = generator.busy_s + generator.idle_s + generator.paused_s
        assert whole_s == pytest.approx(loop.time())
        return generator

    return run(scene()), ended, records


def token_by_token(costs: LinearGenerator, work: list[Asked]) -> list[float]:
    """Returns the end of each response, if nothing stops the generator and all fit."""
    now, ends = 0.0, [0.0] * len(work)
    batch = list[list[int]]()  # [place in work, tokens so far]
    coming = sorted(range(len(work)), key=lambda place: work[place].at)
    while coming or batch:
        joining = [place for place in coming if work[place].at <= now]
        if joining:
            now += costs.prefill_s(sum(work[place].prompt for place in joining))
            batch += [[place, 0] for place in joining]
            coming = [place for place in coming if place not in joining]
        elif batch:
            contexts = sum(work[place].prompt + tokens for place, tokens in batch)
            now += costs.decode_s(len(batch), contexts)
            batch = [[place, tokens + 1] for place, tokens in batch]
            for place, tokens in batch:
                if tokens == work[place].length:
                    ends[place] = now
            batch = [[place, tokens] for place, tokens in batch if tokens < work[place].length]
        else:
            now = work[coming[0]].at
    return ends


@settings(max_examples=100, deadline=None)
@given(st.lists(asked, min_size=1, max_size=12))
def test_event_driven_and_token_by_token_models_agree(work: list[Asked]) -> None:
    _, ended, _ = write(COSTS, work)
    ends = {response.order[0]: at for at, response in ended}
    ordered = [ends[number] for number in range(len(work))]
    assert ordered == pytest.approx(token_by_token(COSTS, work))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(asked, min_size=1, max_size=12),
    st.lists(st.floats(0, 60), max_size=4),
    st.integers(40, 90),
)
def test_every_response_gets_its_tokens_once_at_the_models_costs_and_the_kv_cache_never_overflows(
    work: list[Asked], syncs: list[float], kv_tokens: int
) -> None:
    costs = replace(COSTS, kv_tokens=kv_tokens)
    generator, ended, records = write(costs, work, syncs)
    assert sorted(response.length for _, response in ended) == sorted(one.length for one in work)
    for _, response in ended:
        assert sum(tokens for _, tokens in response.versions) == response.length
        versions = [version for version, tokens in response.versions if tokens]
        assert versions == sorted(versions)
    assert generator.tokens == sum(one.length for one in work)
    assert generator.tokens == sum(record.tokens for record in records)
    for record in (one for one in records if one.responses):
        growth = record.tokens - record.responses * (record.tokens / record.responses - 1) / 2
        assert record.context_tokens + growth <= kv_tokens
    assert generator.paused_s == pytest.approx(5.0 * len(syncs))
    assert generator.busy_s == pytest.approx(sum(record.seconds for record in records))
    for record in records:
        steps = record.tokens / record.responses if record.responses else 0
        seconds = steps * (1.0 + 0.1 * record.responses + 0.01 * record.context_tokens)
        assert record.seconds == pytest.approx(seconds + 0.001 * record.prefill_tokens)


def test_the_last_response_is_preempted_first_and_prefilled_again() -> None:
    costs = LinearGenerator(kv_tokens=20, step_s=1.0, prefill_token_s=0.5)
    _, ended, _ = write(costs, [Asked(0.0, 1, 15), Asked(0.0, 1, 15)])
    # Both have 10 tokens of context at 10.0; the second is preempted; at 16.0 its 10 tokens are
    # prefilled in 5.0 s.
    assert [at for at, _ in ended] == [16.0, 16.0 + 5.0 + 6.0]


def test_every_token_has_its_version() -> None:
    costs = LinearGenerator(kv_tokens=1000, step_s=1.0)
    _, [(at, response)], _ = write(costs, [Asked(0.0, 1, 10)], [3.5, 14.0])
    # Four tokens, a pause of 5 s from 4.0, five more from 9.0 to 14.0, a pause, and the last.
    assert response.versions == [(0, 4), (1, 5), (2, 1)] and at == 20.0
