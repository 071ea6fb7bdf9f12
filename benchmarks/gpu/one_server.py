"""Several runs on one start of vLLM, which takes longer than any of them: the whole policy through
shared memory, adapters on float32 and bfloat16 weights, and vLLM's sleep.

    python -m benchmarks.gpu.one_server --size 1.5b
    python -m benchmarks.gpu.one_server --size tiny --device cpu --steps 4     a rehearsal

Each run is a `Trainer.fit` as in `benchmarks.gpu.one_gpu`. Asleep at level 1 a generator keeps its
weights in the CPU's memory and forgets keys and values; at level 2 it forgets both.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.gpu.memory_plan import CONCURRENT_RESPONSES, GIB, plan_memory
from benchmarks.gpu.one_gpu import LEAST_STEPS, MEASURED, STEP_SIZE, make_run, medians
from benchmarks.gpu.rows import make_parser, parse
from benchmarks.random_policy import SHAPES, llama, made, made_up_rows
from benchmarks.runs import Borrowing, LentServer, lent_server
from lrl.system.auth import bearer

RUNS: dict[str, dict[str, Any]] = {
    "whole policy": {},
    "adapters on bfloat16": {"lora": lrl.LoRA(rank=16), "dtype": "bfloat16"},
    "adapters on float32": {"lora": lrl.LoRA(rank=16), "dtype": "float32"},
}
SLEEP_DEADLINE_S = 60.0


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config, machine = llama(args.size), MACHINES[args.device]()
    rows = list(made_up_rows())
    folder = made(args.size, args.folder, machine.device)
    on_gpu = args.device == "gpu"
    server = lrl.ServerSettings(
        max_num_seqs=CONCURRENT_RESPONSES,
        dtype=machine.dtype,
        max_model_len=1024,
        extra_args={"enable-sleep-mode": True} if on_gpu else {},
        **machine.server_memory(plan_memory(config)),
    )
    devices = [0] if on_gpu else []
    with lent_server(folder, server, args.folder, devices) as lent:
        for name, of_policy in RUNS.items():
            yield {"row": name, **run(args, folder, rows, machine, lent, of_policy)}
        for level in (1, 2) if on_gpu else ():
            yield {"row": f"sleep, level {level}", **sleep(lent, machine, level)}


def run(
    args: argparse.Namespace,
    folder: Path,
    rows: list[dict[str, Any]],
    machine: Machine,
    lent: LentServer,
    of_policy: dict[str, Any],
) -> dict[str, Any]:
    machine.begin()
    strategy = Borrowing(lent, CONCURRENT_RESPONSES, generator_devices=0)
    size = {"groups": args.groups, "tokens": args.tokens}
    trainer, policy, data, recorder = make_run(
        folder, rows, args.steps, machine, strategy, **size, **of_policy
    )
    trainer.fit(policy, data)
    return {
        "measured_steps": len(recorder.steps[MEASURED]),
        **medians(recorder.steps),
        "mismatch_kl": float(trainer.callback_metrics["policy/mismatch_kl"]),
        "trainer_peak_gib": machine.peak / GIB,
        "device_peak_gib": recorder.device_bytes / GIB,
    }


def sleep(lent: LentServer, machine: Machine, level: int) -> dict[str, Any]:
    """Sends the generator to sleep and wakes it; returns seconds and the memory that was free
    meanwhile."""
    awake = machine.used
    asleep_s = post(lent, f"/sleep?level={level}")
    freed = awake - machine.used
    awake_s = post(lent, "/wake_up")
    return {"to_sleep_s": asleep_s, "to_wake_s": awake_s, "freed_gib": freed / GIB}


def post(lent: LentServer, route: str) -> float:
    headers = {"Authorization": bearer(lent.token)}
    request = urllib.request.Request(f"{lent.url}{route}", headers=headers, method="POST")
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=SLEEP_DEADLINE_S) as answer:
        answer.read()
    return time.perf_counter() - started


def main() -> None:
    parser = make_parser("one_server", __doc__)
    size = ("1.5b", "of the policy", SHAPES)
    arguments.add(parser, size=size, steps=(6, "of each run"), **STEP_SIZE)
    args = parse(parser, LEAST_STEPS)
    for found in measure(args):
        records.append(args.out, found | {"size": args.size, "command": args.command})
        print(found, flush=True)


if __name__ == "__main__":
    main()
