"""What a step's forward and backward passes cost with the prompt read once, beside a copy of it for
each response.

    python -m benchmarks.shared_prefixes MODEL                 measure and print
    python -m benchmarks.shared_prefixes MODEL --print-only    print what is there
    python -m benchmarks.shared_prefixes MODEL --groups 1 --responses 16 --repeats 1 --shapes 1500x40
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lrl
from benchmarks import arguments, records
from benchmarks.gpu.machine import MACHINES, Machine
from lrl.advantages import GroupMean
from lrl.rollouts.packing import Packer
from lrl.types import Group, MicroBatch, Prompt, Rollout

RESULTS = Path(__file__).parent / "results" / "shared_prefixes.jsonl"
HEADS = (
    *("model", "machine", "attention", "groups x responses", "prompt", "response"),
    *("tokens with copies", "read once", "seconds with copies", "read once", "faster"),
    *("of the tokens' ratio", "peak GiB with copies", "read once", "gradient differs by"),
)


class Shape(NamedTuple):
    """Lengths of a step."""

    prompt: int
    response: int
    """Mean."""


def shape_of(words: str) -> Shape:
    prompt, response = words.split("x")
    return Shape(int(prompt), int(response))


SHAPES = (Shape(6, 4), Shape(75, 30), Shape(100, 150), Shape(300, 30))
GPU_SHAPES = (Shape(100, 150), Shape(500, 500), Shape(2000, 200))
"""A GPU is not filled by the others."""


def groups_of(shape: Shape, groups: int, responses: int, vocabulary: int) -> list[Group]:
    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(number)]

    def rollout(number: int) -> Rollout:
        length = max(1, round(shape.response * draw.uniform(0.5, 1.5)))
        return Rollout(
            token_ids=tokens(length),
            logprobs=[-1.0] * length,
            versions=[0] * length,
            finish_reason="stop",
            reward=float(number % 2),
        )

    found = []
    for index in range(groups):
        prompt = Prompt(id=index, token_ids=tokens(shape.prompt), text="")
        found.append(Group(index, prompt, [rollout(number) for number in range(responses)]))
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


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    machine = MACHINES[args.device]()
    warm_up = 1 if machine.device == "cuda" else 0
    policy = lrl.PolicyModule(
        args.model, objective=lrl.objectives.REINFORCE(), attention=args.attention
    )
    with torch.device(machine.device):
        policy.configure_model()
    policy.to(machine.device)
    vocabulary = policy.network.get_input_embeddings().num_embeddings
    groups = groups_of(shape, args.groups, args.responses, vocabulary)
    ways = {
        "copies": packed(groups, args.micro_batch_tokens, 0),
        "once": packed(groups, args.micro_batch_tokens, policy.attention_tokens),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    gradients = {}
    first = {}
    peaks = {}
    for turn in range(warm_up + args.repeats):
        for way, micros in ways.items():
            machine.begin()
            taken, gradients[way] = passes(policy, micros, machine)
            peaks[way] = machine.peak
            if turn == 0:
                first[way] = records.rounded(taken)
            if turn >= warm_up:
                seconds[way].append(taken)
    gap = (gradients["once"] - gradients["copies"]).norm() / gradients["copies"].norm()
    return {
        "tokens": {way: sum(one.input_ids.numel() for one in ways[way]) for way in ways},
        "micro_batches": {way: len(ways[way]) for way in ways},
        "first_turn_s": first,
        "peak_bytes": peaks,
        "seconds": {way: records.rounded(median(seconds[way])) for way in ways},
        "gradient_gap": records.rounded(gap.item()),
    }


def row(record: dict[str, Any]) -> list[str]:
    tokens, seconds = record["tokens"], record["seconds"]
    faster = seconds["copies"] / seconds["once"]
    peaks = {way: f"{size / 2**30:.2f}" for way, size in record.get("peak_bytes", {}).items()}
    return [
        *(str(record[name]) for name in ("model", "machine", "attention")),
        f"{record['groups']} x {record['responses']}",
        *(str(record[name]) for name in ("prompt", "response")),
        *(f"{tokens[way]:,}" for way in ("copies", "once")),
        *(f"{seconds[way]:.3g}" for way in ("copies", "once")),
        f"{faster:.2f} times",
        f"{faster * tokens['once'] / tokens['copies']:.2f}",
        *(peaks.get(way, "") for way in ("copies", "once")),
        f"{record['gradient_gap']:.1g}",
    ]


def settings(args: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    return {
        "model": Path(args.model).name,
        "machine": MACHINES[args.device]().name,
        "attention": args.attention,
        "groups": args.groups,
        "responses": args.responses,
        "micro_batch_tokens": args.micro_batch_tokens,
        "prompt": shape.prompt,
        "response": shape.response,
    }


def main() -> None:
    parser = arguments.make_parser("shared_prefixes", __doc__)
    parser.add_argument("model", help="a folder in Hugging Face format")
    parser.add_argument("--device", choices=list(MACHINES), default="cpu", help="(%(default)s)")
    parser.add_argument("--attention", default="sdpa", help="as model.attention (%(default)s)")
    parser.add_argument("--groups", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--responses", type=int, default=8, help="of each group (%(default)s)")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way (%(default)s)")
    parser.add_argument(
        "--shapes", nargs="+", type=shape_of, help="tokens of a prompt x mean of a response"
    )
    parser.add_argument("--print-only", action="store_true", help="print what was measured")
    args = parser.parse_args()
    wanted = args.shapes or (GPU_SHAPES if args.device == "gpu" else SHAPES)
    if not args.print_only:
        for shape in wanted:
            records.measured(RESULTS, settings(args, shape), partial(measure, args, shape))
    made = records.all_found(RESULTS, [settings(args, shape) for shape in wanted])
    print(records.markdown(HEADS, map(row, made)))


if __name__ == "__main__":
    main()
