"""What a fleet costs rank 0: the share of a core that controller and client take, by the number of
generators.

    python -m benchmarks.fleet_size
    python -m benchmarks.fleet_size --generators 1 4 --simulated 16 --seconds 5     a rehearsal

*Over HTTP*: the real controller, ledger, pacing, dispatch and client of a run, against stand-ins
for generators (`benchmarks.stub_generators`) in other processes. Each writes 128 responses at once
in groups of 8, 40 tokens a second of each, with lognormal lengths; groups are taken as they finish,
and after each step every generator gets the requests of a sync. A share is this process's own
processor time over the time of the clock, so the processor time of the stand-ins does not count,
but on a machine with few cores they slow down what is measured at its upper end.

*Simulated*: the same controller on a virtual clock with models of as many generators as are asked
for, a sync whose fetch takes what `benchmarks.fan_out` gives for 16 GB over 100 Gbit/s, and the
same lengths. That gives tokens a second; the share is this times the processor time of a token with
the most generators over HTTP, and in place of that run's controller the simulation's own processor
time, which has the models in it.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from benchmarks import arguments, records
from benchmarks.fan_out import simulate as fan_out
from benchmarks.stub_generators import lengths
from lrl.generators.generator import Generator, State
from lrl.generators.pool import GeneratorPool
from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.planning.simulator.simulate import NoRewards, Simulation
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from lrl.types import Prompt, Sampling

RESPONSES = 8
CAPACITY = 128
RATE = 40.0
"""Of a group; at once in a generator; tokens a second of each."""
PROMPT_TOKENS = 256
STUB_PROCESSES = 2
WARM_UP_S = 40.0
"""Nearly all of the first responses have ended by then."""
SYNC_ROUTES = ("/pause", "/update_weights", "/update_weight_version", "/resume")
"""What a sync asks of each generator."""
GIGABYTES, GBIT = 16.0, 100.0
LAG = 2
HEAD = (
    "| generators | responses in flight | tokens a second | µs of rank 0 a token | share of a core "
    "| how |"
)


class NumberedPrompts:
    """Prompts whose first token is their number, which decides how long their responses are."""

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=index, token_ids=[index] * PROMPT_TOKENS, text="")


@contextmanager
def stubs(generators: int) -> Iterator[list[str]]:
    """Yields the addresses of so many stand-ins."""
    shares = [len(range(first, generators, STUB_PROCESSES)) for first in range(STUB_PROCESSES)]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.stub_generators",
                "--servers",
                str(share),
                "--rate",
                str(RATE),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for share in shares
        if share
    ]
    try:
        outputs = [process.stdout for process in started if process.stdout is not None]
        yield [
            output.readline().strip()
            for output, share in zip(outputs, shares, strict=False)
            for _ in range(share)
        ]
    finally:
        for process in started:
            process.kill()
            process.communicate()


class Rank0:
    """The controller, and a trainer that takes what it has.

    Args:
        urls: Of the generators.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.generators = [
            Generator(server_at(number, url), CAPACITY) for number, url in enumerate(urls)
        ]
        for generator in self.generators:
            generator.state = State.SERVING
            generator.version = 0
        self.groups_per_step = len(urls) * CAPACITY // RESPONSES // LAG
        pacing = Pacing(
            prompts_per_epoch=10**9,
            groups_per_step=self.groups_per_step,
            max_lag=LAG,
            last_step=10**6,
        )
        pool = GeneratorPool(self.generators)
        sampling = Sampling(n=RESPONSES, max_tokens=10**6)
        self.controller = Controller(
            NumberedPrompts(),
            pool,
            NoRewards(),
            Ledger(pacing),
            sampling,
            lambda tokens, before: "",
            3600.0,
        )

    async def train(self) -> None:
        """Takes groups as they finish, and syncs after each step, for ever."""
        step = 0
        while True:
            await self.controller.new_version(step)
            for _ in range(self.groups_per_step):
                await self.controller.next_group(step)
            for route in SYNC_ROUTES:
                asked = (
                    one.client.post(route, {"new_version": "0"}, deadline_s=60.0)
                    for one in self.generators
                )
                await asyncio.gather(*asked)
            step += 1

    async def close(self) -> None:
        """Closes the connections."""
        for generator in self.generators:
            await generator.client.close()


def server_at(number: int, url: str) -> Any:
    """Returns what a generator knows of its server."""
    return SimpleNamespace(
        number=number, url=url, name=f"generator {number}", token="t", trust=None
    )


