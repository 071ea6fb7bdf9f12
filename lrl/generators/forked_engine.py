"""On a CPU vLLM's engine is a fork of its API server: it need not import anew what that has imported.

vLLM spawns the engine of its CPU build, so that each worker can have its own threads and libraries. The engine of one
device (a tensor-parallel size of 1) is its own worker, and `lrl.generators.cpu_backend` sets its threads. The second
import took 6 of the 14 seconds of a start and 0.3 GiB; it writes as fast without.
"""

import os
from typing import Any


def install() -> None:
    """Has vLLM fork the engine of a configuration that it has checked; may be called twice."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    check = platform.check_and_update_config.__func__
    if check.__name__ == "forking":
        return

    def forking(cls: Any, config: Any) -> None:
        check(cls, config)
        if config.parallel_config.distributed_executor_backend == "uni":
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(forking)
