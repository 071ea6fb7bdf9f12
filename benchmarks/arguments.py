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
    """Returns the arguments in `argv`, or else in this process's own; `command` is the whole
    command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    args.command = " ".join([parser.prog, shlex.join(words)]).rstrip()
    return args


def measure_and_print(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, str], None],
    runs_of: Callable[[argparse.Namespace], Iterable[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], str],
) -> int:
    """Measures what the records lack, unless the command only prints (`add_print_only`); then
    prints a table."""
    args = parse(parser, argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.print_only:
        measure(args, args.command)
    print(table(records.all_found(args.out, runs_of(args))))
    return 0


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the file of the records."""
    out = Path(f"benchmarks/results/{name}.jsonl")
    parser.add_argument("--out", type=Path, default=out, help="(%(default)s)")


def add_places(parser: argparse.ArgumentParser, name: str, plot: bool = True) -> None:
    """Adds the folder of a benchmark's runs and the file of its records; with a plot also
    `--plot-only`."""
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs") / name,
        help="of logs and responses (%(default)s)",
    )
    add_out(parser, name)
    if plot:
        parser.add_argument(
            "--plot", type=Path, default=Path(f"docs/{name}.png"), help="(%(default)s)"
        )
        parser.add_argument(
            "--plot-only", action="store_true", help="draw and print what is there; run nothing"
        )


def add_print_only(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the places of a benchmark without a plot, and `--print-only`."""
    parser.add_argument(
        "--print-only", action="store_true", help="print what is there; run nothing"
    )
    add_places(parser, name, plot=False)


def add_training(parser: argparse.ArgumentParser, lr: float, steps: int) -> None:
    """Adds the size of a run on the quickstart's task, with these defaults."""
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="problems a step (%(default)s)")
    parser.add_argument("--responses", type=int, default=16, help="responses to each (%(default)s)")
