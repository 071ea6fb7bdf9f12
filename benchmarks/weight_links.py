"""The time until all machines with generators have a version, when every link is alike: by the
number of machines that train and that generate.

    python -m benchmarks.weight_links                 measure and print; needs root, ip and tc
    python -m benchmarks.weight_links --simulate      as many machines as no test bench has

Every machine is a network namespace of its own on a bridge, and the kernel (tc) lets each send at
most `--mbit` megabits a second. A trainer's machine is a rank that stages and serves its part
(`lrl.weights.staging`), a generator's one fetches with the code of a real server
(`lrl.vllm_plugin.fetched_files`). `links` is the time in units of one copy over one free link. With
`--simulate` the rule of who takes a block from whom runs on a clock of its own, with links that
their transfers share evenly.
"""

from __future__ import annotations

import logging
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks import arguments, records
from lrl.generators.settings import ServerSettings
from lrl.system.endpoint import Endpoint, Location
from lrl.system.ranks import Ranks
from lrl.training.pieces import Piece, piece_of
from lrl.vllm_plugin.fetched_files import FROM_TRAINER, THREADS
from lrl.weights.parts import FetchOrder, FetchReport
from lrl.weights.staging import StageOrder, Staging
from lrl.weights.version_file import Header
from tests.network_namespace import Machine
from tests.weights.fetching_generators import TOKEN, FetchingGenerator
from tests.weights.threaded_ranks import on_ranks

NETWORK = "10.213.78"
MB, GB = 1e6, 1e9
SIZES = {"70B in bfloat16": 140.0, "405B in float8": 405.0}
"""Gigabytes."""
STEP_S = 0.001
"""Of the simulation's clock."""
BLOCKS_OF_A_MACHINE = 8
"""Blocks of the simulation for each machine that fetches: fewer than there are, and larger."""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


@contextmanager
def slow_links(count: int, mbit: int) -> Iterator[list[Machine]]:
    """Yields as many namespaces on a bridge, each with a slow link."""
    mark = secrets.token_hex(3)
    bridge = f"b{mark}"
    slow = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
    with ExitStack() as ends:
        run("ip", "link", "add", bridge, "type", "bridge")
        ends.callback(run, "ip", "link", "delete", bridge)
        run("ip", "link", "set", bridge, "up")
        machines = []
        for number in range(count):
            name, address = f"lrl-{mark}-{number}", f"{NETWORK}.{number + 1}"
            here, there = f"h{mark}{number}", f"t{mark}{number}"
            run("ip", "netns", "add", name)
            ends.callback(run, "ip", "netns", "delete", name)
            run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            run("ip", "link", "set", here, "master", bridge, "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", there)
            run("ip", "-n", name, "link", "set", there, "up")
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", there, "root", *slow)
            machines.append(Machine(name, address, there))
        yield machines


def on_machine(machine: Machine, work: Callable[[], Any]) -> Any:
    """Runs `work` on a thread in a namespace; the threads and sockets that it makes are there."""

    def enter_and_work() -> Any:
        machine.enter()
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter_and_work).result()


class Trainer:
    """Ranks, one on each of some machines, with a policy whose step changes one weight in a
    hundred."""

    def __init__(self, machines: Sequence[Machine], megabytes: float) -> None:
        self.machines = machines
        self.stagings = [Staging() for _ in machines]
        self.weight = torch.randn(round(megabytes * MB / 2 / 1024), 1024).bfloat16()
        self.ranks: list[Location] = on_ranks(len(machines), self._serve)[0]  # type: ignore[assignment]

    def _serve(self, ranks: Ranks) -> list[Location | int]:
        machine = self.machines[ranks.rank]
        endpoint = Endpoint(machine.address, insecure=True)

        def serve() -> int:
            (port,) = self.stagings[ranks.rank].serve(endpoint, TOKEN, Ranks())
            assert isinstance(port, int)
            return port

        return ranks.gather(endpoint.location(on_machine(machine, serve)))

    def stage(self) -> Header:
        """Makes a step and stages the weights."""
        changed = torch.rand(self.weight.shape) < 0.01
        self.weight = torch.where(changed, self.weight * 1.01, self.weight)

        def stage(ranks: Ranks) -> Header:
            def pieces() -> Iterator[Piece]:
                yield piece_of("weight", self.weight, ranks)

            return self.stagings[ranks.rank].stage(pieces, StageOrder("pool", None), ranks)

        return on_ranks(len(self.machines), stage)[0]

    def fetches(
        self, checksum: str, generators: Sequence[FetchingGenerator], machines: Sequence[Machine]
    ) -> list[Callable[[], FetchReport]]:
        """Returns what has each generator fetch a version, on its machine."""
        peers = [one.server.location for one in generators]

        def fetch(number: int) -> FetchReport:
            order = FetchOrder(checksum, self.ranks, peers, number=number, deadline_s=300.0)
            files = generators[number].routes.files
            found: FetchReport = on_machine(machines[number], lambda: files.fetch(order))
            return found

        return [partial(fetch, number) for number in range(len(generators))]


