"""A generator in another network namespace: `python -m tests.weights.far_generator FOLDER HOST
CERT KEY`.

Prints its port, then answers until its input ends; before that it prints what it holds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lrl.generators.settings import ServerSettings
from tests.weights.fetching_generators import fetching_generators


def main(folder: str, host: str, cert: str, key: str) -> None:
    """Runs one."""
    settings = ServerSettings(dtype="bfloat16", host=host, tls_cert=cert, tls_key=key)
    with fetching_generators(1, Path(folder), settings) as (generator,):
        sys.stdout.write(f"{generator.server.url}\n")
        sys.stdout.flush()
        sys.stdin.read()
        held = {
            name: weight.double().sum().item() for name, weight in generator.vllm.weights.items()
        }
        sys.stdout.write(json.dumps({"version": generator.vllm.version, "sums": held}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
