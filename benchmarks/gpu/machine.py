"""What a run on one device measures there: on a GPU, and in its place on a CPU, which rehearses the
whole program."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from benchmarks.gpu.memory_plan import GIB, MemoryPlan

REPEATS, WARM_UP = 10, 3
"""Of a copy, and of a product of matrices."""


class Machine:
    """The processor and its memory."""

    accelerator = "cpu"
    device = "cpu"
    """As torch has it."""
    transports: tuple[str, ...] = ("shared_memory",)
    """The ways of weights on it, the usual one first."""
    matrix_size = 512
    """Rows and columns of a matrix that fills the device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights that it computes with fast."""

    @property
    def name(self) -> str:
        return f"{platform.machine()} processor, {psutil.cpu_count()} cores"

    @property
    def total(self) -> int:
        """All bytes of its memory."""
        return psutil.virtual_memory().total

    @property
    def used(self) -> int:
        """Bytes of its memory in use, by all processes."""
        return psutil.virtual_memory().used

    @property
    def peak(self) -> int:
        """Most bytes that this process has had since `begin`."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def begin(self) -> None:
        """Leaves the memory to others and forgets the peak."""
        Path("/proc/self/clear_refs").write_text("5")

    def server_memory(self, plan: MemoryPlan) -> dict[str, Any]:
        """Returns the settings of the generator that give it its part; raises ValueError if not all
        fits."""
        plan.utilization(self.total)
        return {"kv_cache_gib": max(0.1, plan.kv_cache / GIB)}

    def wait(self) -> None:
        """Waits for the device's work."""

    def seconds(self, work: Callable[[], Any]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def copy_seconds(self, num_bytes: int) -> float:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        return statistics.median(
            [self._copy(source, target) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        )

    def matrix_flops_per_s(self) -> float:
        shape = (self.matrix_size, self.matrix_size)
        left = torch.randn(shape, dtype=torch.bfloat16, device=self.device)
        right = torch.randn_like(left)
        products = [self.seconds(lambda: torch.mm(left, right)) for _ in range(WARM_UP + REPEATS)]
        return 2.0 * self.matrix_size**3 / statistics.median(products[WARM_UP:])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> float:
        return self.seconds(lambda: target.copy_(source))


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


MACHINES: dict[str, type[Machine]] = {"gpu": Gpu, "cpu": Machine}
