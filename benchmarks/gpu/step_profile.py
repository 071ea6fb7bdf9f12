"""A profile of one optimizer step: its kernels by time, and what kind of work they are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
from torch.profiler import ProfilerActivity, profile

from benchmarks.records import markdown

KINDS = {
    "matrices": ("gemm", "nvjet", "cutlass", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("flash", "fmha", "attention", "flex"),
    "optimizer": ("multi_tensor", "adam", "_foreach"),
    "softmax": ("softmax", "logsumexp"),
    "sums": ("reduce", "aten::sum", "aten::mean", "norm"),
    "copies": ("memcpy", "memset", "copy", "_to_copy"),
    "by index": ("index", "gather", "scatter", "embedding"),
    "elementwise": ("elementwise", "aten::mul", "aten::add", "aten::silu", "aten::neg"),
}
"""Kinds of work, each with parts of the names of its kernels; the first that fits counts."""
KERNELS = 40
"""Kernels that are kept, those of most time."""


class StepProfile(L.Callback):
    """Profiles the step of this number, from 0."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.found: dict[str, Any] = {}
        self._profile: profile | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        if trainer.global_step == self.step:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        if self._profile is None or self.found:
            return
        self._profile.stop()
        on_gpu = pl_module.device.type == "cuda"
        events = [event for event in self._profile.events() if on_gpu == _is_kernel(event)]
        micros: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for event in events:
            micros[event.name] += (
                event.self_device_time_total if on_gpu else event.self_cpu_time_total
            )
            calls[event.name] += 1
        self.found = {
            "busy_ms": micros.total() / 1000,
            "launches": calls.total(),
            "kinds_ms": kinds(micros),
            "kernels": [
                [name[:120], round(time / 1000, 3), calls[name]]
                for name, time in micros.most_common(KERNELS)
            ],
        }


def kinds(micros: Counter[str]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for name, time in micros.items():
        low = name.lower()
        fits = (kind for kind, parts in KINDS.items() if any(part in low for part in parts))
        found[next(fits, "other")] += time
    return {kind: round(time / 1000, 2) for kind, time in found.most_common()}


def _is_kernel(event: Any) -> bool:
    return event.device_type.name == "CUDA"


def table(found: dict[str, Any]) -> str:
    busy = found["busy_ms"]
    of_kinds = [(kind, f"{ms:.1f}", f"{ms / busy:.0%}") for kind, ms in found["kinds_ms"].items()]
    of_kernels = [(name, f"{ms:.2f}", calls) for name, ms, calls in found["kernels"]]
    tables = (
        markdown(("work", "ms", "of busy time"), of_kinds),
        markdown(("kernel", "ms", "calls"), of_kernels),
    )
    return "\n\n".join(tables)
