"""The vLLM plugin (entry point `vllm.general_plugins`), loaded in each of its processes.

It registers lrl's engines, lets vLLM's engine hold tokens back, and its API server take those that
come together and tell their versions. On a CPU it lets the engine be a fork. Process groups of one
rank share a thread.
"""

import torch

from lrl.vllm_plugin import (
    flat_logprobs,
    forked_engine,
    gloo_thread,
    output_batching,
    token_versions,
)

ENGINES = {
    **dict.fromkeys(
        ("shared_memory", "pull"), ("lrl.vllm_plugin.shared_memory_engine", "SharedMemoryEngine")
    ),
    "nccl": ("lrl.vllm_plugin.nccl_engine", "NcclEngine"),
}
"""Module and class by name; `nccl` takes the place of vLLM's own, from which it derives."""


def register() -> None:
    """Does all of it; vLLM may call this more than once in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, engine in ENGINES.items():
        WeightTransferEngineFactory._registry.pop(name, None)
        WeightTransferEngineFactory.register_engine(name, *engine)
    output_batching.install()
    flat_logprobs.install()
    token_versions.install()
    forked_engine.install()
    gloo_thread.install()
    # A process asks Linux before its first AMX instruction. vLLM's attention for CPUs (0.32) does
    # not, and oneDNN does only for large products of matrices: all engines of a small policy in
    # bfloat16 ended at their first request, by an illegal instruction.
    torch.cpu._init_amx()
