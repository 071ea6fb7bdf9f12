"""Plays cases and faults beside the CPU; prints a line of JSON for each. See
`tests.standin_cuda`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.standin_cuda import flash_attn, guard


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
            guard.build(library)
            guard.load(library)
        flash_attn.install(Path(folder))
        from tests.standin_cuda.play import play

        play(args.rows, args.device, Path(folder), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
