"""Seconds of generation of two real generators under each dispatch policy, with very different
response lengths.

    python -m benchmarks.skewness                             four steps of each case, three times
    python -m benchmarks.skewness --repeats 1 --steps 1       a rehearsal

Only generation is measured: both sides take turns, and the policy takes its micro-batches and
computes nothing. The lengths are forced: at the same step all cases have the same responses. A
step's time is the trainer's wait for its groups.

Before, one run answers every prompt once, to train lrl's length predictor; each run begins with its
state. An oracle knows the lengths of the next step.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.forced_lengths import forced, long_tailed
from benchmarks.random_policy import hashed, made, made_up_rows
from benchmarks.runs import Borrowing, LentServer, OnlyTakes, lent_servers, quiet_trainer
from benchmarks.timed_run import Steps
from lrl.callbacks import Throughput, WeightSync
from lrl.planning.workload import Lognormal
from lrl.routing import dispatch
from lrl.routing.dispatch import DecodeLatency, DispatchPolicy, SkewnessAware
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Prompt

log = logging.getLogger(__name__)

GENERATORS = 2
OTHERS = 1_000_000
"""Number of the first group of an earlier epoch: more than a run has."""
DECODE_LATENCY = DecodeLatency(step_ms=5.0, response_ms=0.4)
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 512
CASES = ["RoundRobin:nothing", "LeastLoaded:nothing"]
CASES += [
    f"{rule}:{how}" for rule in ("LeastTokens", "SkewnessAware") for how in ("seen", "oracle")
]
"""The rule, and what it knows of lengths; ratios are to the first."""
SETTINGS: dict[str, Any] = {
    "cases": (CASES, "the rule, and what it knows of lengths", CASES),
    "steps": (4, "of a run; its prompts are trained once"),
    "repeats": (3, "runs of each case, in turn"),
    "groups": (32, "prompts of a step"),
    "responses": (4, "to each"),
    "places": (32, "responses a generator writes at once"),
    "prompt_share": (1.0, "1: a prompt's responses are alike"),
    "seed": (0, "of the lengths"),
}


class Oracle:
    """The drawn lengths of a first epoch, in which prompt and group have the same number
    (`LengthPredictor`)."""

    def __init__(self, lengths: Lognormal, prompts: int, responses: int) -> None:
        drawn = np.array([lengths.of(prompt, prompt, responses) for prompt in range(prompts)])
        self._found = drawn.mean(axis=1)
        self._all = np.sort(drawn.ravel())

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the tokens of a whole response, the mean of those to the prompt; more than
        `written`."""
        return max(float(self._found[prompt.id]), written + 1.0)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self._all, share, method="inverted_cdf"))


def generate(
    servers: Sequence[LentServer],
    args: argparse.Namespace,
    drawn: Lognormal,
    data: dict[str, Any],
    oracle: Oracle | None = None,
    first: int = 0,
) -> list[float]:
    """Trains every prompt once, with the lengths of groups from `first` on; returns the seconds of
    each step's generation. The rule asks the `oracle` for lengths, if there is one."""
    throughput = Throughput()
    kept = Steps(throughput, 1)
    trainer = quiet_trainer(
        args.steps,
        args.folder,
        devices=1 + len(servers),
        strategy=Borrowing(servers[0], args.places, servers[1:], placement="shared"),
        callbacks=[WeightSync(), throughput, kept],
    )
    rows = list(made_up_rows(args.steps * args.groups))
    module = lrl.RolloutDataModule(
        prompts=lrl.Prompts(rows, prompt_column="question", shuffle=False),
        rewards=[hashed],
        groups_per_step=args.groups,
        rollouts_per_group=args.responses,
        max_lag=0,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
        **data,
    )
    if oracle is not None:
        predictor: Any = module.length_predictor  # it still learns; dispatch asks the oracle
        predictor.expected = oracle.expected
        predictor.quantile = oracle.quantile
    with forced(drawn, len(rows), first):
        trainer.fit(OnlyTakes(str(made("5m", args.folder, "cpu"))), module)
    return [step.wait for step in kept.times]


def rule_of(name: str) -> DispatchPolicy:
    if name == "SkewnessAware":
        return SkewnessAware(decode_latency=DECODE_LATENCY)
    plain: DispatchPolicy = getattr(dispatch, name)()
    return plain


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    policy = made("5m", args.folder, "cpu")
    server = lrl.ServerSettings(
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
        max_num_seqs=args.places,
        dtype="float32",
        kv_cache_gib=0.5,
        threads=1,
    )
    drawn = long_tailed(args.seed, args.prompt_share)
    before = LengthPredictor()
    oracle = Oracle(drawn, args.steps * args.groups, args.responses)
    with lent_servers(GENERATORS, policy, server, args.folder) as servers:
        generate(servers, args, drawn, {"length_predictor": before}, first=OTHERS)
        for row in missing:
            rule, knows = row["case"].split(":")
            predictor = LengthPredictor()
            predictor.load_state_dict(before.state_dict())
            data = {"dispatch": rule_of(rule), "length_predictor": predictor}
            seconds = generate(servers, args, drawn, data, oracle if knows == "oracle" else None)
            yield row | {"seconds": [records.rounded(step) for step in seconds]}


def runs(args: argparse.Namespace) -> Iterator[Row]:
    names = ("steps", "groups", "responses", "places", "prompt_share", "seed")
    settings = arguments.chosen(args, *names) | {"max_lag": 0}
    for repeat in range(args.repeats):
        for case in args.cases:
            yield {"settings": settings, "case": case, "repeat": repeat}


def table(rows: Sequence[Row]) -> str:
    cases: dict[str, dict[int, float]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["repeat"]] = fmean(row["seconds"])
    first = next(iter(cases.values()))
    lines = []
    for case, seconds in cases.items():
        ratios = [took / first[repeat] for repeat, took in seconds.items() if repeat in first]
        lines.append((case, spread(list(seconds.values())), spread(ratios)))
    return records.markdown(["rule and what it knows", "seconds a step", "ratio"], lines)


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    arguments.run("skewness", __doc__, SETTINGS, runs, measure, table)
