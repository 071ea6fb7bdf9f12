"""No file and no folder of lrl imports itself through others; few import vLLM; a run on a laptop
imports what it uses. Imports for type checking count, but for the last."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.planning.shapes import QWEN_1_5B
from tests.strategies.forked_ranks import start_fork

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
LARGE = {"torch", "vllm", "transformers", "lightning"}


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


@cache
def imported() -> Graph:
    """Each file with the modules that it imports anywhere in it."""
    known = modules(ROOT)
    graph: Graph = {}
    for name, path in known.items():
        found = graph.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not names_its_owner(node):
                assert node.module is not None and not node.level, f"{path}: name the module whole"
                parts = (f"{node.module}.{alias.name}" for alias in node.names)
                found.update(one if one in known else node.module for one in parts)
    return graph


def names_its_owner(node: ast.ImportFrom) -> bool:
    """`lrl.run` owns the others; that one of them names its owner, for typing or within a function,
    is no circle."""
    return node.module == "lrl.run" and node.col_offset > 0


def imports() -> Graph:
    """Each file with the files that it imports; `lrl/__init__.py`, which names what users import,
    is left out."""
    known = modules(ROOT).keys() - {"lrl"}
    return {name: imported()[name] & known - {name} for name in known}


def of_folders(files: Graph, known: Mapping[str, Path]) -> Graph:
    """The same for folders, with the folders in them; a file at the top of lrl counts as one."""

    def folder(name: str) -> str:
        package = name if known[name].name == "__init__.py" else name.rpartition(".")[0]
        return name if package == "lrl" else ".".join(package.split(".")[:2])

    graph: Graph = {}
    for name, others in files.items():
        graph.setdefault(folder(name), set()).update(map(folder, others))
    return {name: others - {name} for name, others in graph.items()}


def test_no_file_and_no_folder_imports_itself_through_others() -> None:
    for graph in (imports(), of_folders(imports(), modules(ROOT))):
        TopologicalSorter(graph).prepare()  # raises an error that has the circle


def importers(package: str, room: str) -> set[str]:
    """The files outside of a room that import a package."""
    files = {name: others for name, others in imported().items() if not name.startswith(room)}
    return {
        name
        for name, others in files.items()
        if any(f"{one}.".startswith(package) for one in others)
    }


def test_planning_is_imported_by_its_command_alone() -> None:
    assert importers("lrl.planning.", room="lrl.planning.") == {"lrl.cli.plan"}


def test_vllm_is_imported_in_one_room_and_for_nccls_communicator() -> None:
    assert importers("vllm.", room="lrl.vllm_plugin.") == {"lrl.weights.nccl"}


def test_a_run_on_a_laptop_imports_what_it_uses(tmp_path: Path) -> None:
    named = re.findall(r"lrl[\w.]+", (ROOT / "recipes/quickstart.yaml").read_text())
    fork = start_fork(print_what_is_imported, tmp_path / "said", {}, *ON_A_LAPTOP, *named)
    assert fork.wait(600.0) == 0, fork.printed()
    found = {name for name in fork.printed().split() if f"{name}.".startswith("lrl.")}
    others = [name for name in found if name.startswith(OF_OTHER_RUNS)]
    assert not others, "import it where it is used"
    assert 60 < len(found) <= MOST_FILES_ON_A_LAPTOP, found


def print_what_is_imported(*names: str) -> None:
    """Imports lrl anew in a process that has imported the libraries, which takes nine seconds."""
    for name in [one for one in sys.modules if f"{one}.".startswith("lrl.")]:
        del sys.modules[name]
    for name in names:
        pkgutil.resolve_name(name)
    print(*sys.modules)


def loaded(code: str, *words: str) -> set[str]:
    """The modules that a new process has imported after some code."""
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)", *words]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).splitlines()[-1].split())


def test_a_command_that_needs_no_large_library_imports_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_1_5B))
    cluster = ("--model", str(tmp_path), "--cluster", "8xH100", "--lengths", "fixed:500")
    work = ("--prompts", "16", "--prompt-tokens", "256")
    plan = "from lrl.cli.main import main; assert main(sys.argv[1:]) == 0"
    assert not loaded(plan, "plan", *cluster, *work) & LARGE
    assert "vllm" not in loaded("from lrl.cli import doctor; doctor.checks()")
    assert "torch" not in loaded("import lrl; dir(lrl)")