async def over_http(urls: Sequence[str], seconds: float) -> dict[str, Any]:
    """Returns tokens a second, and rank 0's processor seconds of a second."""
    rank_0 = Rank0(urls)
    training = asyncio.create_task(rank_0.train())
    await asyncio.sleep(WARM_UP_S)
    before = (time.process_time(), time.monotonic(), rank_0.controller.generated_tokens)
    await asyncio.wait([training], timeout=seconds)
    after = (time.process_time(), time.monotonic(), rank_0.controller.generated_tokens)
    if training.done():
        training.result()  # raises
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await rank_0.close()
    processor_s, passed_s, tokens = (end - start for start, end in zip(before, after, strict=True))
    return {"tokens_s": round(tokens / passed_s), "share": records.rounded(processor_s / passed_s)}


def simulated(generators: int, steps: int) -> dict[str, Any]:
    """Returns tokens a second of a simulated run, and its processor seconds of a simulated
    second."""
    costs = LinearGenerator(
        kv_tokens=10**7,
        step_s=1 / RATE,
        response_s=0.0,
        context_token_s=0.0,
        prefill_token_s=1e-6,
        pause_s=1.0,
    )
    fetch_s = fan_out(generators, GIGABYTES, GBIT)["tree"]
    scene = Simulation(
        generators=[costs] * generators,
        trainer=LinearTrainer(token_s=0.0, token_squared_s=0.0, optimizer_s=0.1, weights_s=fetch_s),
        lengths=lengths(),
        steps=steps,
        groups_per_step=generators * CAPACITY // RESPONSES // LAG,
        rollouts_per_group=RESPONSES,
        max_lag=LAG,
        max_num_seqs=CAPACITY,
        micro_batch_tokens=10**6,
        prompt_tokens=PROMPT_TOKENS,
    )
    started = time.process_time()
    forecast = scene.run()
    processor_s = time.process_time() - started
    tokens = sum(one.tokens for one in forecast.generators)
    return {
        "tokens_s": round(tokens / forecast.seconds),
        "controller_share": records.rounded(processor_s / forecast.seconds),
        "fetch_s": fetch_s,
    }


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures what is not there yet."""
    made = records.read(args.out)
    for wanted in runs_of(args):
        if records.find(made, wanted) is not None:
            continue
        if wanted["how"] == "over HTTP":
            with stubs(wanted["generators"]) as urls:
                found = asyncio.run(over_http(urls, wanted["seconds"]))
        else:
            found = simulated(wanted["generators"], wanted["steps"])
        records.append(args.out, wanted | found | {"command": command})
        print(wanted | found, file=sys.stderr, flush=True)


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    real = [
        {"how": "over HTTP", "generators": count, "seconds": args.seconds}
        for count in args.generators
    ]
    # The largest fleet over HTTP is simulated, too: what its controller takes there is not counted
    # twice.
    counts = [max(args.generators), *args.simulated]
    return real + [
        {"how": "simulated", "generators": count, "steps": args.steps} for count in counts
    ]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [HEAD, "|---" * 6 + "|"]
    real = [one for one in made if one["how"] == "over HTTP"]
    largest = max(real, key=lambda one: one["generators"])
    twin = next(
        one
        for one in made
        if one["how"] == "simulated" and one["generators"] == largest["generators"]
    )
    client_us = 1e6 * (largest["share"] - twin["controller_share"]) / largest["tokens_s"]
    for one in made:
        is_real = one in real
        share = (
            one["share"] if is_real else one["controller_share"] + client_us * one["tokens_s"] / 1e6
        )
        cells = [
            f"{one['generators']:,}",
            f"{one['generators'] * CAPACITY:,}",
            f"{one['tokens_s']:,}",
        ]
        cells += [f"{1e6 * share / one['tokens_s']:.2f}", f"{share:.3f}"]
        cells.append(one["how"] if is_real else f"simulated; {one['fetch_s']:.1f} s to fetch 16 GB")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet_size", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--generators", nargs="+", type=int, default=[1, 4, 16, 64], help="over HTTP (%(default)s)"
    )
    parser.add_argument("--simulated", nargs="*", type=int, default=[1000], help="(%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of each measurement over HTTP (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=20, help="of a simulated run (%(default)s)")
    arguments.add_print_only(parser, "fleet_size")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
