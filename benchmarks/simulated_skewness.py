"""StreamRL's figure 9 in the simulator: seconds of a step's generation under each dispatch policy.

    python -m benchmarks.simulated_skewness
    python -m benchmarks.simulated_skewness --contexts
    python -m benchmarks.simulated_skewness --longest 20000 --fewer 4
    python -m benchmarks.simulated_skewness --longest 20000 --seeds 1 --cases BestDivision:oracle BestDivision-5%:oracle

The set-up is `benchmarks.streamrl_setup`; a step's prompts are all admitted at once. A case is a
dispatch policy and its knowledge of lengths: none, each response's true length (`oracle`), or the
true length with a blur, which finds the longest as often as the paper's ranker (`ranker`).
`SkewnessAware` knows the simulated model's seconds per token. Times are relative to random FIFO on
the same responses. The floor is the longest response alone on a generator: no policy is faster.
`BestDivision` is `SkewnessAware` with the best of all numbers of generators for the long responses,
`ends` gives it the longest response of either part for P90 and P50, and `5%` is its `long_tail`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import fmean, median
from typing import Any

from benchmarks import arguments, records
from benchmarks.oracle import Oracle
from benchmarks.streamrl_setup import (
    MODELS,
    PROMPT_TOKENS,
    PROMPTS,
    RANKER_BLUR,
    Model,
    Random,
    drawn,
)
from lrl.planning.costs import LinearTrainer
from lrl.planning.simulator.simulate import Simulation
from lrl.routing.dispatch import (
    DispatchPolicy,
    GeneratorLoad,
    LeastLoaded,
    LeastTokens,
    SkewnessAware,
)
from lrl.routing.dispatch.decode_latency import DecodeLatency
from lrl.routing.dispatch.skewness_aware import LONG, REST

PAPER = {"7B": (0.90, 0.81), "32B": (0.82, 0.67), "72B": (0.79, 0.69)}
"""Figure 9, limit 20,000: StreamRL with its ranker, and with an oracle."""
BLUR = {"nothing": 0.0, "oracle": 0.0, "ends": 0.0, "ranker": RANKER_BLUR}
BASE = "Random:nothing"
HEAD = (
    "| model | limit | rule | seconds | of random | spread | floor | paper: ranker, oracle |"
    "\n|---|---|---|---|---|---|---|---|"
)


class Divided(SkewnessAware):
    """The policy with a given number of generators for the long responses.

    Args:
        long_generators: That number.
        long_tail: See `SkewnessAware`.
    """

    def __init__(self, long_generators: int, long_tail: float) -> None:
        super().__init__(long_tail)
        self.long_generators = long_generators

    def _divide(self, generators: Sequence[GeneratorLoad]) -> None:
        super()._divide(generators)
        self._long_generators = self.long_generators


class Ends(Oracle):
    """An oracle that names the longest response of either part when the policy asks for P90 and P50
    of all."""

    def quantile(self, share: float) -> float:
        """See `Oracle.quantile`."""
        return super().quantile({LONG: 1.0, REST: 0.8}[share])


RULES: dict[str, Callable[[DecodeLatency], DispatchPolicy]] = {
    "Random": lambda decode_latency: Random(),
    "LeastLoaded": lambda decode_latency: LeastLoaded(),
    "LeastTokens": lambda decode_latency: LeastTokens(),
    "SkewnessAware": lambda decode_latency: SkewnessAware(decode_latency=decode_latency),
    "SkewnessAware-sum": lambda decode_latency: SkewnessAware(
        combine="sum", decode_latency=decode_latency
    ),
    "SkewnessAware-5%": lambda decode_latency: SkewnessAware(
        long_tail=0.05, decode_latency=decode_latency
    ),
}
BEST = {"BestDivision": 0.2, "BestDivision-5%": 0.05}
"""The share of the responses that is long."""
CASES = [BASE, "LeastLoaded:nothing"]
CASES += [f"{rule}:{knows}" for knows in ("oracle", "ranker") for rule in list(RULES)[2:]]
CASES += ["SkewnessAware:ends"]
KNOWN = [BASE, "LeastLoaded:nothing", "LeastTokens:oracle", "LeastTokens:ranker"]
KNOWN += [
    f"{rule}:{knows}"
    for rule in [*list(RULES)[3:], *BEST]
    for knows in ("oracle", "ranker", "ends")
]
"""All cases; without knowledge a rule that reads lengths would get those of the oracle."""


@cache
def told(knows: str, longest: int, seed: int) -> Oracle:
    """Returns the lengths for a policy that `knows` this."""
    kind = Ends if knows == "ends" else Oracle
    return kind(drawn(longest, seed), PROMPTS, blur=BLUR[knows])


def generation_s(
    model: Model, make: Callable[[], DispatchPolicy], oracle: Oracle, longest: int, seed: int
) -> float:
    """Seconds from the first prompt's admission to the last response's end."""

    def informed() -> DispatchPolicy:
        made = make()
        made.lengths = oracle
        return made

    scene = Simulation(
        generators=[model] * model.generators,
        trainer=LinearTrainer(),
        lengths=drawn(longest, seed),
        steps=1,
        groups_per_step=PROMPTS,
        rollouts_per_group=1,
        max_lag=0,
        micro_batch_tokens=10**9,
        max_num_seqs=512,
        prompt_tokens=PROMPT_TOKENS,
        dispatch=informed,
    )
    return scene.run().steps[0].generation_s


@cache
def case_s(model: Model, case: str, longest: int, seed: int) -> float:
    """Returns the seconds of a step's generation in a case."""
    rule, knows = case.split(":")
    oracle = told(knows, longest, seed)
    if rule in BEST:
        divided = [partial(Divided, number, BEST[rule]) for number in range(1, model.generators)]
        return min(generation_s(model, make, oracle, longest, seed) for make in divided)
    decode_latency = model.decode_latency(oracle.mean)
    return generation_s(model, lambda: RULES[rule](decode_latency), oracle, longest, seed)


