"""Trainer and vLLM on one GPU: how long a step and its sync take, how fast both sides are, and what
fits.

    python -m benchmarks.gpu.one_gpu --size 8b
    python -m benchmarks.gpu.one_gpu --lora 16                              adapters alone are trained
    python -m benchmarks.gpu.one_gpu --size tiny --device cpu --steps 4     a rehearsal

A real `Trainer.fit` of a policy with random weights. A sync is compared with a plain copy of the
same bytes within the GPU: the lower bound of moving them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

import lrl
from benchmarks import arguments
from benchmarks.gpu import rows
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.gpu.memory_plan import (
    CONCURRENT_RESPONSES,
    GIB,
    GROUPS_PER_STEP,
    HEAD_CHUNK_TOKENS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    MICRO_BATCH_TOKENS,
    ROLLOUTS_PER_GROUP,
    plan_memory,
)
from benchmarks.random_policy import SHAPES, hashed, llama, made_up_rows, make_policy
from benchmarks.records import append, origin
from benchmarks.runs import EveryStep, quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.rollouts.sources import read_rows

MEASURED = slice(2, -1)
"""The first two steps fill the pipeline and allocate AdamW's state; in the last one nothing is left
to generate."""
LEAST_STEPS = 4


class Recorder(EveryStep):
    """Keeps every step's times and the most memory in use on the device, both processes together."""

    def __init__(self, throughput: Throughput, machine: Machine) -> None:
        self.throughput = throughput
        self.machine = machine
        self.steps: list[dict[str, float]] = []
        self.device_bytes = self.first_sync_bytes = self.first_sync_peak_bytes = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first_sync_bytes = self.device_bytes = self.machine.used
        self.first_sync_peak_bytes = self.machine.peak

    def step_done(self, trainer: Any) -> None:
        times, stream = self.throughput.times, trainer.datamodule.run.step_stream
        self.steps.append(
            {
                "step_s": times.step,
                "wait_s": times.wait,
                "train_s": times.train,
                "sync_s": times.sync,
                "pause_s": times.sync_pause,
                "generated_tokens_per_s": times.generated_tokens_per_s,
                "trained_tokens_per_s": stream.num_tokens / times.step,
            }
        )
        self.device_bytes = max(self.device_bytes, self.machine.used)


def make_run(
    folder: Path,
    problems: list[dict[str, Any]],
    steps: int,
    machine: Machine,
    strategy: lrl.AsyncSingleDevice,
    groups: int = GROUPS_PER_STEP,
    tokens: int = MAX_RESPONSE_TOKENS,
    **of_policy: Any,
) -> tuple[L.Trainer, lrl.PolicyModule, lrl.RolloutDataModule, Recorder]:
    throughput = Throughput()
    recorder = Recorder(throughput, machine)
    trainer = quiet_trainer(
        steps,
        folder.parent,
        accelerator=machine.accelerator,
        enable_progress_bar=True,
        devices=1,
        strategy=strategy,
        callbacks=[WeightSync(), throughput, recorder],
    )
    policy = lrl.PolicyModule(
        str(folder),
        gradient_checkpointing=True,
        head_chunk_tokens=HEAD_CHUNK_TOKENS,
        **({"dtype": machine.dtype} | of_policy),
    )
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts(problems, prompt_column="question", too_long="skip"),
        rewards=[hashed],
        groups_per_step=groups,
        rollouts_per_group=ROLLOUTS_PER_GROUP,
        max_prompt_tokens=MAX_PROMPT_TOKENS,
        max_response_tokens=tokens,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    return trainer, policy, data, recorder


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    measured = steps[MEASURED]
    return {name: statistics.median(step[name] for step in measured) for name in measured[0]}


