"""Plays each case on the CPU and on a GPU, and each fault on the GPU."""

import json
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers.utils.import_utils import is_flash_attn_2_available, is_torch_cuda_available

from lrl import policy_model
from lrl.training.beside import critic
from lrl.training.trials import Shared, shared_by_responses
from tests.flash_kernel import flash_kernel
from tests.standin_cuda.cases import (
    FAULTS,
    Faulty,
    Settings,
    StepEnds,
    cases,
    make_folders,
    numbers,
    on_cpu,
    staged,
    train,
)
from tests.standin_cuda.device import standin_cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TRIED: dict[Any, Shared] = {}


@contextmanager
def real_cuda() -> Iterator[Counter[str]]:
    """Yields the waits in the block, of which torch warns, a blocking copy to the GPU included."""
    waits, shown = Counter[str](), warnings.showwarning

    def count(message: Any, _: Any, file: str, line: int, *__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits[f"wait {Path(file).name}:{line}"] += 1

    torch.cuda.set_sync_debug_mode("warn")
    warnings.simplefilter("always")
    warnings.showwarning = count
    try:
        yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = shown
        warnings.simplefilter("ignore")


def tried_once(network: Any) -> Shared:
    """`shared_by_responses`, whose trial is the same for networks that differ in weights alone."""
    config = network.config
    attention = config._attn_implementation
    how = (type(network), network.device.type, network.dtype, attention, config.to_json_string())
    if how not in TRIED:
        TRIED[how] = shared_by_responses(network)
    return TRIED[how]


def play(rows: Sequence[str], device: str, work: Path, out: Path | None) -> None:
    """Plays rows, or all; prints a line of JSON for each, or appends it to `out`.

    A case has the numbers of both devices, its second step's micro-batches and waits, and the waits
    of staging its weights. A fault has its error; so has a case that raises.
    """
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    gpu = standin_cuda if device == "standin" else real_cuda
    for asked in (is_torch_cuda_available, is_flash_attn_2_available):  # while it was imported
        asked.cache_clear()
    folder = str(work / "policy")
    make_folders(Path(folder))
    settings = cases(folder)
    policy_model.shared_by_responses = critic.shared_by_responses = tried_once
    with nullcontext(sys.stdout) if out is None else out.open("a") as lines, flash_kernel():
        for name in rows or [*settings, *FAULTS]:
            try:
                with gpu() as waits:
                    found = (
                        _fault(name, folder, work)
                        if name in FAULTS
                        else _case(settings[name], folder, work, waits)
                    )
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"row": name, **found}), file=lines, flush=True)


def _case(
    settings: Callable[[], Settings], folder: str, work: Path, waits: Counter[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": numbers(*train(folder, CPU, work, **on_cpu(settings())), work)}

    def keep(micro_batches: int) -> None:
        found["micro_batches"] = micro_batches
        found["waits"] = dict(waits)

    steps = StepEnds(waits.clear, keep)
    trainer, policy = train(folder, GPU, work, steps, **settings())
    waits.clear()
    staged(policy, work)
    found["staging_waits"] = dict(waits)
    found["gpu"] = numbers(trainer, policy, work)
    return found


def _fault(name: str, folder: str, work: Path) -> dict[str, Any]:
    train(folder, GPU, work, kind=type(name, (Faulty,), {"fault": name}))
    return {}