def floor_s(model: Model, longest: int, seed: int) -> float:
    """Returns the seconds of the longest response, alone on a generator."""
    tokens = told("oracle", longest, seed).quantile(1.0)
    first = model.decode_s(1, PROMPT_TOKENS)
    last = model.decode_s(1, PROMPT_TOKENS + int(tokens) - 1)
    return model.prefill_s(PROMPT_TOKENS) + tokens / 2 * (first + last)


def measure(name: str, case: str, longest: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns one cell: seconds, and the ratio to random FIFO, over all seeds."""
    whole = MODELS[name]
    model = replace(whole, reads_contexts=args.contexts, generators=whole.generators // args.fewer)
    seeds = range(args.seeds)
    base = [case_s(model, BASE, longest, seed) for seed in seeds]
    times = [case_s(model, case, longest, seed) for seed in seeds]
    ratios = [time / of for time, of in zip(times, base, strict=True)]
    return {
        "model": name,
        "longest": longest,
        "case": case,
        "contexts": args.contexts,
        "generators": model.generators,
        "seeds": args.seeds,
        "seconds": records.rounded(fmean(times)),
        "floor": records.rounded(
            median(floor_s(model, longest, seed) / base[seed] for seed in seeds)
        ),
        "ratio": [records.rounded(value) for value in (min(ratios), median(ratios), max(ratios))],
    }


def recalls(longest: int, seeds: int) -> str:
    """Returns the recall of the noisy lengths."""
    found = [
        fmean(told("ranker", longest, seed).recall(tail) for seed in range(seeds))
        for tail in (0.2, 0.1, 0.05)
    ]
    return (
        f"ranker, limit {longest:,}: recall {found[0]:.2f}, {found[1]:.2f}, {found[2]:.2f} (paper: "
        "0.87, 0.82, 0.76)"
    )


def line(record: dict[str, Any]) -> str:
    """Returns a row of the table."""
    least, middle, most = record["ratio"]
    paper = "{:.2f}, {:.2f}".format(*PAPER[record["model"]]) if record["longest"] == 20_000 else ""
    cells = [
        record["model"],
        f"{record['longest']:,}",
        record["case"],
        f"{record['seconds']:.1f}",
        f"{middle:.2f}",
    ]
    cells += [f"{least:.2f} to {most:.2f}", f"{record['floor']:.2f}", paper]
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates every model, limit and case, and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated_skewness",
        description="StreamRL's figure 9 in the simulator.",
    )
    told_of = "rule:what it is told (%(default)s)"
    parser.add_argument(
        "--cases", nargs="+", choices=KNOWN, default=CASES, metavar="CASE", help=told_of
    )
    parser.add_argument(
        "--longest",
        nargs="+",
        type=int,
        default=[5000, 10_000, 20_000],
        help="tokens (%(default)s)",
    )
    parser.add_argument(
        "--contexts", action="store_true", help="count the time in which contexts are read"
    )
    parser.add_argument(
        "--fewer", type=int, default=1, help="divide the number of generators by it (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    arguments.add_out(parser, "simulated_skewness")
    args = arguments.parse(parser, argv)
    for longest in args.longest:
        print(recalls(longest, args.seeds))
    print(f"\n{HEAD}")
    for name in MODELS:
        for longest in args.longest:
            for case in args.cases:
                record = measure(name, case, longest, args)
                records.append(args.out, record | {"command": args.command})
                print(line(record), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
