"""The notebook of the quickstart runs from its first cell to its last, in a process without a
script and with a running event loop, as a notebook's kernel is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "docs" / "quickstart.ipynb"
KERNEL = """
import asyncio, json, sys
from pathlib import Path

async def run():
    for cell in json.loads(Path("cells.json").read_text()):
        if cell.startswith("%%writefile "):
            name, text = cell.removeprefix("%%writefile ").split("\\n", 1)
            Path(name).write_text(text)
        else:
            exec(compile(cell, "a cell", "exec"), vars(sys.modules["__main__"]))

asyncio.run(run())
"""
"""Of a notebook's own commands the cells have one, which writes a file."""


def smaller_cells(policy: Path) -> list[str]:
    """The cells with code; replaced are sizes alone, and the policy that takes a minute to make."""
    text = NOTEBOOK.read_text()
    for old, new in {
        "lrl.quickstart.warmup:policy": str(policy),
        "groups_per_step=16": "groups_per_step=2",
        "rollouts_per_group=16": "rollouts_per_group=4",
        "max_steps=60": "max_steps=2",
        "task.held_out()": "task.held_out()[:4]",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    cells = json.loads(text)["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    quickstart_policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "cells.json").write_text(json.dumps(smaller_cells(quickstart_policy)))
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "step 2/2: reward" in done.stderr
    assert (tmp_path / "lightning_logs" / "version_0" / "policy" / "model.safetensors").exists()


def test_the_notebook_is_kept_without_what_a_run_of_it_printed() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert {str(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"} == {"[]"}
