"""Reads from the Python sources of a vLLM, as text, what `relied_on` names. Nothing of vLLM is
imported.

The result is a snapshot: plain data that JSON holds, small enough to be kept for each release
(`python -m tests.vllm_contract`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
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

    def file_of(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next(
            (name for name in (f"{base}.py", f"{base}/__init__.py") if name in self._texts), None
        )

    def texts_below(self, folder: str) -> str:
        """Returns all files below a folder, or one file, as one text."""
        return "\n".join(text for name, text in self._texts.items() if name.startswith(folder))

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Returns the module that defines a name at its top, followed through re-exports, and its
        node there."""
        file = self.file_of(module)
        if file is None:
            return None
        found: tuple[str, ast.AST] | None = None
        for node in _top_level(self._parse(self._texts[file]).body):
            if isinstance(node, ast.ImportFrom):
                found = self._imported(module, file, node, name) or found
            elif name in _names_defined(node):
                found = (module, node)
        if found is None and self.file_of(f"{module}.{name}"):
            return f"{module}.{name}", ast.Module([], [])
        text = self._texts[file]
        if found is None and "__getattr__" in text and f'"{name}"' in text:
            return module, ast.Module([], [])  # an import on demand, from a table of names
        return found

    def members(self, module: str, name: str) -> dict[str, ast.AST]:
        """Returns the members of a class and of its bases within vLLM: of its body, and those that
        methods set."""
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        home, node = found
        members: dict[str, ast.AST] = {}
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Name) and plain.id != name:
                members |= self.members(home, plain.id)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                members.setdefault(inner.attr, inner)
        for item in node.body:
            members |= dict.fromkeys(_names_defined(item), item)
        return members

    def _imported(
        self, module: str, file: str, node: ast.ImportFrom, name: str
    ) -> tuple[str, ast.AST] | None:
        source = _absolute(module, file.endswith("__init__.py"), node)
        for alias in node.names:
            if alias.name == "*" and source.startswith("vllm"):
                return self.find(source, name)
            if (alias.asname or alias.name) == name:
                return (
                    self.find(source, alias.name) if source.startswith("vllm") else (module, node)
                )
        return None


def snapshot(root: Path, version: str, imported: Iterable[tuple[str, str | None]]) -> Snapshot:
    """Returns what a vLLM has of all that lrl relies on, and of the modules and names that it
    imports; None is the module itself."""
    sources = Sources(root)
    entrypoints = sources.texts_below("vllm/entrypoints/")
    flags = sources.texts_below("vllm/engine/arg_utils.py") + entrypoints
    variables = sources.texts_below("vllm/envs.py") + sources.texts_below("vllm/usage/")
    return {
        "version": version,
        "imports": sorted(shown for one in imported if (shown := _shown_import(sources, *one))),
        "members": {where: _kinds(sources, where) for where in MEMBERS},
        "signatures": {call.replace(":", "."): _signature(sources, call) for call in CALLS},
        "routes": [name for name in NAMES["routes"].split() if f'"{name}"' in entrypoints],
        "variables": [name for name in NAMES["variables"].split() if name in variables],
        "flags": [
            name
            for name in NAMES["flags"].split()
            if re.search(rf"^    {name.replace('-', '_')}\b", flags, re.MULTILINE)
        ],
    }


def import_name(module: str, name: str | None) -> str:
    return module if name is None else f"{module}:{name}"


def _shown_import(sources: Sources, module: str, name: str | None) -> str | None:
    found = sources.file_of(module) if name is None else sources.find(module, name)
    return None if found is None else import_name(module, name)


def _kinds(sources: Sources, where: str) -> dict[str, str]:
    """Returns the kind of each relied-on member of a class that the class has: `method`, `property`
    or `value`."""
    module, _, name = where.rpartition(".")
    found = sources.members(module, name)
    wanted = {member.removesuffix("()") for member in MEMBERS[where].split()}
    return {member: _kind(found[member]) for member in sorted(wanted) if member in found}


def _kind(node: ast.AST) -> str:
    if not isinstance(node, Function):
        return "value"
    decorators = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
    return "property" if any(name in PROPERTIES for name in decorators) else "method"


def _signature(sources: Sources, call: str) -> dict[str, Any] | None:
    """Returns the parameters of a function without `self`; None if there is no such function."""
    module, _, name = call.partition(":")
    owner, _, function = name.rpartition(".")
    if owner:
        node = sources.members(module, owner).get(function)
    else:
        found = sources.find(module, function)
        node = found[1] if found else None
    if not isinstance(node, Function):
        return None
    arguments = node.args
    positional = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {
        "positional": [one for one in positional if one not in ("self", "cls")],
        "required": [one for one in required if one not in ("self", "cls")],
        "keyword_only": [argument.arg for argument in arguments.kwonlyargs],
        "required_keywords": [argument.arg for argument, default in defaults if default is None],
        "more_positional": arguments.vararg is not None,
        "more_keywords": arguments.kwarg is not None,
    }


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, those in its conditions and attempts among them."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level([*node.body, *node.orelse])


def _names_defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if is_package else module.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])
