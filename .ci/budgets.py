"""Compares the lines of each room with its budget, the table of CONTRIBUTING.md; exits 1 if one is over.

    python .ci/budgets.py          rooms over their budgets
    python .ci/budgets.py --all    every room

A line over 100 characters counts twice.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([\w./]+)` \| ([\d,]+) \|$", re.MULTILINE)


def budgets() -> dict[str, int]:
    """Returns the lines that each room may have; `lrl/` are the files at its top."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Budgets")[2]
    return {room: int(lines.replace(",", "")) for room, lines in ROW.findall(table)}


def room_of(file: str) -> str:
    """Returns the room of a tracked file."""
    first, *others = file.split("/")
    return f"lrl/{others[0]}/" if first == "lrl" and len(others) > 1 else f"{first}/"


def lines_by_room() -> Counter[str]:
    """Returns the lines of each room's Python files."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True)
    found = Counter[str]()
    for file in listed.split():
        if (ROOT / file).exists():
            lines = (ROOT / file).read_text().splitlines()
            found[room_of(file)] += len(lines) + sum(len(line) > 100 for line in lines)
    return found


def main() -> int:
    allowed, found = budgets(), lines_by_room()
    over = {room for room, lines in found.items() if lines > allowed.get(room, 0)}
    for room, lines in found.most_common():
        if room in over or "--all" in sys.argv:
            print(f"{room:20} {lines:6,} lines, budget {allowed.get(room, 0):6,}")
    if over:
        print("Over budget. Remove a concept, or raise the number in CONTRIBUTING.md in a commit of its own that says why.")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
