"""The controller's cost: processor time and memory per response, by the number of responses in
flight.

    python -m benchmarks.controller_cost
    python -m benchmarks.controller_cost --in-flight 100 1000 --repeats 3

The real controller, ledger, pacing, dispatch and pool run on the virtual clock. Instead of vLLM, a
client waits for the time of a response and then returns its tokens, without HTTP and JSON. Groups
of 8, one generator for 256 responses, responses of 1 to 4 seconds, equal rewards at once; the
trainer takes groups in the order of arrival. A response counts when it has been admitted,
dispatched, written, scored, finished and handed over. Its time is the process's own processor time,
with and without Python's garbage collector. As in a run (`lrl.strategies.generator_devices`),
objects from before the first step are frozen for the collector. Memory is tracemalloc's count with
all responses in flight and without tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
import tracemalloc
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks import arguments, records
from lrl.generators.generator import Generator, State
from lrl.generators.pool import GeneratorPool
from lrl.planning.simulator.clock import run
from lrl.planning.simulator.run_lengths import fill
from lrl.planning.simulator.simulate import ModelPrompts, NoRewards
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from lrl.types import Rollout, Sampling

RESPONSES = 8
"""Of a group."""
CAPACITY = 256
"""Of a generator."""
TOKENS = 64
"""Of a response."""
HEAD = (
    "| responses in flight | generators | µs per response | spread | without collector | spread | "
    "bytes of each | spread |\n|---|---|---|---|---|---|---|---|"
)


class ModelClient:
    """A model of a generator's client; the responses to a prompt end together, after 1 to 4 s."""

    async def write(
        self, prompt_ids: list[int], rollouts: Sequence[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        """See `GeneratorClient.write`."""
        await asyncio.sleep(1.0 + how["priority"] * 0.618 % 3.0)
        for rollout in rollouts:
            fill(rollout, [(how["version"](), TOKENS)])
            how["ended"]()


def make_controller(in_flight: int, steps: int) -> Controller:
    """Returns a controller with generators that hold version 0; a step has as many responses as are
    in flight."""
    server: Any = SimpleNamespace(url="", name="generator", token="", trust=None)
    generators = [Generator(server, CAPACITY) for _ in range(-(-in_flight // CAPACITY))]
    for generator in generators:
        generator.state = State.SERVING
        generator.version = 0
        generator.client = ModelClient()  # type: ignore[assignment]
    pacing = Pacing(
        prompts_per_epoch=10**9, groups_per_step=in_flight // RESPONSES, max_lag=0, last_step=steps
    )
    prompts, sampling = ModelPrompts(10**9, 1), Sampling(n=RESPONSES)
    return Controller(
        prompts,
        GeneratorPool(generators),
        NoRewards(),
        Ledger(pacing),
        sampling,
        lambda tokens, before: "",
        1e9,
    )


async def seconds(in_flight: int, steps: int, collects: bool) -> float:
    """Returns the processor seconds of so many steps, with or without the garbage collector."""
    controller = make_controller(in_flight, steps)
    gc.collect()
    if not collects:
        gc.disable()
    started = time.process_time()
    for step in range(steps):
        await controller.new_version(step)
        for _ in range(in_flight // RESPONSES):
            await controller.next_group(step)
    gc.enable()
    return time.process_time() - started


async def size(in_flight: int) -> int:
    """Returns the bytes held while so many responses are in flight."""
    controller = make_controller(in_flight, 1)
    gc.collect()
    tracemalloc.start()
    await controller.new_version(0)
    await asyncio.sleep(0.5)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    pool: Any = controller.fleet
    assert (
        sum(generator.in_flight for generator in pool.generators)
        == in_flight // RESPONSES * RESPONSES
    )
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return held


def measure(in_flight: int, responses: int, repeats: int) -> dict[str, Any]:
    """Returns one row: least, median and most of fresh runs."""
    whole = in_flight // RESPONSES * RESPONSES
    steps = max(1, responses // whole)
    run(seconds(in_flight, 1, True))  # whatever is made once is made now
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for collects in times:
            times[collects].append(1e6 * run(seconds(in_flight, steps, collects)) / (steps * whole))
    return {
        "in_flight": whole,
        "generators": -(-in_flight // CAPACITY),
        "responses": steps * whole,
        "repeats": repeats,
        "us_per_answer": spread(times[True]),
        "us_per_answer_without_collector": spread(times[False]),
        "bytes_per_answer": spread([run(size(in_flight)) / whole for _ in range(repeats)]),
    }


def spread(values: Sequence[float]) -> list[float | None]:
    """Returns least, median and most."""
    return [records.rounded(value) for value in (min(values), median(values), max(values))]


def row(record: dict[str, Any]) -> str:
    """Returns a measurement as a line of the table."""
    cells = [f"{record['in_flight']:,}", str(record["generators"])]
    for name, digits in (
        ("us_per_answer", 1),
        ("us_per_answer_without_collector", 1),
        ("bytes_per_answer", 0),
    ):
        least, middle, most = record[name]
        cells += [f"{middle:,.{digits}f}", f"{least:,.{digits}f} to {most:,.{digits}f}"]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each number of responses and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller_cost", description="The controller's cost."
    )
    parser.add_argument(
        "--in-flight",
        nargs="+",
        type=int,
        default=[100, 1000, 10_000],
        help="responses (%(default)s)",
    )
    parser.add_argument(
        "--responses", type=int, default=40_000, help="written in each repeat (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=7, help="fresh runs of each (%(default)s)")
    arguments.add_out(parser, "controller_cost")
    args = arguments.parse(parser, argv)
    print(HEAD)
    gc.collect()
    gc.freeze()
    for in_flight in args.in_flight:
        record = measure(in_flight, args.responses, args.repeats)
        records.append(args.out, record | {"command": args.command})
        print(row(record), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