def table(result: dict[str, Any]) -> str:
    columns = {
        "policy": result["size"],
        "generator": result["quantization"] or "bfloat16",
        "transport": result["transport"],
        "step s": f"{result['step_s']:.2f}",
        "wait s": f"{result['wait_s']:.2f}",
        "train s": f"{result['train_s']:.2f}",
        "sync s": f"{result['sync_s']:.3f}",
        "pause s": f"{result['pause_s']:.3f}",
        "copy s": f"{result['copy_s']:.4f}",
        "generated tokens/s": f"{result['generated_tokens_per_s']:,.0f}",
        "trained tokens/s": f"{result['trained_tokens_per_s']:,.0f}",
        "mismatch nats": f"{result['mismatch_kl']:.1e}",
        "first sync GiB": f"{result['first_sync_gib']:.1f}",
        "first sync, trainer's peak GiB": f"{result['first_sync_peak_gib']:.1f}",
        "trainer peak GiB": f"{result['trainer_peak_gib']:.1f}",
        "device peak GiB": f"{result['device_peak_gib']:.1f}",
    }
    return rows.table(columns, result)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config, machine = llama(args.size), MACHINES[args.device]()
    plan = plan_memory(config)
    memory = machine.server_memory(plan)
    given = read_rows(args.prompts, None, "train") if args.prompts else made_up_rows()
    problems = list(given)
    folder = args.folder / f"policy-{args.size}"
    make_policy(config, [row["question"] for row in problems], folder, machine.device)
    copied_s = machine.copy_seconds(plan.weights)
    machine.begin()
    if args.transport == "nccl":
        os.environ.setdefault("NCCL_HOSTID", "lrl-trainer")
    server = lrl.ServerSettings(
        max_num_seqs=CONCURRENT_RESPONSES, quantization=args.quantization, **memory
    )
    strategy = lrl.AsyncSingleDevice(
        generator_devices=0, weight_transfer=args.transport, server=server
    )
    trainer, policy, data, recorder = make_run(
        folder,
        problems,
        args.steps,
        machine,
        strategy,
        groups=args.groups,
        tokens=args.tokens,
        lora=lrl.LoRA(rank=args.lora) if args.lora else None,
    )
    trainer.fit(policy, data)
    return {
        **origin(),
        "command": args.command,
        "machine": machine.name,
        "size": args.size,
        "responses": args.groups * ROLLOUTS_PER_GROUP,
        "response_tokens": args.tokens,
        "quantization": args.quantization,
        "transport": args.transport,
        "lora": args.lora,
        "measured_steps": len(recorder.steps[MEASURED]),
        **medians(recorder.steps),
        "copy_s": copied_s,
        "weights_gib": plan.weights / GIB,
        "mismatch_kl": float(trainer.callback_metrics["policy/mismatch_kl"]),
        "first_sync_gib": recorder.first_sync_bytes / GIB,
        "first_sync_peak_gib": recorder.first_sync_peak_bytes / GIB,
        "trainer_peak_gib": machine.peak / GIB,
        "device_peak_gib": recorder.device_bytes / GIB,
        "planned_gib": (plan.trainer + plan.generator) / GIB,
        "server_memory": memory,
    }


STEP_SIZE = {
    "groups": (GROUPS_PER_STEP, "prompts a step"),
    "tokens": (MAX_RESPONSE_TOKENS, "of a response"),
}
"""Settings of a run here and in `one_server`."""


def main() -> None:
    parser = rows.make_parser("one_gpu", __doc__)
    arguments.add(
        parser,
        size=("0.5b", "of the policy", SHAPES),
        transport=(None, "how weights travel; ipc, on a CPU shared_memory"),
        quantization=(None, "of the generator, as strategy.server.quantization; fp8_per_channel"),
        steps=(12, "optimizer steps"),
        lora=(0, "rank of adapters; 0 trains all weights"),
        prompts=(None, "GSM8K as a file, or any rows with a `question`; else made-up rows"),
        **STEP_SIZE,
    )
    args = rows.parse(parser, LEAST_STEPS)
    transports = MACHINES[args.device].transports
    args.transport = args.transport or transports[0]
    if args.transport not in transports:
        parser.error(f"--transport {args.transport}: on a {args.device} take {transports}.")
    result = measure(args)
    append(args.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
