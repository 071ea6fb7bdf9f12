"""The time until all receivers have a version, when every link is slow: by the number of places at
each source.

    python -m benchmarks.weight_tree                               measure and print; needs root, ip and tc
    python -m benchmarks.weight_tree --receivers 4 --megabytes 8 --repeats 1     a rehearsal
    python -m benchmarks.weight_tree --policy 130m --receivers 4 --fan-outs 2    vLLM servers receive
    python -m benchmarks.weight_tree --print-only                  print what is there

Each receiver is in a network namespace of its own, on a bridge. The kernel (tc) lets rank 0 and
each receiver send at most `--mbit` megabits a second. `--fan-outs` are the values of
`lrl.weights.upload_slots.FAN_OUT` to try; as many as there are receivers is no tree: all fetch from
rank 0. `links` is the time in units of one copy over one free link. A receiver is a stand-in
(`benchmarks.weight_receiver`) for a version of `--megabytes`, or with `--policy` a vLLM server that
gets random weights of that size (`benchmarks.random_policy`).
"""

from __future__ import annotations

import argparse
import logging
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from benchmarks import arguments, records
from benchmarks.random_policy import SHAPES, llama, made_up_rows, make_policy
from benchmarks.weight_transports import MB, Scene, receivers, stand_in
from lrl.generators.settings import ServerSettings
from lrl.system.event_loop import LoopThread
from lrl.weights import upload_slots
from lrl.weights.pull import Pull

NETWORK = "10.213.78"
HEAD = (
    "| receivers | places at each source | all have it after (s) | links | rank 0 sent (copies) |\n"
    + "|---" * 5
    + "|"
)


def run(*words: str) -> None:
    """Runs a program; it must succeed."""
    subprocess.run(words, check=True, capture_output=True, timeout=60)


@contextmanager
def slow_links(count: int, mbit: int) -> Iterator[list[tuple[str, list[str]]]]:
    """Makes namespaces on a bridge, each with a slow link; yields address and start command of
    each.

    Raises:
        subprocess.CalledProcessError: The machine does not allow it.
    """
    mark = secrets.token_hex(3)
    bridge = f"b{mark}"
    slow = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
    with ExitStack() as ends:
        run("ip", "link", "add", bridge, "type", "bridge")
        ends.callback(run, "ip", "link", "delete", bridge)
        run("ip", "address", "add", f"{NETWORK}.254/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        run("tc", "qdisc", "add", "dev", bridge, "root", *slow)
        where = []
        for number in range(count):
            name, address = f"lrl-{mark}-{number}", f"{NETWORK}.{number + 1}"
            here, there = f"h{mark}{number}", f"t{mark}{number}"
            run("ip", "netns", "add", name)
            ends.callback(run, "ip", "netns", "delete", name)
            run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            run("ip", "link", "set", here, "master", bridge, "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", there)
            run("ip", "-n", name, "link", "set", there, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")  # vLLM's processes talk over it
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", there, "root", *slow)
            where.append((address, ["ip", "netns", "exec", name]))
        yield where


def measure(args: argparse.Namespace, command: str) -> None:
    """Measures what is not there yet."""
    made = records.read(args.out)
    settings = ServerSettings(dtype="bfloat16", host=f"{NETWORK}.254", insecure=True)
    folder = (args.folder / f"policy-{args.policy}").absolute()
    version = new_version(args, folder)

    def vllm_server(host: str, number: int, run_id: str) -> list[str]:
        return ["benchmarks.weight_server", host, str(folder), str(number), run_id]

    program = stand_in if args.policy is None else vllm_server
    for wanted in runs_of(args):
        if records.find(made, wanted) is not None:
            continue
        loop = LoopThread()
        with (
            slow_links(wanted["receivers"], args.mbit) as where,
            receivers(where, loop, args.folder, settings, program) as fleet,
            mock.patch.object(upload_slots, "FAN_OUT", wanted["fan_out"]),
        ):
            found = Scene(fleet, loop, (version, version)).sync(Pull, upto=0)
        loop.close()
        line = wanted | {
            name: records.rounded(found[name])
            for name in ("fetch_s", "pause_s", "sent_mb", "fetched_mb")
        }
        records.append(args.out, line | {"command": command})
        logging.info("%s", line)


def new_version(args: argparse.Namespace, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights to send, in float32; with `--policy` also writes a policy of other
    weights to `folder`."""
    if args.policy is None:
        return {"weight": torch.randn(round(args.megabytes * MB / 2 / 1024), 1024)}
    config = llama(args.policy)
    make_policy(config, [row["question"] for row in made_up_rows()], folder, "cpu")
    torch.manual_seed(1)
    return dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())


def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the fields by which the records are found, in their order."""
    what = {"megabytes": args.megabytes} if args.policy is None else {"policy": args.policy}
    how = what | {"mbit": args.mbit}
    return [
        how | {"receivers": count, "fan_out": fan_out, "repeat": repeat}
        for repeat in range(args.repeats)
        for count in args.receivers
        for fan_out in sorted({*args.fan_outs, count})
        if fan_out <= count
    ]


def table(made: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: medians over the repeats."""
    lines = [HEAD]
    for count, fan_out in sorted({(record["receivers"], record["fan_out"]) for record in made}):
        of_both = [one for one in made if (one["receivers"], one["fan_out"]) == (count, fan_out)]
        seconds = median(one["fetch_s"] for one in of_both)
        one_link_s = of_both[0]["fetched_mb"] / count * 8 / of_both[0]["mbit"]
        copies = median(one["sent_mb"] / one["fetched_mb"] * count for one in of_both)
        tree = f"{fan_out}, no tree" if fan_out == count else str(fan_out)
        lines.append(
            f"| {count} | {tree} | {seconds:.2f} | {seconds / one_link_s:.2f} | {copies:.0f} |"
        )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_tree", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--receivers", nargs="+", type=int, default=[2, 4, 8], help="(%(default)s)")
    parser.add_argument("--fan-outs", nargs="+", type=int, default=[1, 2, 4], help="(%(default)s)")
    parser.add_argument("--megabytes", type=int, default=50, help="of a version (%(default)s)")
    parser.add_argument("--policy", choices=SHAPES, help="to vLLM servers instead of stand-ins")
    parser.add_argument(
        "--mbit", type=int, default=200, help="of each link, a second (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="(%(default)s)")
    arguments.add_print_only(parser, "weight_tree")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, unless it only prints; then prints."""
    return arguments.measure_and_print(make_parser(), argv, measure, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
