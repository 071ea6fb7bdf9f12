"""Compares a snapshot of a vLLM with what lrl relies on."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.vllm_contract.relied_on import CALLS, MEMBERS, NAMES
from tests.vllm_contract.sources import Snapshot, import_name

ROOT = Path(__file__).parents[2]
READERS = ("lrl", "callbacks", "tests", "benchmarks")
FOLDER = Path(__file__).parent


def snapshots() -> dict[str, Snapshot]:
    """Returns the kept snapshots by version."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return {one["version"]: one for one in found}


@cache
def imports_of_vllm() -> dict[tuple[str, str | None], str]:
    """Returns each module and name of vLLM that the project imports, and a file that does."""
    found: dict[tuple[str, str | None], str] = {}
    for folder in READERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and not node.level and _is_vllm(node.module):
                    names = [(node.module or "", alias.name) for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [(alias.name, None) for alias in node.names if _is_vllm(alias.name)]
                else:
                    continue
                found |= dict.fromkeys(names, path.relative_to(ROOT).as_posix())
    return found


def broken(snapshot: Snapshot) -> list[str]:
    """Returns what lrl relies on and this vLLM does not have; empty for a vLLM that fits."""
    wanted = {import_name(*one): f", for {file}" for one, file in imports_of_vllm().items()}
    for where, names in MEMBERS.items():
        wanted |= dict.fromkeys((f"{where}.{name}" for name in names.split()), "")
    for kind, names in NAMES.items():
        wanted |= dict.fromkeys((f"{kind} {name}" for name in names.split()), "")
    lost = [f"no {name}{why}" for name, why in wanted.items() if name not in snapshot["has"]]
    return lost + [why for call in CALLS for why in _misfits(snapshot, call)]


def _is_vllm(module: str | None) -> bool:
    return (module or "").split(".")[0] == "vllm"


def _misfits(snapshot: Snapshot, call: str) -> Iterator[str]:
    """Yields why lrl's call does not fit the signature."""
    count, names = CALLS[call]
    parameters = snapshot["signatures"].get(call)
    if parameters is None:
        yield f"no function {call}"
        return
    try:
        signature = inspect.signature(eval(f"lambda {parameters}: None"))
        signature.bind(*range(count), **dict.fromkeys(names.split()))
    except TypeError as error:
        yield f"{call}: {error}"
