"""Two processes on one GPU: CUDA's handles, NCCL, and the end of a communicator whose other member
is dead. vLLM is needed for two rows alone.

    python -m benchmarks.gpu.two_processes [--only ipc]
    python -m benchmarks.gpu.two_processes --device cpu --mib 1 --policy tiny     a rehearsal

On a CPU shared memory and gloo take the places of handles and NCCL.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any, NoReturn

from benchmarks import arguments
from benchmarks.gpu import rows
from benchmarks.gpu.handles import EXPANDABLE, export, export_with_segments_off, open_handle
from benchmarks.gpu.link_rows import (
    UNWATCHED,
    be_killed,
    come_again,
    receive,
    send,
    shard,
    survive,
)
from benchmarks.gpu.row_processes import Part, Row, be_part, connect, run_row
from benchmarks.records import append
from lrl.system.processes import die_with

HOSTS = [UNWATCHED | {"NCCL_HOSTID": f"part-{number}", "NCCL_DEBUG": "WARN"} for number in range(3)]
"""NCCL refuses two processes on one GPU of one host, so it takes them for two hosts."""
ROWS = {
    "ipc": Row((export, open_handle)),
    "ipc-expandable": Row((export, open_handle), (EXPANDABLE, EXPANDABLE), "gpu"),
    "ipc-expandable-exporter": Row((export, open_handle), (EXPANDABLE, {}), "gpu"),
    "ipc-expandable-off-for-buffer": Row(
        (export_with_segments_off, open_handle), (EXPANDABLE, EXPANDABLE), "gpu"
    ),
    "nccl-one-gpu": Row((send, receive), HOSTS),
    "nccl-abort": Row((survive, be_killed, come_again), HOSTS),
    "fsdp-one-gpu": Row((shard, shard), HOSTS),
    "nccl-one-gpu-vllm": Row((send, receive), HOSTS, "vllm"),
    "nccl-abort-vllm": Row((survive, be_killed, come_again), HOSTS, "vllm"),
}


def answer(args: argparse.Namespace, name: str) -> dict[str, Any]:
    row = ROWS[name]
    if row.needs and args.device == "cpu":
        return {"row": name} | rows.NO_CPU_FORM
    if row.needs == "vllm" and importlib.util.find_spec("vllm") is None:
        return {"row": name, "works": None, "why": "vLLM is not installed"}
    settings = ["--device", args.device, "--mib", str(args.mib), "--policy", args.policy]
    settings += ["--folder", str(args.folder), "--out", str(args.out), "--only", name]

    def command(number: int, port: int) -> list[str]:
        place = ["--part", str(number), "--port", str(port), "--owner", str(os.getpid())]
        return [sys.executable, "-m", "benchmarks.gpu.two_processes", *settings, *place]

    return run_row(name, row, command, args.row_s)


def one_part(args: argparse.Namespace) -> NoReturn:
    die_with(args.owner)
    row = args.only[0]
    part = Part(
        row=row,
        number=args.part,
        device=rows.device_of(args),
        size=args.mib * 2**20,
        folder=args.folder,
        policy=args.policy,
        out=args.out,
        port=args.port,
        store=connect(args.port),
    )
    be_part(part, ROWS[row].parts[args.part])


def main() -> None:
    parser = rows.make_parser("two_processes", __doc__, ROWS)
    arguments.add(
        parser,
        mib=(256, "of a buffer"),
        policy=("130m", "that is divided"),
        row_s=(90.0, "longest time of a row"),
    )
    for name in ("--part", "--port", "--owner"):  # of the program's own processes
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = rows.parse(parser)
    if args.part is not None:
        one_part(args)
    for name in args.only or ROWS:
        append(args.out, answer(args, name))


if __name__ == "__main__":
    main()
