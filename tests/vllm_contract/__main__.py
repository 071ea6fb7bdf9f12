"""Writes the snapshot of a release of vLLM, from its wheel: `python -m tests.vllm_contract WHEEL
...`.

Prints what lrl relies on and the release does not have; the exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.vllm_contract.check import FOLDER, broken, imports_of_vllm
from tests.vllm_contract.sources import snapshot


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_contract", description=__doc__)
    parser.add_argument("wheels", metavar="WHEEL", nargs="+", type=Path, help="of vLLM")
    faults = 0
    for wheel in parser.parse_args().wheels:
        version = wheel.name.split("-")[1]
        found = snapshot(wheel, version, imports_of_vllm())
        (FOLDER / f"{version}.json").write_text(json.dumps(found, indent=1) + "\n")
        lost = broken(found)
        print(f"vLLM {version}: {len(lost)} of lrl's reliances are broken", *lost, sep="\n  ")
        faults += len(lost)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
