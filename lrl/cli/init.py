"""`lrl init`: a folder with a run of one's own, which works as it is."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import lrl

TEMPLATE = Path(lrl.__file__).parent / "project"
OF_TURNS = {"environment.py", "test_environment.py"}
"""Files of a project with an environment."""
TURNS_MARK = "#turns "
"""Begins a line of a project with an environment."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def main(argv: Sequence[str]) -> int:
    """Runs `lrl init`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl init",
        description="Write a folder with a recipe, data, a reward and its test, which runs as it is.",
    )
    parser.add_argument("folder", type=Path, help="a new folder; its name is the run's")
    parser.add_argument(
        "--turns", action="store_true", help="with an environment that answers the policy's turns"
    )
    args = parser.parse_args(argv)
    written = write_project(args.folder, turns=args.turns)
    folder = shlex.quote(str(args.folder))
    sys.stdout.write(
        f"{folder} has {', '.join(written)}.\n\n"
        f"    cd {folder}\n"
        "    lrl fit --config recipe.yaml\n\n"
        "trains a tiny policy on ten problems, in a few minutes. README.md leads on to your own task.\n"
    )
    return 0


def write_project(folder: Path, *, turns: bool) -> list[str]:
    """Writes a project, with an environment if `turns`; returns the names of its files. Raises
    ValueError if the folder has something in it, or its name is none for a run."""
    name = folder.resolve().name
    if PLAIN_NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of a run: take letters, digits, `-`, `_` and `.`.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty. Name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(TEMPLATE.iterdir()):
        if not path.is_file() or (path.name in OF_TURNS and not turns):
            continue
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if turns or not line.startswith(TURNS_MARK)]
        text = "".join(line.removeprefix(TURNS_MARK) for line in kept)
        (folder / path.name).write_text(text.replace("NAME", name))
        written.append(path.name)
    return written
