"""Reads from the Python sources of a vLLM, as text, what `relied_on` names. Nothing of vLLM is
imported.

The result is a snapshot: plain data that JSON holds, small enough to be kept for each release
(`python -m tests.vllm_contract`).
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from tests.vllm_contract.relied_on import CALLS, MEMBERS, NAMES

Function = ast.FunctionDef | ast.AsyncFunctionDef
Snapshot = dict[str, Any]
PROPERTIES = ("property", "cached_property")


class Sources:
    """The Python files of a vLLM: of a wheel, or of a folder that has the folder `vllm`."""

    def __init__(self, root: Path) -> None:
        if root.suffix == ".whl":
            archive = ZipFile(root)
            names = re.findall(r"^vllm/.*\.py$", "\n".join(archive.namelist()), re.MULTILINE)
            self._texts = {name: archive.read(name).decode() for name in names}
        else:
            paths = (root / "vllm").rglob("*.py")
            self._texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths}
        self._parse = cache(ast.parse)

    def text_of(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return self._texts.get(f"{base}.py", self._texts.get(f"{base}/__init__.py"))

    def texts_below(self, folder: str) -> str:
        """Returns all files below a folder, or one file, as one text."""
        return "\n".join(text for name, text in self._texts.items() if name.startswith(folder))

    def gives(self, module: str, name: str | None) -> bool:
        """Whether a module can be imported, or a name from it: it defines the name, imports it, has
        it in a table of names, or is a package with that module."""
        text = self.text_of(module)
        if name is None or text is None:
            return text is not None
        made = (
            rf"^\s*(?:class|(?:async )?def) {name}\b|^\s*{name}(?: as \w+)?\s*(?:[:=,]|$)"
            rf"|import .*\b{name}\b|[\"']{name}[\"']"
        )
        found = re.search(made, text, re.MULTILINE)
        return found is not None or self.text_of(f"{module}.{name}") is not None

    def find(self, module: str, name: str) -> ast.AST | None:
        """Returns the class or function that a module defines."""
        kinds = (ast.ClassDef, *Function.__args__)
        nodes = ast.walk(self._parse(self.text_of(module) or ""))
        return next((one for one in nodes if isinstance(one, kinds) and one.name == name), None)

    def members(self, module: str, name: str) -> dict[str, ast.AST]:
        """Returns the members of a class and of its bases in that module: of its body, and those
        that methods set."""
        node = self.find(module, name)
        if not isinstance(node, ast.ClassDef):
            return {}
        members: dict[str, ast.AST] = {}
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name) and plain.id != name:
                members |= self.members(module, plain.id)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                members.setdefault(inner.attr, inner)
        for item in node.body:
            for inner in [item] if isinstance(item, Function) else ast.walk(item):
                if isinstance(inner, Function):
                    members[inner.name] = inner
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    members[inner.id] = inner
        return members


def snapshot(root: Path, version: str, imported: Iterable[tuple[str, str | None]]) -> Snapshot:
    """Returns what a vLLM has of all that lrl relies on, and of the modules and names that it
    imports; None is the module itself."""
    sources = Sources(root)
    entrypoints = sources.texts_below("vllm/entrypoints/")
    flags = sources.texts_below("vllm/engine/arg_utils.py") + entrypoints
    variables = sources.texts_below("vllm/envs.py") + sources.texts_below("vllm/usage/")
    has = sorted(import_name(*one) for one in imported if sources.gives(*one))
    for where, names in MEMBERS.items():
        module, _, name = where.rpartition(".")
        members = {_written(*member) for member in sources.members(module, name).items()}
        has += [f"{where}.{member}" for member in names.split() if member in members]

    def is_there(kind: str, name: str) -> bool:
        if kind == "flag":
            field = rf"^    {name.replace('-', '_')}\b"
            return re.search(field, flags, re.MULTILINE) is not None
        return name in variables if kind == "variable" else f'"{name}"' in entrypoints

    for kind, names in NAMES.items():
        has += [f"{kind} {name}" for name in names.split() if is_there(kind, name)]
    signatures = {call: _signature(sources, call) for call in CALLS}
    return {"version": version, "has": has, "signatures": signatures}


def import_name(module: str, name: str | None) -> str:
    return module if name is None else f"{module}:{name}"


def _written(name: str, node: ast.AST) -> str:
    """Returns the name of a member as `relied_on.MEMBERS` has it."""
    if not isinstance(node, Function):
        return name
    decorators = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
    return name if any(one in PROPERTIES for one in decorators) else f"{name}()"


def _signature(sources: Sources, call: str) -> str | None:
    """Returns the parameters of a function without `self`, every default as None; None if there is
    no such function."""
    module, _, name = call.partition(":")
    owner, _, function = name.rpartition(".")
    members = sources.members(module, owner) if owner else {name: sources.find(module, name)}
    node = members.get(function)
    if not isinstance(node, Function):
        return None
    found, nothing = copy.deepcopy(node.args), ast.Constant(None)
    for argument in ast.walk(found):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    found.args = [one for one in found.args if one.arg not in ("self", "cls")]
    found.defaults = [nothing for _ in found.defaults]
    found.kw_defaults = [default and nothing for default in found.kw_defaults]
    return ast.unparse(found)
