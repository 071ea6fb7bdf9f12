"""TRL's own environment, made on first use. The project's is not touched, and TRL needs nothing of
lrl's.

Torch, transformers and other packages of both have the versions of `requirements/cpu.txt`, so they
make no difference between the two.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TRL, ACCELERATE = "1.16.0", "1.15.0"
ROOT = Path(__file__).resolve().parents[2]


def trl_python(folder: Path) -> Path:
    """Returns the Python that has TRL; installs it, in some minutes, if the folder does not hold
    this version."""
    python, stamp = folder / "bin" / "python", folder / f"trl-{TRL}"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        wanted = [
            f"trl=={TRL}",
            f"accelerate=={ACCELERATE}",
            "torch",
            "transformers",
            "datasets",
            "psutil",
        ]
        constraints = str(ROOT / "requirements" / "cpu.txt")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, "-c", constraints, *wanted], check=True)
        stamp.touch()
    return python
