"""No file and no folder of lrl imports itself through others; few import vLLM; a run on a laptop
imports what it uses. Imports for type checking count, but for the last."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
Graph = dict[str, set[str]]

ON_A_LAPTOP = ("lrl.cli.main", "lrl.cli.lightning", "lrl.policy", "lrl.datamodule")
"""What `lrl fit` imports whatever the recipe names."""
OF_OTHER_RUNS = (
    "lrl.planning",
    "lrl.strategies.fsdp",
    "lrl.strategies.several_ranks",
    "lrl.vllm_plugin",
)
"""Rooms and files that a run of one process with its own generators does without."""
MOST_FILES_ON_A_LAPTOP = 120


def modules(root: Path) -> dict[str, Path]:
    """The files of lrl by dotted name; the links `lrl/callbacks` and `lrl/recipes` are followed."""
    files = [
        Path(folder, name)
        for folder, _, names in os.walk(root / "lrl", followlinks=True)
        for name in names
    ]
    found = {}
    for path in (file for file in files if file.suffix == ".py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, package: str, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that a file imports anywhere in it.

    `lrl.run` owns the others; that one of them names its owner, for typing or within a function, is
    no circle.
    """
    tree = ast.parse(path.read_text())
    real = {id(node) for node in at_import(tree.body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "lrl.run" and id(node) not in real:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            yield from (
                one if (one := f"{base}.{alias.name}") in known else base for alias in node.names
            )


def imports(root: Path) -> Graph:
    """Each file with the files that it imports; `lrl/__init__.py`, which names what users import,
    is left out."""
    known = modules(root)
    graph = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = {one for one in imported(path, package, known) if one in known} - {
            name,
            "lrl",
        }
    del graph["lrl"]
    return graph


def of_folders(files: Graph, known: Mapping[str, Path]) -> Graph:
    """The same for folders, with the folders in them; a file at the top of lrl counts as one."""

    def folder(name: str) -> str:
        package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
        return name if package == "lrl" else ".".join(package.split(".")[:2])

    graph: Graph = {}
    for name, others in files.items():
        graph.setdefault(folder(name), set()).update(map(folder, others))
    return {name: others - {name} for name, others in graph.items()}


def circle(graph: Graph) -> list[str]:
    """The shortest way from a name back to it; empty if there is none."""
    found: list[list[str]] = []
    for start in sorted(graph):
        ways, seen = [[start]], {start}
        for way in ways:
            for other in sorted(graph.get(way[-1], ())):
                if other == start:
                    found.append([*way, start])
                elif other not in seen:
                    seen.add(other)
                    ways.append([*way, other])
    return min(found, key=len, default=[])


def test_no_file_imports_itself_through_others() -> None:
    found = circle(imports(ROOT))
    assert not found, " -> ".join(found)


def test_no_folder_imports_itself_through_others() -> None:
    found = circle(of_folders(imports(ROOT), modules(ROOT)))
    assert not found, " -> ".join(found)


def test_planning_is_imported_by_its_command_alone() -> None:
    importers = {
        name
        for name, others in imports(ROOT).items()
        if any(other.startswith("lrl.planning") for other in others)
    }
    assert {name for name in importers if not name.startswith("lrl.planning.")} == {"lrl.cli.plan"}


def test_vllm_is_imported_in_one_room_and_for_nccls_communicator() -> None:
    ends = {"lrl.weights.nccl"}
    known = modules(ROOT)
    found = {
        name
        for name, path in known.items()
        if any(one.split(".")[0] == "vllm" for one in imported(path, "", known))
    }
    assert ends < found
    assert {name for name in found - ends if not name.startswith("lrl.vllm_plugin.")} == set()


def at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The import statements that run when a module is imported: none for type checking, none of a
    function."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from at_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            for inner in ("body", "orelse", "finalbody", "handlers"):
                yield from at_import(getattr(node, inner, []))


def test_a_run_on_a_laptop_imports_what_it_uses() -> None:
    named = re.findall(r"lrl[\w.]+", (ROOT / "recipes/quickstart.yaml").read_text())
    code = "import pkgutil, sys; [pkgutil.resolve_name(name) for name in sys.argv[1:]]"
    words = [sys.executable, "-c", f"{code}; print(*sys.modules)", *ON_A_LAPTOP, *named]
    said = subprocess.check_output(words, cwd=ROOT, text=True).split()
    found = sorted(name for name in said if name.split(".")[0] == "lrl")
    others = [name for name in found if name.startswith(OF_OTHER_RUNS)]
    assert not others, "import it where it is used"
    assert len(found) <= MOST_FILES_ON_A_LAPTOP, found
