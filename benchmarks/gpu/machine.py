"""What a run on one device measures there: on a GPU, and in its place on a CPU, which rehearses the
whole program."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu.memory_plan import GIB, MemoryPlan

REPEATS, WARM_UP = 10, 3
"""Of a copy, and of a product of matrices."""


class Machine:
    """One device."""

    accelerator: str
    device: str
    """As torch has it."""
    transports: tuple[str, ...]
    """The ways of weights on it, the usual one first."""
    matrix_size: int
    """Rows and columns of a matrix that fills the device."""
    dtype: str
    """Of weights that it computes with fast."""

    name: str
    total: int
    """All bytes of its memory."""
    used: int
    """Bytes of its memory in use, by all processes."""
    peak: int
    """Most bytes that this process has had since `begin`."""

    def begin(self) -> None:
        """Leaves the memory to others and forgets the peak."""
        raise NotImplementedError

    def server_memory(self, plan: MemoryPlan) -> dict[str, Any]:
        """Returns the settings of the generator that give it its part; raises ValueError if not all
        fits."""
        raise NotImplementedError

    def copy_seconds(self, num_bytes: int) -> float:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return statistics.median(
            [self._copy(source, target) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        )

    def wait(self) -> None:
        raise NotImplementedError

    def seconds(self, work: Callable[[], Any]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def matrix_flops_per_s(self) -> float:
        left = torch.randn(
            self.matrix_size, self.matrix_size, dtype=torch.bfloat16, device=self.device
        )
        right = torch.randn_like(left)
        products = [self.seconds(lambda: torch.mm(left, right)) for _ in range(WARM_UP + REPEATS)]
        return 2.0 * self.matrix_size**3 / statistics.median(products[WARM_UP:])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        raise NotImplementedError


class Gpu(Machine):
    """A CUDA GPU."""

    accelerator = "gpu"
    device = "cuda"
    transports = ("ipc", "nccl")
    matrix_size = 8192
    dtype = "bfloat16"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    @property
    def used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def begin(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def server_memory(self, plan: MemoryPlan) -> dict[str, Any]:
        return {"gpu_memory_utilization": plan.utilization(self.total)}

    def wait(self) -> None:
        torch.cuda.synchronize()

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


class Cpu(Machine):
    """The processor and its memory."""

    accelerator = "cpu"
    device = "cpu"
    transports = ("shared_memory",)
    matrix_size = 512
    dtype = "float32"

    @property
    def name(self) -> str:
        return f"{platform.machine()} processor, {psutil.cpu_count()} cores"

    @property
    def total(self) -> int:
        return psutil.virtual_memory().total

    @property
    def used(self) -> int:
        return psutil.virtual_memory().used

    @property
    def peak(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def server_memory(self, plan: MemoryPlan) -> dict[str, Any]:
        plan.utilization(self.total)
        return {"kv_cache_gib": max(0.1, plan.kv_cache / GIB)}

    def wait(self) -> None:
        pass

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started


MACHINES: dict[str, type[Machine]] = {"gpu": Gpu, "cpu": Cpu}
