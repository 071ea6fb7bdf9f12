"""Memory and time of token log-probs and their gradients, against log_softmax over all logits.
Prints a table.

    python -m benchmarks.logprob_memory
    python -m benchmarks.logprob_memory --tokens 512 --vocabulary 8192 --hidden 256 --chunk 64   # seconds, below 1 GB

float32 on the CPU, forward and backward to hidden states and head, with a gradient of its own for
every token. The two ways take turns, each turn in a fresh process. Memory is the process's peak
(ru_maxrss) less what it held just before and less the two gradients, which any way must hold.
Values and gradients of the first turns are compared in one more process. At the default sizes the
naive way needs 16 GB of memory, and the comparison 3 GB of disk for temporary files.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor

from lrl.training.logprobs import token_logprobs

WAYS = ("naive", "lrl")
PARTS = ("log-probs", "gradient of hidden states", "gradient of head")


def main() -> None:
    """Runs what the command line asks for: a table, or (internally) one turn or the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=1024, help="chunk_tokens of token_logprobs")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns of each way; the medians are printed"
    )
    parser.add_argument("--turn", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.turn:
        print(json.dumps(turn(settings)))
    elif settings.compare:
        print(json.dumps(compare(settings.folder)))
    else:
        print(table(settings))


def table(settings: argparse.Namespace) -> str:
    """Makes all turns and the comparison, and returns their Markdown."""
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(settings.repeats):
            for way in WAYS:
                keep = ["--folder", folder] if repeat == 0 else []
                turns[way].append(fresh(["--turn", way, *keep]))
                print(f"turn {repeat + 1}, {way}: {turns[way][-1]}", file=sys.stderr, flush=True)
        gaps = fresh(["--compare", "--folder", folder])
    gigabytes, seconds = (
        {way: median(one[what] for one in turns[way]) for way in WAYS} for what in ("GB", "s")
    )
    lines = [
        f"{settings.tokens:,} tokens, vocabulary {settings.vocabulary:,}, hidden "
        f"{settings.hidden:,}, float32, chunks of {settings.chunk:,} tokens; {settings.threads} "
        f"threads, {processor()}; torch {torch.__version__}, Python {platform.python_version()}; "
        f"{date.today()}; medians of {settings.repeats} turns.",
        "",
        "| way | peak memory (GB) | of naive's | time (s) | of naive's | each turn (s) |",
        "|---|---|---|---|---|---|",
    ]
    for way in WAYS:
        memory = f"{gigabytes[way]:.2f} | 1/{gigabytes['naive'] / gigabytes[way]:.1f}"
        speed = f"{seconds[way]:.1f} | {seconds[way] / seconds['naive']:.2f}"
        each = ", ".join(f"{one['s']:.1f}" for one in turns[way])
        lines.append(f"| {way} | {memory} | {speed} | {each} |")
    listed = ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items())
    return "\n".join(
        [*lines, "", f"Largest difference, over the naive tensor's largest number: {listed}."]
    )


def fresh(words: list[str]) -> dict[str, float]:
    """Runs this file again in a fresh process, with the user's settings and these words."""
    command = [sys.executable, "-m", "benchmarks.logprob_memory", *sys.argv[1:], *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def turn(settings: argparse.Namespace) -> dict[str, float]:
    """Makes one forward and backward pass in this process; returns seconds, and gigabytes at the
    peak."""
    torch.set_num_threads(settings.threads)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(settings.tokens, settings.hidden, generator=draw).requires_grad_()
    weight = torch.randn(settings.vocabulary, settings.hidden, generator=draw)
    weight = weight.mul_(settings.hidden**-0.5).requires_grad_()
    labels = torch.randint(settings.vocabulary, (settings.tokens,), generator=draw)
    upstream = torch.randn(settings.tokens, generator=draw)
    held = psutil.Process().memory_info().rss
    started = time.perf_counter()
    logprobs = (
        naive(hidden, weight, labels)
        if settings.turn == "naive"
        else token_logprobs(hidden, weight, labels, chunk_tokens=settings.chunk)
    )
    logprobs.backward(upstream)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    if settings.folder:
        for name, tensor in zip(PARTS, (logprobs.detach(), hidden.grad, weight.grad), strict=True):
            torch.save(tensor, settings.folder / f"{settings.turn} {name}")
    return {"s": seconds, "GB": (peak - held - 4 * (hidden.numel() + weight.numel())) / 1e9}


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Computes log-probs by `log_softmax` over all logits."""
    logits = torch.nn.functional.linear(hidden, weight)
    return logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def compare(folder: Path) -> dict[str, float]:
    """Returns the largest difference of each tensor, over the largest number of the naive one."""
    gaps = {}
    for name in PARTS:
        wanted, got = (torch.load(folder / f"{way} {name}", mmap=True) for way in WAYS)
        gaps[name] = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return gaps


def processor() -> str:
    """Returns the processor's name, from Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    main()
