"""The arguments that the programs of this folder share, and their tables."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import arguments
from benchmarks.records import markdown


def make_parser(
    name: str, about: str | None, rows: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Returns the command line that all programs of this folder share."""
    parser = arguments.make_parser(f"gpu.{name}", about)
    if rows:
        parser.add_argument("--only", choices=list(rows), action="append", help="a row (all)")
    folder = Path("runs/one_gpu")
    arguments.add(
        parser,
        device=("gpu", "cpu: a rehearsal", ("gpu", "cpu")),
        folder=(folder, "of policies"),
        out=(folder / f"{name}.jsonl", "gets lines"),
    )
    return parser


def parse(parser: argparse.ArgumentParser, least_steps: int = 0) -> argparse.Namespace:
    """Returns the arguments; ends the program where there is no GPU that it is to use, or where
    fewer steps than `least_steps` would leave none that counts."""
    args = arguments.parse(parser)
    if least_steps and args.steps < least_steps:
        parser.error(f"--steps {args.steps}: give at least {least_steps}; some do not count.")
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA GPU. Run this where one is, or rehearse it: "
            "--device cpu and small sizes."
        )
    return args


def device_of(args: argparse.Namespace) -> torch.device:
    return torch.device("cuda", 0) if args.device == "gpu" else torch.device("cpu")


def table(columns: Mapping[str, str], result: Mapping[str, Any]) -> str:
    """Returns one row of Markdown under its heads, with date, machine, versions and command of
    `result` below it."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    below = f"{result['date']}, {result['machine']}, {versions}: `{result['command']}`"
    return f"{markdown(list(columns), [columns.values()])}\n\n{below}"
