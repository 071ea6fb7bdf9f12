"""A quarter of an hour on one GPU: runs what has no answer yet, in the order of worth.

    python -m benchmarks.gpu.day --list                           what is answered and what is not
    python -m benchmarks.gpu.day --seconds 560 --out FILE         run what fits into the time
    python -m benchmarks.gpu.day --rehearse                       all of it here, on the CPU, tiny

Each item is a command in a process group of its own with a time limit, and starts only if the whole
limit fits into what is left. Its results come as lines of JSON while it runs, so what it knew when
it was stopped is kept. An item is answered when its command has ended well; one that has not is
tried again behind all others. Items that need vLLM are left out where it cannot be imported.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import arguments, records

ANSWERS = Path(__file__).parents[1] / "results" / "gpu_day.jsonl"
TAIL_CHARACTERS = 2000
"""Of an item's output, kept when it did not end well."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    `OUT` in a command is the file of its results, `FOLDER` one that all items share.
    """

    name: str
    command: str
    """Words after `python -m`."""
    limit_s: float
    rehearsal: str
    """The same on the CPU, tiny."""
    vllm: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""


TRAINER = "benchmarks.gpu.trainer --size 1.5b --steps 4 --groups 8 --folder FOLDER --out OUT"
TINY = (
    "benchmarks.gpu.trainer --size tiny --device cpu --steps 4 --groups 1 --tokens 16 "
    "--folder FOLDER --out OUT"
)


def trainer(name: str, how: str, limit_s: float = 75, rehearsal: str | None = None) -> Item:
    tried = how if rehearsal is None else rehearsal
    return Item(f"trainer, {name}", f"{TRAINER} {how}", limit_s, f"{TINY} {tried}")


RANKS = "benchmarks.gpu.collectives --out OUT --folder FOLDER"
SHARED = "benchmarks.gpu.one_gpu --folder FOLDER --out OUT"
TINY_RUN = "--size tiny --device cpu --steps 4 --groups 2 --tokens 16 --folder FOLDER --out OUT"
CASES = "tests.standin_cuda --out OUT"
KERNELS = "benchmarks.gpu.attention --folder FOLDER --out OUT"
RECIPE = (
    "lrl.cli.main fit --config one_gpu_24gb --data.prompts.source benchmarks.random_policy:made_up_rows "
    "--trainer.callbacks lrl.callbacks.WeightSync --trainer.logger.save_dir FOLDER "
    "--model.model benchmarks.random_policy"
)
ON_CPU = "--trainer.accelerator cpu --trainer.strategy.server.dtype float32"
ITEMS = (
    Item("stand-in's cases", f"{CASES} --device gpu", 120, f"{CASES} AIPO"),
    trainer("profile", "--profile", 100),
    Item("attention", KERNELS, 90, f"{KERNELS} --device cpu --tokens 32 --lengths 16"),
    Item(
        "attention of trees",
        f"{KERNELS} --prompt 2000 --lengths 200 1000",
        60,
        f"{KERNELS} --device cpu --tokens 32 --prompt 8 --branches 2 --lengths 4",
    ),
    trainer("varlen", "--attention varlen", rehearsal=""),
    trainer("varlen, copies", "--attention varlen --copies", rehearsal="--copies"),
    trainer("sdpa, masked", "--attention sdpa"),
    trainer("bfloat16 weights, rounded", "--dtype bfloat16"),
    trainer("kernels liger", "--kernels liger", rehearsal="--kernels auto"),
    trainer("kernels compile", "--kernels compile", 200),
    trainer("fused head", "--fused-head", 120),
    trainer("AdamW not fused", "--unfused-adamw"),
    Item("ranks", f"{RANKS} --device gpu --size 0.5b", 90, f"{RANKS} --device cpu --size tiny"),
    trainer("32,768 tokens a micro-batch", "--micro-batch-tokens 32768"),
    trainer("4,096 tokens a micro-batch", "--micro-batch-tokens 4096"),
    trainer("sdpa by cuDNN", "--sdpa CUDNN_ATTENTION", rehearsal="--sdpa MATH"),
    trainer("sdpa by the efficient kernel", "--sdpa EFFICIENT_ATTENTION", rehearsal="--sdpa MATH"),
    trainer("checkpointing", "--checkpointing 1"),
    trainer("checkpoint every 2nd layer", "--checkpointing 2"),
    trainer(
        "recipe for 24 GB",
        "--lora-rank 16 --dtype bfloat16 --checkpointing 1 --micro-batch-tokens 8192",
    ),
    Item(
        "several runs on one server",
        "benchmarks.gpu.one_server --size 1.5b --folder FOLDER --out OUT",
        240,
        f"benchmarks.gpu.one_server {TINY_RUN}",
        vllm=True,
    ),
    Item(
        "fp8",
        f"{SHARED} --size 0.5b --quantization fp8_per_channel --steps 6",
        150,
        f"benchmarks.gpu.one_gpu {TINY_RUN}",
        vllm=True,
    ),
    Item(
        "LoRA's pause",  # beside that of all weights, 0.24 s through ipc (one_gpu.jsonl)
        f"{SHARED} --size 0.5b --lora 16 --steps 6",
        150,
        f"benchmarks.gpu.one_gpu {TINY_RUN} --lora 4",
        vllm=True,
    ),
    Item(
        "ipc with expandable_segments",
        f"{SHARED} --size 0.5b --steps 6",
        150,
        f"benchmarks.gpu.one_gpu {TINY_RUN}",
        vllm=True,
        variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    Item(
        "nccl",
        f"{SHARED} --size 0.5b --transport nccl --steps 6",
        180,
        f"benchmarks.gpu.one_gpu {TINY_RUN}",
        vllm=True,
    ),
    Item(
        "quickstart",
        "lrl.cli.main fit --config quickstart --trainer.accelerator gpu --trainer.devices 1 "
        "--trainer.strategy.generator_devices 0 --trainer.strategy.server.gpu_memory_utilization "
        "0.3 --trainer.logger.save_dir FOLDER",
        180,
        "lrl.cli.main fit --config quickstart --trainer.max_steps 2 --trainer.logger.save_dir "
        "FOLDER --data.groups_per_step 2",
        vllm=True,
    ),
    Item(
        "recipe for 24 GB, whole",
        f"{RECIPE}:of_1_5b --trainer.max_steps 4 "
        "--trainer.strategy.server.gpu_memory_utilization 0.08",
        240,
        f"{RECIPE}:tiny --trainer.max_steps 2 {ON_CPU} --data.groups_per_step 2 "
        "--data.max_response_tokens 16",
        vllm=True,
    ),
    Item(
        "word problems",
        "benchmarks.word_problems --device gpu --only calculator-0 --folder FOLDER --out OUT",
        300,
        "lrl.cli.main fit --config word_problems --model.model lrl.quickstart.smollm2:policy "
        "--trainer.max_steps 1 --trainer.logger.save_dir FOLDER --data.groups_per_step 2 "
        "--data.max_skipped_per_step 2",
        vllm=True,
    ),
)
"""In the order of worth."""


def pending(answers: Sequence[dict[str, Any]], with_vllm: bool) -> list[Item]:
    tries = [record for record in answers if record.get("row") is None]
    tried = {item.name: [one for one in tries if one["item"] == item.name] for item in ITEMS}
    left = [
        item
        for item in ITEMS
        if not any(one["answered"] for one in tried[item.name]) and (with_vllm or not item.vllm)
    ]
    return sorted(left, key=lambda item: len(tried[item.name]))


def ask(item: Item, limit_s: float, args: argparse.Namespace) -> bool:
    """Runs an item; appends its rows to `--out`, and a record of how it ended. Returns whether it
    is answered."""
    results = args.folder / "item.jsonl"
    results.unlink(missing_ok=True)
    log = args.folder / "item.log"
    written = item.rehearsal if args.rehearse else item.command
    words = [
        word.replace("OUT", str(results)).replace("FOLDER", str(args.folder))
        for word in shlex.split(written)
    ]
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=os.environ | item.variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    answered = status == 0
    for row in records.read(results):
        records.append(args.out, {"item": item.name, **{"row": "result"}, **row})
    ended = {
        "item": item.name,
        "answered": answered,
        "command": f"python -m {written}",
        "status": status,
        "seconds": round(time.monotonic() - started, 1),
        "limit_s": limit_s,
    }
    if not answered:
        ended["output"] = log.read_text(errors="replace")[-TAIL_CHARACTERS:]
    records.append(args.out, ended)
    return answered


def end_group(process: subprocess.Popen[bytes]) -> None:
    for sign, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)


def main() -> int:
    parser = arguments.make_parser("gpu.day", __doc__)
    arguments.add(
        parser,
        seconds=(540.0, "for all"),
        only=("", "items with these words in their name"),
        list=(False, "print the items and their state"),
        rehearse=(False, "every item on the CPU, tiny"),
        folder=(Path("runs/gpu_day"), "of all files"),
    )
    parser.add_argument("--out", type=Path, help=f"of new records; left out: {ANSWERS.name}")
    args = arguments.parse(parser)
    args.out = args.out or (args.folder / "rehearsal.jsonl" if args.rehearse else ANSWERS)
    known = [] if args.rehearse else [*records.read(ANSWERS), *records.read(args.out)]
    items = pending(known, with_vllm=find_spec("vllm") is not None)
    items = [item for item in items if args.only in item.name]
    if args.list:
        print("\n".join(f"{item.limit_s:4.0f} s  {item.name}" for item in items))
        return 0
    ends = time.monotonic() + args.seconds
    failed = 0
    for item in items:
        left = ends - time.monotonic()
        if not args.rehearse and item.limit_s > left:
            print(f"{item.name}: needs {item.limit_s:.0f} s, {left:.0f} s are left", flush=True)
            continue
        answered = ask(item, 10 * item.limit_s if args.rehearse else item.limit_s, args)
        failed += not answered
        print(f"{item.name}: {'answered' if answered else 'NOT answered'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
