"""A generator's program, and the vLLM plugin (entry point `vllm.general_plugins`) that is loaded in
each of its processes.

    python -m lrl.vllm_plugin.plugin FLAGS      vLLM's API server

The plugin registers lrl's engines, lets vLLM's engine hold tokens back, and its API server take
those that come together and tell their versions. On a CPU it lets the engine be a fork."""

import functools
import os
import runpy
from typing import Any

from lrl.system.imports import quick_imports

if __name__ in ("__main__", "__mp_main__"):
    # Nearly all that a server imports, and a spawned engine, which imports this module again.
    with quick_imports():
        import vllm.v1.engine.async_llm  # noqa: F401

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
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from lrl.vllm_plugin import output_batching

    for name, engine in ENGINES.items():
        WeightTransferEngineFactory._registry.pop(name, None)
        WeightTransferEngineFactory.register_engine(name, "lrl.vllm_plugin.engines", engine)
    output_batching.batch_outputs()
    output_batching.append_at_once()
    output_batching.tell_versions()
    let_engines_fork()
    # A process asks Linux before its first AMX instruction. vLLM's attention for CPUs (0.32) does
    # not, and oneDNN does only for large products of matrices: all engines of a small policy in
    # bfloat16 ended at their first request, by an illegal instruction.
    torch.cpu._init_amx()


def let_engines_fork() -> None:
    """Makes `METHOD` hold for an engine that is its own worker, on a CPU, where vLLM would spawn
    it: a fork imports nothing, and a server was ready after 7.7 s in place of 14.2 s."""
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


if __name__ == "__main__":
    # In a namespace of its own: this module stays `__main__`, which a spawned engine imports.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
