"""The vLLM plugin (entry point `vllm.general_plugins`), loaded in each of its processes.

It registers lrl's engines, lets vLLM's engine hold tokens back, and its API server take those that
come together and tell their versions. On a CPU it lets the engine be a fork. Process groups of one
rank share a thread.
"""

import functools
import os
from datetime import timedelta
from types import MethodType
from typing import Any

import torch

from lrl.vllm_plugin import output_batching

ENGINES = {
    "shared_memory": "FileEngine",
    "pull": "FileEngine",
    "nccl": "NcclEngine",
    "ipc": "IpcEngine",
}
"""Classes of `lrl.vllm_plugin.engines` by name; `nccl` and `ipc` take the places of vLLM's own."""
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@functools.cache
def register() -> None:
    """Does all of it, once: vLLM may call this more often in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, engine in ENGINES.items():
        WeightTransferEngineFactory._registry.pop(name, None)
        WeightTransferEngineFactory.register_engine(name, "lrl.vllm_plugin.engines", engine)
    output_batching.install()
    let_engines_fork()
    share_gloo_thread()
    # A process asks Linux before its first AMX instruction. vLLM's attention for CPUs (0.32) does
    # not, and oneDNN does only for large products of matrices: all engines of a small policy in
    # bfloat16 ended at their first request, by an illegal instruction.
    torch.cpu._init_amx()


def let_engines_fork() -> None:
    """Makes `METHOD` hold for an engine that is its own worker, on a CPU.

    vLLM's CPU build spawns engine and workers whatever it says, so that each worker can have its
    own threads and libraries; `lrl.generators.cpu_backend` sets those of an engine alone. Side by
    side a server was ready after 7.7 s and 14.2 s, with 0.82 and 1.07 GiB: a fork imports nothing.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    check = platform.check_and_update_config.__func__

    def keeping(cls: Any, config: Any) -> None:
        method = os.environ.get(METHOD)
        check(cls, config)
        if method and config.parallel_config.distributed_executor_backend == "uni":
            os.environ[METHOD] = method

    platform.check_and_update_config = classmethod(keeping)


def share_gloo_thread() -> None:
    """Makes the process groups of one rank share one thread of gloo.

    vLLM makes 13 process groups also for an engine that is alone. Each has a thread that wakes 100
    times a second: on a CPU an engine that had nothing to do took 3.4 % of a core, and takes 0.6 %
    with one thread. A group of one rank sends nothing, so one is enough for all of them. A step of
    training meanwhile takes as long as before.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    make: Any = ProcessGroupGloo.__init__
    device = functools.cache(ProcessGroupGloo.create_default_device)

    def sharing(
        self: Any, store: Any, rank: int, size: int, *options: Any, **timeout: timedelta
    ) -> None:
        make_group = MethodType(make, self)
        if size > 1 or options:  # with options the caller names a device itself
            return make_group(store, rank, size, *options, **timeout)
        shared: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        shared._devices = [device()]
        shared._timeout = timeout.get("timeout", shared._timeout)
        return make_group(store, rank, size, shared)

    ProcessGroupGloo.__init__ = sharing  # type: ignore[method-assign]
