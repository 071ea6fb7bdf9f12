"""Forks vLLM's engine from its API server on a CPU, which saves the imports.

vLLM's CPU build spawns engine and workers whatever `VLLM_WORKER_MULTIPROC_METHOD` says, so that
each worker can have its own threads and libraries. The engine of one device (a tensor-parallel size
of 1) is its own worker, and `lrl.generators.cpu_backend` sets its threads. The second import took 6
of the 14 seconds of a start and 0.3 GiB; a forked engine writes as fast.
"""

import os
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def install() -> None:
    """Makes `METHOD` hold for an engine that is its own worker; may be called twice."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    check = platform.check_and_update_config.__func__
    if check.__name__ == "keeping":
        return

    def keeping(cls: Any, config: Any) -> None:
        method = os.environ.get(METHOD)
        check(cls, config)
        if method and config.parallel_config.distributed_executor_backend == "uni":
            os.environ[METHOD] = method

    platform.check_and_update_config = classmethod(keeping)
