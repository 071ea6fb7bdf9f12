"""Compares a snapshot of a vLLM with what lrl relies on."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vllm_contract.relied_on import CALLS, FLAGS, MEMBERS, ROUTES, VARIABLES, Call, Members
from tests.vllm_contract.sources import Snapshot, import_name

ROOT = Path(__file__).parents[2]
READERS = ("lrl", "callbacks", "tests", "benchmarks")
FOLDER = Path(__file__).parent


def snapshots() -> dict[str, Snapshot]:
    """Returns the kept snapshots by version."""
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return {one["version"]: one for one in found}


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
    """Returns what lrl relies on and this vLLM does not have, each with the file of lrl; empty for
    a vLLM that fits."""
    return [
        *_lost_imports(snapshot),
        *(lost for one in MEMBERS for lost in _lost_members(snapshot, one)),
        *(why for one in CALLS for why in _misfits(snapshot, one)),
        *(f"no route {name}" for name in ROUTES if name not in snapshot["routes"]),
        *(f"no variable {name}" for name in VARIABLES if name not in snapshot["variables"]),
        *(f"no flag --{name}" for name in FLAGS if name not in snapshot["flags"]),
    ]


def _is_vllm(module: str | None) -> bool:
    return (module or "").split(".")[0] == "vllm"


def _lost_imports(snapshot: Snapshot) -> Iterator[str]:
    for (module, name), file in imports_of_vllm().items():
        if import_name(module, name) not in snapshot["imports"]:
            yield f"{file}: no {import_name(module, name)}"


def _lost_members(snapshot: Snapshot, wanted: Members) -> Iterator[str]:
    where = f"{wanted.module}.{wanted.name}"
    kinds = snapshot["members"].get(where, {})
    for written in wanted.members.split():
        name = written.removesuffix("()")
        kind = kinds.get(name)
        if kind is None:
            yield f"{wanted.by}: {where} has no {name}"
        elif written != name and kind != "method":
            yield f"{wanted.by}: {where} has {name} as a {kind}, and lrl calls it"
        elif written == name and kind == "method":
            yield f"{wanted.by}: {where} has {name} as a method, and lrl reads it"


def _misfits(snapshot: Snapshot, call: Call) -> Iterator[str]:
    """Yields why lrl's call does not fit the signature."""
    where = f"{call.module}.{call.name}"
    signature: dict[str, Any] | None = snapshot["signatures"].get(where)
    if signature is None:
        yield f"{call.by}: no function {where}"
        return
    positional = signature["positional"]
    keywords = call.keywords.split()
    if call.positional > len(positional) and not signature["more_positional"]:
        yield (
            f"{call.by}: {where} takes {len(positional)} positional arguments, and lrl gives "
            f"{call.positional}"
        )
    given = {*positional[: call.positional], *keywords}
    missing = [
        one for one in signature["required"] + signature["required_keywords"] if one not in given
    ]
    if missing:
        yield f"{call.by}: {where} also needs {', '.join(missing)}"
    known = {*positional, *signature["keyword_only"]}
    unknown = [one for one in keywords if one not in known]
    if unknown and not signature["more_keywords"]:
        yield f"{call.by}: {where} does not take {', '.join(unknown)}"
    twice = [one for one in keywords if one in positional[: call.positional]]
    if twice:
        yield f"{call.by}: {where} gets {', '.join(twice)} twice"