def generators_on(machines: Sequence[Machine]) -> list[FetchingGenerator]:
    found: list[FetchingGenerator] = []
    for number, machine in enumerate(machines):
        settings = ServerSettings(dtype="bfloat16", insecure=True, host=machine.address)
        found.append(on_machine(machine, partial(FetchingGenerator, number, settings)))
    while not all(one.http.started for one in found):
        time.sleep(0.01)
    return found


def measure(sources: int, receivers: int, megabytes: float, mbit: int) -> list[dict[str, Any]]:
    """Returns seconds and bytes of the first version, and of the next one by differences."""
    found = []
    with slow_links(sources + receivers, mbit) as machines:
        trainer = Trainer(machines[:sources], megabytes)
        generators = generators_on(machines[sources:])
        for way in ("whole", "differences"):
            header = trainer.stage()
            started = time.monotonic()
            with ThreadPoolExecutor(receivers) as pool:
                fetches = trainer.fetches(header.checksum, generators, machines[sources:])
                reports = list(pool.map(lambda fetch: fetch(), fetches))
            seconds = time.monotonic() - started
            copies = sum(one.from_trainer + one.from_peers for one in reports)
            found.append(
                {"sources": sources, "receivers": receivers, "way": way, "seconds": seconds}
                | {"mbit": mbit, "fetched_mb": copies / MB}
                | {"sent_mb": sum(one.from_trainer for one in reports) / MB}
                | {"links": seconds / (header.size * 8 / (mbit * MB))}
            )
        for generator in generators:
            generator.die()
        for staging in trainer.stagings:
            staging.close()
    return found


def simulate(sources: int, receivers: int, gigabytes: float, gbit: float) -> float:
    """Returns the seconds until all receivers have all blocks.

    Each block's owner takes it from the rank that has it, and the others take it from the owner;
    a receiver has `THREADS` blocks on their way, its own first.
    """
    blocks = BLOCKS_OF_A_MACHINE * receivers
    size, rate = gigabytes * GB / blocks, gbit * GB / 8 * STEP_S
    place = np.arange(blocks) * sources // blocks  # the rank with a block
    owner = np.arange(blocks) % receivers
    # Of each receiver: the blocks that it takes from the trainer, and those of the others.
    own = [[block for block in range(blocks) if owner[block] == one] for one in range(receivers)]
    others = [
        sorted(
            set(range(blocks)) - set(own[one]),
            key=lambda block: (block // receivers, (block - one) % receivers),
        )
        for one in range(receivers)
    ]
    has = np.zeros((receivers, blocks), dtype=bool)
    sender = np.full((receivers, THREADS), -1)
    block_of = np.zeros((receivers, THREADS), dtype=int)
    left = np.zeros((receivers, THREADS))
    seconds = 0.0
    while not has.all():
        for one, slot in zip(*np.nonzero(sender < 0), strict=True):
            block = -1
            if slot < FROM_TRAINER and own[one]:
                block = own[one].pop(0)
                sender[one, slot] = place[block]
            else:
                there = (each for each in others[one][: 8 * THREADS] if has[owner[each], each])
                if (block := next(there, -1)) >= 0:
                    others[one].remove(block)
                    sender[one, slot] = sources + owner[block]
            block_of[one, slot], left[one, slot] = block, size
        busy = sender >= 0
        sending = np.bincount(sender[busy], minlength=sources + receivers)
        taking = np.maximum(1, busy.sum(1, keepdims=True))
        share = np.minimum(rate / np.maximum(1, sending[sender]), rate / taking)
        left -= np.where(busy, share, 0)
        for one, slot in zip(*np.nonzero(busy & (left <= 0)), strict=True):
            has[one, block_of[one, slot]] = True
            sender[one, slot] = -1
        seconds += STEP_S
    return seconds


def main() -> None:
    parser = arguments.make_parser("weight_links", __doc__)
    arguments.add(
        parser,
        simulate=(False, "compute and print the large fleets"),
        megabytes=(50.0, "of a version"),
        mbit=(200, "megabits a second of each link"),
        sources=([1, 2, 4], "machines that train"),
        receivers=([1, 2, 4], "machines that generate"),
    )
    arguments.add_places(parser, "weight_links")
    args = parser.parse_args()
    if args.simulate:
        print_simulated()
        return
    lines = []
    for sources, receivers in product(args.sources, args.receivers):
        for row in measure(sources, receivers, args.megabytes, args.mbit):
            records.append(args.out, row)
            copies = row["sent_mb"] / row["fetched_mb"] * receivers
            figures = (f"{one:.2f}" for one in (row["seconds"], row["links"], copies))
            lines.append([sources, receivers, row["way"], *figures])
            logging.info("%s", row)
    heads = (
        "trainer's machines",
        "generators'",
        "way",
        "seconds",
        "links",
        "trainer sent (copies)",
    )
    print(records.markdown(heads, lines))


def print_simulated() -> None:
    lines = []
    for name, gigabytes in SIZES.items():
        for sources, receivers in ((1, 256), (64, 256), (64, 64)):
            seconds = simulate(sources, receivers, gigabytes, 400.0)
            links = seconds / (gigabytes * 8 / 400)
            lines.append([name, sources, receivers, 400, f"{seconds:.1f}", f"{links:.2f}"])
    heads = ("version", "trainer's machines", "generators'", "link (Gbit/s)", "seconds", "links")
    print(records.markdown(heads, lines))


if __name__ == "__main__":
    main()
