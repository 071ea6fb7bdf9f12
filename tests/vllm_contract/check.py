"""Compares a snapshot of a vLLM with what lrl relies on."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
    found = [
        *_lost_imports(snapshot),
        *(lost for where in MEMBERS for lost in _lost_members(snapshot, where)),
        *(why for call in CALLS for why in _misfits(snapshot, call)),
    ]
    for kind, names in NAMES.items():
        found += [f"no {kind} {name}" for name in names.split() if name not in snapshot[kind]]
    return found


def _is_vllm(module: str | None) -> bool:
    return (module or "").split(".")[0] == "vllm"


def _lost_imports(snapshot: Snapshot) -> Iterator[str]:
    for (module, name), file in imports_of_vllm().items():
        if import_name(module, name) not in snapshot["imports"]:
            yield f"{file}: no {import_name(module, name)}"


def _lost_members(snapshot: Snapshot, where: str) -> Iterator[str]:
    kinds = snapshot["members"].get(where, {})
    for written in MEMBERS[where].split():
        name = written.removesuffix("()")
        kind = kinds.get(name)
        if kind is None:
            yield f"{where} has no {name}"
        elif (kind == "method") != (written != name):
            uses = "calls" if written != name else "reads"
            yield f"{where} has {name} as a {kind}, and lrl {uses} it"


def _misfits(snapshot: Snapshot, call: str) -> Iterator[str]:
    """Yields why lrl's call does not fit the signature."""
    count, names = CALLS[call]
    where = call.replace(":", ".")
    signature: dict[str, Any] | None = snapshot["signatures"].get(where)
    if signature is None:
        yield f"no function {where}"
        return
    positional, keywords = signature["positional"], names.split()
    if count > len(positional) and not signature["more_positional"]:
        yield f"{where} takes {len(positional)} positional arguments, and lrl gives {count}"
    given = {*positional[:count], *keywords}
    needed = signature["required"] + signature["required_keywords"]
    if missing := [one for one in needed if one not in given]:
        yield f"{where} also needs {', '.join(missing)}"
    known = {*positional[count:], *signature["keyword_only"]}
    unknown = [one for one in keywords if one not in known]
    if unknown and not signature["more_keywords"]:
        yield f"{where} does not take {', '.join(unknown)}"
