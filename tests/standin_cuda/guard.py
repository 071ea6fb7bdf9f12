"""Compiles and loads `guard.cpp`, which lets a CPU build of torch use the device "cuda"."""

import ctypes
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def build(library: Path) -> None:
    """Compiles the guard against the installed torch, in about five seconds."""
    torch = _torch_folder()
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [
        *("c++", "-O0", "-std=c++20", "-shared", "-fPIC"),
        *(f"-I{folder}" for folder in headers),
        *(str(Path(__file__).with_name("guard.cpp")), "-o", str(library)),
        *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"),
    ]
    subprocess.run(command, check=True)


def load(library: Path) -> None:
    """Loads the guard; call it before torch is imported."""
    assert "torch" not in sys.modules, "torch asks for CUDA's hooks once, and may have done so"
    ctypes.CDLL(str(library))


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
