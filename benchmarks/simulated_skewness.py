"""StreamRL's figure 9 in the simulator: how long a step's generation takes under each rule of dispatch.

    python -m benchmarks.simulated_skewness
    python -m benchmarks.simulated_skewness --contexts --longest 20000
    python -m benchmarks.simulated_skewness --rules benchmarks.simulated_skewness:Random my.module:MyRule

1,024 prompts with an answer each (PPO), all admitted at once. A rule is named by its class path and made without
arguments; if it has an attribute `lengths`, it is given an oracle, which knows every answer's length. Times are
relative to `Random` on the same answers. The floor is the longest answer alone on a generator: no rule is faster.

From the paper (2504.15930): seconds per token of a 7B model on an H800 by batch size (figure 6), the models' shapes and
the devices (tables 1 and 2), the batch, the limits of 5, 10 and 20 thousand tokens (section 7). Assumed here, because
the paper does not say it:

- Generators: 20 of one device for 7B, 10 of 4 for 32B, 10 of 8 for 72B. That is the share of 5/8 of 32, 64 and 128
  devices that figure 10 has for 32B and 72B.
- Seconds per token of the others: in proportion to the weights that a device holds.
- Lengths: lognormal, median an eighth of the limit, sigma 0.9, cut at the limit; about 1 % reach it.
- Keys and values: what is left of 90 % of the memory; prompts of 512 tokens, read at half of the device's speed.

That contexts slow a decode step down is left out, as it is in the paper's model of it (equation 1). With `--contexts`
a step also takes the time in which a device reads the keys and values of its answers (table 1: 3.35 TB/s).
"""

from __future__ import annotations

import argparse
import importlib
import random
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks import records
from lrl.data import Prompt
from lrl.planning.answers import Lengths, Lognormal
from lrl.planning.linear import LinearTrainer
from lrl.planning.simulate import Simulation
from lrl.rollouts.dispatch import Dispatch, LeastLoaded, Loaded, Request

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PTL_MS = (8.4, 8.7, 8.9, 9.0, 9.4, 10.2, 11.7, 15.2, 22.0, 37.0)
"""Milliseconds per token of each answer of such a batch, 7B on an H800 (figure 6, read off the plot)."""
H800_BYTES, H800_FLOPS, H800_BYTES_PER_S = 80e9, 989.5e12, 3.35e12
PROMPT_TOKENS = 512
PAPER = {"7B": (0.90, 0.81), "32B": (0.82, 0.67), "72B": (0.79, 0.69)}
"""Figure 9, limit 20,000: StreamRL with its ranker, and with an oracle."""
HEAD = (
    "| model | limit | rule | seconds | of random | spread | floor | paper: ranker, oracle |"
    "\n|---|---|---|---|---|---|---|---|"
)
RULES = [f"benchmarks.simulated_skewness:{name}" for name in ("Random", "OldestFirst", "LongestFirst")]


@dataclass(frozen=True)
class Model:
    """A model and how it is spread; fulfils `GeneratorCosts`."""

    parameters: float
    layers: int
    devices: int
    generators: int
    reads_contexts: bool = False

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token: 8 heads of 128 numbers of 2 bytes, for both, in each layer."""
        return self.layers * 2 * 8 * 128 * 2

    @property
    def kv_tokens(self) -> int:
        """What is left of 90 % of the memory."""
        return int((0.9 * H800_BYTES * self.devices - 2 * self.parameters) / self.token_bytes)

    def decode_s(self, answers: int, context_tokens: int) -> float:
        """Figure 6, times the weights of a device over those of the 7B model's; and reading contexts, if asked for."""
        by_batch = float(np.interp(answers, BATCH_SIZES, PTL_MS)) / 1e3 * self.parameters / self.devices / 7e9
        reading = self.token_bytes * context_tokens / (H800_BYTES_PER_S * self.devices)
        return by_batch + reading * self.reads_contexts

    def prefill_s(self, tokens: int) -> float:
        """Two operations for each parameter and token."""
        return 2 * self.parameters * tokens / (0.5 * H800_FLOPS * self.devices)

    def sync_pause_s(self) -> float:
        """Only one step is generated."""
        return 0.0


MODELS = {"7B": Model(7e9, 28, 1, 20), "32B": Model(32e9, 64, 4, 10), "72B": Model(72e9, 80, 8, 10)}


