"""What a measurement of one GPU prints, and keeps as a line of JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any


def table(columns: Mapping[str, str], result: Mapping[str, Any]) -> str:
    lines = [" | ".join(columns), " | ".join("---" for _ in columns), " | ".join(columns.values())]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    below = f"{result['date']}, {result['machine']}, {versions}: `{result['command']}`"
    return "\n".join([*(f"| {line} |" for line in lines), "", below])


def keep(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
