"""How long a version takes to reach all generators, simulated: by the number of generators, the
links and the way.

    python -m benchmarks.fan_out

Every machine has one link, which carries as much in each direction. A source divides its link
evenly among those that fetch from it. `tree` is what pull does: the real rule of who fetches from
whom (`lrl.weights.upload_slots`) on a virtual clock, with the default deadline of a sync. `delta`
is the same tree with a share of the bytes, and seconds to make the difference and to rebuild the
file; both are what `benchmarks.weight_transports` measured at lr 1e-6 on two cores, where one core
does either. The time of the pause is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks import arguments, records
from lrl.planning.simulator import clock
from lrl.weights.pull import STALL_SHARE
from lrl.weights.upload_slots import UploadSlots

GB = 1e9
DEADLINE_S = 300.0
"""Of a phase of a sync: the default of `WeightSync.deadline_s`."""
DELTA_SHARE, DELTA_S_PER_GB = 0.011, 2.2
"""Of the whole's bytes, and 1.15 s for 0.53 GB, hardly any of it on the wire, in
`docs/results/weights.md`."""
WAYS = ("all from rank 0", "tree", "delta")
HEAD = (
    "| generators | link (Gbit/s) | "
    + " | ".join(f"{way} (s)" for way in WAYS)
    + " | rank 0 sent, tree (copies) |"
)


class Link:
    """The sending side of a machine's link: its transfers have equal shares of it.

    Args:
        rate: Bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.sent = 0.0
        """Bytes."""
        self._left: dict[asyncio.Event, float] = {}
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def send(self, size: float) -> None:
        """Sends so many bytes."""
        self._advance()
        done = asyncio.Event()
        self._left[done] = size
        self._set_timer()
        await done.wait()
        self.sent += size

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        for done in self._left:
            self._left[done] -= (now - self._since) * self.rate / len(self._left)
        self._since = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._left:
            seconds = min(self._left.values()) * len(self._left) / self.rate
            self._timer = asyncio.get_running_loop().call_later(max(0.0, seconds), self._end_of_one)

    def _end_of_one(self) -> None:
        self._advance()
        # One byte: the rounding of times.
        for done in [done for done, left in self._left.items() if left <= 1.0]:
            del self._left[done]
            done.set()
        self._set_timer()


def machine(number: int) -> Any:
    """Returns what the tree knows of a generator: its address, and whether it is still there."""
    address = f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1"
    return SimpleNamespace(client=SimpleNamespace(url=address), eviction=None)


async def tree(count: int, size: float, rate: float, rebuild_s: float) -> tuple[float, float]:
    """Returns the seconds until all have fetched `size` bytes and rebuilt the file, and the bytes
    that rank 0 sent."""
    slots = UploadSlots(STALL_SHARE * DEADLINE_S)
    links: defaultdict[Any, Link] = defaultdict(lambda: Link(rate))

    async def fetch(child: Any) -> None:
        async with slots.take(child) as source:
            await links[source and id(source)].send(size)
        await asyncio.sleep(rebuild_s)
        await slots.open_at(child)

    await asyncio.gather(*(fetch(machine(number)) for number in range(count)))
    return asyncio.get_running_loop().time(), links[None].sent


def simulate(count: int, gigabytes: float, gbit: float) -> dict[str, Any]:
    """Returns the seconds of each way, and the copies that rank 0 sends in a tree."""
    size, rate = gigabytes * GB, gbit * GB / 8
    # Half of it to make the difference, half to rebuild the file.
    work_s = DELTA_S_PER_GB * gigabytes / 2
    whole_s, sent = clock.run(tree(count, size, rate, rebuild_s=0.0))
    delta_s, _ = clock.run(tree(count, DELTA_SHARE * size, rate, rebuild_s=work_s))
    # One after another takes as long as all at once.
    seconds = (
        count * size / rate,
        whole_s,
        work_s + delta_s,
    )
    found = {way: records.rounded(value) for way, value in zip(WAYS, seconds, strict=True)}
    return found | {"copies": records.rounded(sent / size)}


def measure(args: argparse.Namespace, command: str) -> None:
    """Simulates what is not there yet."""
    made = records.read(args.out)
    for wanted in runs_of(args):
        if records.find(made, wanted) is None:
            records.append(args.out, wanted | simulate(**wanted) | {"command": command})
            logging.info("%s", wanted)


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    return [
        {"count": count, "gigabytes": args.gigabytes, "gbit": gbit}
        for count in args.generators
        for gbit in args.gbit
    ]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [HEAD, "|---" * (len(WAYS) + 3) + "|"]
    for one in made:
        seconds = " | ".join(
            f"{one[way]:,.0f}" if one[way] >= 10 else f"{one[way]:.1f}" for way in WAYS
        )
        lines.append(f"| {one['count']:,} | {one['gbit']:g} | {seconds} | {one['copies']:.0f} |")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fan_out", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--generators", nargs="+", type=int, default=[8, 64, 1000], help="(%(default)s)"
    )
    parser.add_argument("--gigabytes", type=float, default=16.0, help="of a version (%(default)s)")
    parser.add_argument(
        "--gbit",
        nargs="+",
        type=float,
        default=[10.0, 100.0],
        help="of each link, a second (%(default)s)",
    )
    arguments.add_print_only(parser, "fan_out")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
