"""Checks of memory and disk, from the model's shapes before a weight is loaded.

Only what every run has is counted: activations, the Python processes and CUDA's own share come on
top. So a fault surely cannot work, and a run that passes may still be too large.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError
from lrl.preflight.model import Shape
from lrl.system.machine import GIB, in_gib
from lrl.weights.version_file import SHARED_MEMORY

if TYPE_CHECKING:
    import lightning as L

    from lrl.run import Run
    from lrl.strategies.generator_devices import GeneratorDevices

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES_PER_WEIGHT = 3
"""Numbers besides each trained one: its gradient and AdamW's two moments."""
COPIES_PER_CHECKPOINT = 3
"""Copies of the weights in a checkpoint: themselves and the two moments."""


def check_resources(run: Run, shape: Shape) -> None:
    """Checks memory, shared memory and disk."""
    strategy, policy = run.strategy, run.policy
    weights = trained = shape.parameters * BYTES[policy.dtype_name]
    if policy.lora is not None:
        trained = BYTES["float32"] * sum(map(math.prod, shape.trained.values()))
    states = STATES_PER_WEIGHT * trained + weights * policy.reference_has_model
    of_a_rank = (weights + (states if run.trains else 0)) // strategy.shards
    dtype = strategy.server_settings.dtype
    copy = shape.parameters * BYTES[policy.dtype_name if dtype == "auto" else dtype]
    if strategy.root_device.type == "cuda":
        check_gpus(strategy, of_a_rank, copy)
    else:
        check_memory(strategy, of_a_rank, copy)
    transport, servers = strategy.plan()
    travels = min(trained, copy) if transport.narrows else trained
    pools = 1 + bool(strategy.num_evaluation_generators)
    check_shared_memory(transport.backend, transport.stored_bytes(travels, pools, len(servers)))
    if run.trains:
        check_disk(run.trainer, trained)


def memory_here() -> int:
    """Returns the bytes of memory and swap that this process may use: the machine's, or its
    container's if less."""
    machine = psutil.virtual_memory().total + psutil.swap_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(machine, int(text)) if text.isdecimal() else machine


def check_memory(strategy: GeneratorDevices, of_a_rank: int, copy: int) -> None:
    """Checks a machine without GPUs: a process that is out of memory is killed."""
    trainer = of_a_rank * (len(strategy.parallel_devices or ()) or 1)
    number = len(strategy.placements())
    generators = number * copy
    kv_cache = int(number * strategy.server_settings.kv_cache_gib * GIB)
    needed, here = trainer + generators + kv_cache, memory_here()
    if needed > here:
        sizes = (needed, here, trainer, generators, kv_cache)
        needs, has, *parts = in_gib(*sizes)
        raise ConfigError(
            f"Memory: at least {needs} GiB are needed (trainer {parts[0]}, generators' weights "
            f"{parts[1]}, their keys and values {parts[2]}), and there are {has}. Take a smaller "
            "model.model, model.dtype bfloat16, or a smaller strategy.server.kv_cache_gib."
        )


def check_gpus(strategy: GeneratorDevices, of_a_rank: int, copy: int) -> None:
    """Checks the GPUs of the trainer and of the generators."""
    total = torch.cuda.get_device_properties(strategy.root_device).total_memory
    server = strategy.server_settings
    generator = int(server.gpu_memory_utilization * total)
    beside = generator if strategy.shares_device else 0
    if of_a_rank + beside > total:
        takes, has, share = in_gib(of_a_rank, total, beside)
        raise ConfigError(
            f"GPU memory: weights, gradients and moments take {takes} GiB, beside a generator's "
            f"{share} (strategy.server.gpu_memory_utilization), and the GPU has {has}. Take a "
            "smaller model.model, model.dtype bfloat16 or a lower share."
        )
    of_each = copy // server.tensor_parallel_size
    if of_each > generator:
        takes, share = in_gib(of_each, generator)
        raise ConfigError(
            f"GPU memory: a generator's weights take {takes} GiB on each GPU, of {share}. Raise "
            "strategy.server.gpu_memory_utilization or tensor_parallel_size."
        )


def check_shared_memory(transport: str, needed: int) -> None:
    """Checks that the staged weights fit: a write beyond its end kills the trainer."""
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        takes, has = in_gib(needed, free)
        raise ConfigError(
            f"{SHARED_MEMORY} has {has} GiB free, and strategy.weight_transfer {transport} takes "
            f"{takes}. Enlarge it: `mount -o remount,size={needed // GIB + 1}G {SHARED_MEMORY}`, "
            "or `docker run --shm-size` for a container."
        )


def check_disk(trainer: L.Trainer, weights: int) -> None:
    """Checks that a checkpoint fits on the disk of the run's folder."""
    saved = [
        1 if callback.save_weights_only else COPIES_PER_CHECKPOINT
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "save_weights_only")
    ]
    folder = run_folder(trainer).expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    disk = shutil.disk_usage(there)
    if saved and disk.total and max(saved) * weights > disk.free:
        free, taken = in_gib(disk.free, max(saved) * weights)
        raise ConfigError(
            f"{folder}: {free} GiB are free, and a checkpoint takes {taken}. Choose another "
            "trainer.default_root_dir, or set ModelCheckpoint.save_weights_only."
        )
