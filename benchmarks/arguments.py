"""Arguments that several benchmarks take, and the command line as a record keeps it."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    args.command = " ".join([parser.prog, shlex.join(words)]).rstrip()
    return args


def measure_and_print(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace], None],
    runs_of: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], str],
) -> int:
    args = parse(parser, argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.print_only:
        measure(args)
    print(table(records.all_found(args.out, runs_of(args))))
    return 0


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    out = Path(f"benchmarks/results/{name}.jsonl")
    parser.add_argument("--out", type=Path, default=out, help="(%(default)s)")


def add_places(parser: argparse.ArgumentParser, name: str) -> None:
    folder = Path("runs") / name
    parser.add_argument("--folder", type=Path, default=folder, help="of all files (%(default)s)")
    add_out(parser, name)


def add_print_only(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--print-only", action="store_true", help="print what is there; run nothing"
    )
    add_places(parser, name)


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(about or "").partition("\n\n")[0]
    )


def add_training(parser: argparse.ArgumentParser, lr: float, steps: int) -> None:
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="problems a step (%(default)s)")
    parser.add_argument("--responses", type=int, default=16, help="responses to each (%(default)s)")
