"""The command line that the benchmarks share: settings, places of files, and measure-then-print."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records

Row = dict[str, Any]
"""A record, or the settings of one."""


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=(about or "").partition("\n\n")[0]
    )


def add(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """Adds settings, each as `name=(default, what it is)`, its choices behind that if it has any. A
    list takes several words, False is a switch, and a setting without a default (`...`) is a word
    without a name."""
    for name, (default, about, *choices) in settings.items():
        if default is ...:
            parser.add_argument(name, help=about)
            continue
        how: dict[str, Any] = {"default": default, "help": f"{about} (%(default)s)"}
        if default is False:
            how["action"] = "store_true"
        elif isinstance(default, list):
            how |= {"nargs": "+", "type": type(default[0]) if default else str}
        elif default is not None:
            how["type"] = type(default)
        if choices:
            how["choices"] = list(choices[0])
        parser.add_argument(f"--{name.replace('_', '-')}", **how)


def of_training(lr: float, steps: int) -> dict[str, Any]:
    return {
        "lr": (lr, "peak learning rate"),
        "steps": (steps, "optimizer steps"),
        "groups": (8, "problems a step"),
        "responses": (16, "responses to each"),
    }


def add_places(parser: argparse.ArgumentParser, name: str) -> None:
    add(
        parser,
        print_only=(False, "print what is there; run nothing"),
        folder=(Path("runs") / name, "of all files"),
        out=(Path(f"benchmarks/results/{name}.jsonl"), "of the records"),
    )


def chosen(args: argparse.Namespace, *names: str) -> Row:
    return {name: getattr(args, name) for name in names}


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str] | None = None
) -> argparse.Namespace:
    """Returns the arguments; `command` is the command line as a record keeps it."""
    words = sys.argv[1:] if words is None else words
    args = parser.parse_args(words)
    args.command = " ".join([parser.prog, shlex.join(words)]).rstrip()
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


def run(
    name: str,
    about: str | None,
    settings: dict[str, Any],
    runs: Callable[[argparse.Namespace], Iterable[Row]],
    measure: Callable[[argparse.Namespace, list[Row]], Iterator[Row]],
    table: Callable[[list[Row]], str],
    words: Sequence[str] | None = None,
) -> None:
    """Measures what the results lack, then prints a table of all: `runs` returns the settings of
    every run that is wanted, and `measure` yields a record, settings included, whenever one of the
    given runs has ended."""
    parser = make_parser(name, about)
    add(parser, **settings)
    add_places(parser, name.replace(".", "_").replace(" ", "_"))
    args = parse(parser, words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    wanted = list(runs(args))
    if not args.print_only:
        made = records.read(args.out)
        missing = [one for one in wanted if records.find(made, one) is None]
        for found in measure(args, missing) if missing else ():
            records.append(args.out, found | {"command": args.command})
            logging.info("%s", found)
    print(table(records.all_found(args.out, wanted)))
