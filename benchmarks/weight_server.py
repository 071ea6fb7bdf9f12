"""A vLLM server that receives weights by pull, for `benchmarks.weight_tree --policy`.

    LRL_GENERATOR_TOKEN=... python -m benchmarks.weight_server 127.0.0.1 FOLDER NUMBER RUN_ID

Serves the policy in `FOLDER` at that address as `Generator` number `NUMBER` of the run, and prints
its port once it answers. It ends with this process.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.system.auth import TOKEN_VARIABLE
from lrl.weights.pull import Pull


def main() -> None:
    """Serves until the process is ended."""
    host, policy, number, run_id = sys.argv[1:]
    settings = ServerSettings(dtype="bfloat16", host=host, insecure=True, kv_cache_gib=0.25)
    # The logs lie beside the policy, which has the folder of the benchmark.
    where = ([], Path(policy).parent, int(number), run_id, os.environ.pop(TOKEN_VARIABLE))
    server = Server(
        policy,
        settings,
        Pull.backend,
        *where,
        Pull.server_environment(int(number), {}),
        Pull.middleware,
    )
    server.start()
    server.wait_ready()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
