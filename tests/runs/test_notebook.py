"""The notebook of the quickstart runs from its first cell to its last on a lent server, in a process
without a script and with a running event loop, as a notebook's kernel is."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from pathlib import Path

from tests.lent_server import LentServer, borrow
from tests.strategies.forked_ranks import run_alone

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"


def smaller_cells(policy: Path) -> list[str]:
    """The cells with code; replaced are sizes alone, and the policy that takes a minute to make."""
    text = NOTEBOOK.read_text()
    for old, new in {
        "lrl.quickstart.warmup:policy": str(policy),
        "groups_per_step=16": "groups_per_step=2",
        "rollouts_per_group=16": "rollouts_per_group=4",
        "max_prompt_tokens=16": "max_prompt_tokens=64",
        "max_steps=60": "max_steps=2",
        "task.held_out()": "task.held_out()[:4]",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    cells = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def be_kernel(folder: Path, url: str, token: str, cells: list[str]) -> None:
    """Runs cells; of a notebook's own commands they have one, which writes a file."""

    async def run() -> None:
        for cell in cells:
            if cell.startswith("%%writefile "):
                name, text = cell.removeprefix("%%writefile ").split("\n", 1)
                Path(name).write_text(text)
            else:
                exec(compile(cell, "a cell", "exec"), vars(sys.modules["__main__"]))

    sys.modules["__main__"] = types.ModuleType("__main__")
    borrow(url, token)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    asyncio.run(run())


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    words = (tmp_path, lent_server.url, lent_server.token, smaller_cells(policy_folder))
    said = run_alone(be_kernel, tmp_path, *words, MPLBACKEND="agg")
    assert "step 2/2: reward" in said
    assert (tmp_path / "lightning_logs" / "version_0" / "policy" / "model.safetensors").exists()


def test_the_notebook_is_kept_without_what_a_run_of_it_printed() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert {str(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"} == {"[]"}
