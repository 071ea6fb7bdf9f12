"""What a step's forward and backward passes cost with the prompt read once, beside a copy of it for
each response.

    python -m benchmarks.shared_prefixes MODEL --groups 1 --repeats 1 --shapes 1500x40
    python -m benchmarks.shared_prefixes MODEL --device gpu --groups 16 --micro-batch-tokens 16384

MODEL is a folder in Hugging Face format. Groups of random tokens, with responses of 0.5 to 1.5
times the mean length, are packed as in a run, with and without shared prompts, and go through
forward and backward in turns: in float32 on a CPU, as bf16-mixed on a GPU. The medians of the
seconds are compared; on a CPU they are those of the process on its cores, which no other work on
the machine prolongs by its own. So are the gradients: no result may depend on it. Memory is the
most that the process had, weights included.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.random_policy import random_group, random_tokens
from lrl.advantages import GroupMean
from lrl.rollouts.packing import Packer
from lrl.types import Group, MicroBatch, Prompt

HEADS = (
    *("model", "machine", "attention", "groups x responses", "prompt", "response"),
    *("tokens with copies", "read once", "seconds with copies", "read once", "faster"),
    *("peak GiB with copies", "read once", "gradient differs by"),
)
BY_WAY = ("tokens", "seconds", "peak_bytes")
SHAPES = ["6x4", "75x30", "100x150", "300x30"]
GPU_SHAPES = ["100x150", "500x500", "2000x200"]
"""A GPU is not filled by the others."""
SETTINGS: dict[str, Any] = {
    "model": (..., "a folder in Hugging Face format"),
    "shapes": ([], "tokens of a prompt x mean of a response"),
    "device": ("cpu", "that computes", MACHINES),
    "attention": ("sdpa", "as model.attention"),
    "groups": (2, "of a step"),
    "responses": (8, "of each group"),
    "micro_batch_tokens": (2048, "of one forward pass"),
    "repeats": (3, "turns of each way"),
}


def groups_of(run: Row, vocabulary: int) -> list[Group]:
    draw = random.Random(0)
    found = []
    for index in range(run["groups"]):
        tokens = random_tokens(draw, run["prompt"], vocabulary)
        means = (run["response"] * draw.uniform(0.5, 1.5) for _ in range(run["responses"]))
        lengths = [max(1, round(mean)) for mean in means]
        prompt = Prompt(id=index, token_ids=tokens, text="")
        found.append(random_group(draw, index, prompt, lengths=lengths, vocabulary=vocabulary))
    return found


def packed(
    groups: Sequence[Group], micro_batch_tokens: int, attention_tokens: int
) -> list[MicroBatch]:
    packer = Packer(micro_batch_tokens, GroupMean(), 1.0, attention_tokens=attention_tokens)
    rounds = [each for group in groups for each in packer.add(group)] + list(packer.flush())
    return [micro for each in rounds for micro in each if micro is not None]


def passes(
    policy: lrl.PolicyModule, micros: Sequence[MicroBatch], machine: Machine
) -> tuple[float, Tensor]:
    policy.zero_grad()
    machine.wait()
    clock = time.process_time if machine.device == "cpu" else time.perf_counter
    start = clock()
    for micro in micros:
        with torch.autocast(machine.device, torch.bfloat16, enabled=machine.device == "cuda"):
            loss = policy.compute_loss(micro.to(machine.device))
        loss.backward()
    machine.wait()
    seconds = clock() - start
    weights = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    return seconds, torch.cat([one.flatten() for one in weights])


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    machine = MACHINES[args.device]()
    policy = lrl.PolicyModule(
        args.model, objective=lrl.objectives.REINFORCE(), attention=args.attention
    )
    with torch.device(machine.device):
        policy.configure_model()
    policy.to(machine.device)
    for run in missing:
        yield run | compare(policy, machine, run, args.repeats)


def compare(policy: lrl.PolicyModule, machine: Machine, run: Row, repeats: int) -> Row:
    warm_up = 1 if machine.device == "cuda" else 0
    vocabulary = policy.network.get_input_embeddings().num_embeddings
    groups = groups_of(run, vocabulary)
    ways = {
        way: packed(groups, run["micro_batch_tokens"], attention_tokens)
        for way, attention_tokens in (("copies", 0), ("once", policy.attention_tokens))
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradients: dict[str, Tensor] = {}
    peaks: dict[str, int] = {}
    for _ in range(warm_up + repeats):
        for way, micros in ways.items():
            machine.begin()
            taken, gradients[way] = passes(policy, micros, machine)
            peaks[way] = machine.peak
            seconds[way].append(taken)
    gap = (gradients["once"] - gradients["copies"]).norm() / gradients["copies"].norm()
    return {
        "tokens": {way: sum(one.input_ids.numel() for one in ways[way]) for way in ways},
        "micro_batches": {way: len(ways[way]) for way in ways},
        "peak_bytes": peaks,
        "seconds": {way: records.rounded(median(seconds[way][warm_up:])) for way in ways},
        "gradient_gap": records.rounded(gap.item()),
    }


def row(record: Row) -> list[object]:
    once, copies = ({name: record[name][way] for name in BY_WAY} for way in ("once", "copies"))
    shape = f"{record['groups']} x {record['responses']}"
    return [
        *(record[name] for name in ("model", "machine", "attention")),
        *(shape, record["prompt"], record["response"]),
        *(f"{way['tokens']:,}" for way in (copies, once)),
        *(f"{way['seconds']:.3g}" for way in (copies, once)),
        f"{copies['seconds'] / once['seconds']:.2f} times",
        *(f"{way['peak_bytes'] / 2**30:.2f}" for way in (copies, once)),
        f"{record['gradient_gap']:.1g}",
    ]


def table(made: Sequence[Row]) -> str:
    return records.markdown(HEADS, map(row, made))


def runs(args: argparse.Namespace) -> Iterator[Row]:
    shared = {"model": Path(args.model).name, "machine": MACHINES[args.device]().name}
    shared |= arguments.chosen(args, "attention", "groups", "responses", "micro_batch_tokens")
    for shape in args.shapes or (GPU_SHAPES if args.device == "gpu" else SHAPES):
        prompt, response = shape.split("x")
        yield shared | {"prompt": int(prompt), "response": int(response)}


if __name__ == "__main__":
    arguments.run("shared_prefixes", __doc__, SETTINGS, runs, measure, table)
