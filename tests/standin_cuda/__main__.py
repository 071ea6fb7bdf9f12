"""Plays cases and faults beside the CPU; prints a line of JSON for each. See
`tests.standin_cuda`."""

import argparse
import ctypes
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.standin_cuda import flash_attn


def main() -> int:
    """Loads the guard, then all that imports torch."""
    parser = argparse.ArgumentParser(prog="python -m tests.standin_cuda", description=__doc__)
    parser.add_argument("rows", nargs="*", help="cases and faults; left out: all")
    parser.add_argument("--device", choices=("standin", "gpu"), default="standin")
    parser.add_argument("--out", type=Path, help="gets the lines; left out: printed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="standin-cuda-") as folder:
        if args.device == "standin":
            library = Path(folder) / "guard.so"
            build_guard(library)
            assert "torch" not in sys.modules, "it asks for CUDA's hooks once, and may have done so"
            ctypes.CDLL(str(library))
        flash_attn.install(Path(folder))
        from tests.standin_cuda.play import play

        play(args.rows, args.device, Path(folder), args.out)
    return 0


def build_guard(library: Path) -> None:
    """Compiles `guard.cpp`, which lets a CPU build of torch use the device "cuda"; five seconds."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    headers = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = [
        *("c++", "-O0", "-std=c++20", "-shared", "-fPIC"),
        *(f"-I{folder}" for folder in headers),
        *(str(Path(__file__).with_name("guard.cpp")), "-o", str(library)),
        *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"),
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