class Oracle:
    """Knows every answer's length; `expected` and `quantile` are what a rule may ask."""

    def __init__(self, lengths: Lengths, prompts: int) -> None:
        self._tokens = [lengths.of(prompt, prompt, 1)[0] for prompt in range(prompts)]
        self._sorted = sorted(self._tokens)

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Tokens of the whole answer."""
        return max(self._tokens[prompt.id], written + 1)

    def quantile(self, share: float) -> float:
        """The length that this share of the answers does not exceed."""
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]


def floor_s(model: Model, lengths: Lengths, prompts: int) -> float:
    """Seconds of the longest answer, alone on a generator."""
    longest = max(lengths.of(prompt, prompt, 1)[0] for prompt in range(prompts))
    first, last = model.decode_s(1, PROMPT_TOKENS), model.decode_s(1, PROMPT_TOKENS + longest - 1)
    return model.prefill_s(PROMPT_TOKENS) + longest / 2 * (first + last)


class Random(LeastLoaded):
    """Random FIFO: every generator gets as many prompts, which ones is chance, and writes them as they come."""

    def __init__(self) -> None:
        super().__init__()
        self._draw = random.Random(0)
        self._turn: list[int] = []

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int:
        """See `Dispatch.pick`; all have room for all that is sent here."""
        if not self._turn:
            self._turn = self._draw.sample(range(len(generators)), len(generators))
        return self._turn.pop()


class OldestFirst(LeastLoaded):
    """lrl's default."""


class LongestFirst(LeastLoaded):
    """The longest answer goes first, to the generator with the fewest."""

    lengths: Any = None

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return (-self.lengths.expected(request.prompt),)


def drawn(longest: int, seed: int) -> Lengths:
    """The answers' lengths."""
    return Lognormal(longest / 8, 0.9, longest, prompt_share=0.0, seed=seed)


@cache
def generation_s(model: Model, rule: str, longest: int, prompts: int, seed: int) -> float:
    """Seconds from the first prompt's admission to the last answer's end."""
    lengths = drawn(longest, seed)
    module, name = rule.split(":")
    oracle = Oracle(lengths, prompts)

    def make() -> Dispatch:
        made = getattr(importlib.import_module(module), name)()
        if hasattr(made, "lengths"):
            made.lengths = oracle
        return made

    scene = Simulation(
        generators=[model] * model.generators,
        trainer=LinearTrainer(),
        lengths=lengths,
        steps=1,
        groups_per_step=prompts,
        rollouts_per_group=1,
        max_lag=0,
        micro_batch_tokens=10**9,
        max_num_seqs=512,
        prompt_tokens=PROMPT_TOKENS,
        dispatch=make,
    )
    return scene.run().steps[0].generation_s


def measure(name: str, rule: str, longest: int, args: argparse.Namespace) -> dict[str, Any]:
    """One cell: seconds, and the ratio to `Random`, over all seeds."""
    model = replace(MODELS[name], reads_contexts=args.contexts)
    times, ratios, floors = list[float](), list[float](), list[float]()
    for seed in range(args.seeds):
        base, time = (generation_s(model, one, longest, args.prompts, seed) for one in (RULES[0], rule))
        times.append(time)
        ratios.append(time / base)
        floors.append(floor_s(model, drawn(longest, seed), args.prompts) / base)
    return {
        "model": name,
        "longest": longest,
        "rule": rule,
        "prompts": args.prompts,
        "contexts": args.contexts,
        "seeds": args.seeds,
        "seconds": records.rounded(fmean(times)),
        "floor": records.rounded(median(floors)),
        "ratio": [records.rounded(value) for value in (min(ratios), median(ratios), max(ratios))],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every model, limit and rule, and print the table."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated_skewness", description="StreamRL's figure 9 in the simulator."
    )
    parser.add_argument("--rules", nargs="+", default=RULES, help="module:class of each (%(default)s)")
    parser.add_argument("--longest", nargs="+", type=int, default=[5000, 10_000, 20_000], help="tokens (%(default)s)")
    parser.add_argument("--prompts", type=int, default=1024, help="of a step (%(default)s)")
    parser.add_argument("--contexts", action="store_true", help="count the time in which contexts are read")
    parser.add_argument("--seeds", type=int, default=5, help="(%(default)s)")
    out = Path("benchmarks/results/simulated_skewness.jsonl")
    parser.add_argument("--out", type=Path, default=out, help="(%(default)s)")
    args = parser.parse_args(words)
    command = shlex.join(["python", "-m", "benchmarks.simulated_skewness", *words])
    print(HEAD)
    for name in MODELS:
        for longest in args.longest:
            for rule in args.rules:
                record = measure(name, rule, longest, args)
                records.append(args.out, record | {"command": command})
                least, middle, most = record["ratio"]
                paper = "{:.2f}, {:.2f}".format(*PAPER[name]) if longest == 20_000 else ""
                cells = [name, f"{longest:,}", rule.split(":")[1], f"{record['seconds']:.1f}", f"{middle:.2f}"]
                cells += [f"{least:.2f} to {most:.2f}", f"{record['floor']:.2f}", paper]
                print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
