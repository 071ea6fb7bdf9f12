"""Command, flags and environment of a vLLM server on a machine without a GPU, and the requirements
on the machine."""

import ctypes
from typing import Any

from lrl.generators.settings import ServerSettings
from lrl.system.machine import half_of_the_cores, trainer_has_all_cores

NICE = ["nice", "-n", "10"]
"""A generator sometimes needs more than its half of the cores: engine and API server, besides the
trainer's thread that reads their streams. On two cores a trainer with the other half then waited 8
to 15 % of its time for a core, and 2 to 3 % when generators had a lower priority."""

LIBRARY = "libnuma.so.1"
"""A system library that vLLM's CPU build needs; no Python package brings it, and small systems lack
it."""
INSTALL_LIBRARY = "sudo apt-get install libnuma1"
"""The command that installs it on Debian and Ubuntu; on Fedora and RHEL it is in numactl-libs."""


def lacks_library() -> bool:
    """Whether the machine lacks `LIBRARY`. vLLM then warns only, and fails later at an operator
    that is not there."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return True
    return False


def command_prefix() -> list[str]:
    # A trainer on all cores has to leave the generator some of them.
    return [] if trainer_has_all_cores() else NICE


def flags(settings: ServerSettings) -> dict[str, Any]:
    """Returns vLLM's flags."""
    return {
        "enforce-eager": True,
        # An engine spins while a separate worker computes: on two cores the quickstart took 1.1
        # times as long.
        "distributed-executor-backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        # vLLM has 128, and its attention reads whole blocks: responses of 64 tokens took 1.25 times
        # as long.
        "block-size": 32,
        "kv-cache-memory-bytes": int(settings.kv_cache_gib * 2**30),
    }


def environment(settings: ServerSettings, overrides: dict[str, str]) -> dict[str, str]:
    """Returns environment variables; a value of the user's in `overrides` overrides the defaults,
    and no setting."""
    defaults = {
        # vLLM's own choice pins a worker to all cores but the last: on a small machine all
        # generators to one core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(half_of_the_cores()),
        # Keys and values in pages of 2 MiB, on systems that give them on request. With them, on
        # both sides, the engine took 2.9 s of CPU for a step of `benchmarks.overlap`'s long
        # responses next to a busy trainer, without 3.2.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # vLLM compiles a helper of log-probs at the first request, in eager mode, too. It took 12 s
        # of every start, and without a C++ compiler every request failed.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # see `lrl.vllm_plugin.plugin`
    }
    found = {name: overrides.get(name, value) for name, value in defaults.items()}
    if settings.threads is not None:
        found["OMP_NUM_THREADS"] = str(settings.threads)
    # Without it vLLM insists on a separate worker, so that it can set the worker's threads.
    return found | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
