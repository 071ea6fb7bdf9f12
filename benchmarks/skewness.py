"""Seconds of generation of two real generators under each dispatch policy, with very different
response lengths.

    python -m benchmarks.skewness                                 four steps under each case, three times
    python -m benchmarks.skewness --repeats 1 --steps 1           a rehearsal
    python -m benchmarks.skewness --print-only                    print what is there

Only generation is measured: max_lag is 0, both sides take turns, and the policy takes its
micro-batches and computes nothing. Its weights are random and constant; they are synced after every
step all the same. The lengths are forced: at the same step all cases have the same responses. A
step's time is the trainer's wait for its groups.

Before, the time of a token is measured for several numbers of responses on each generator, while
both write: `SkewnessAware.decode_latency`. And one run answers every prompt once, to train lrl's
length predictor; each run begins with its state. An oracle knows the lengths of the next step.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.forced_lengths import Before, equal, forced, long_tailed
from benchmarks.random_policy import hashed, llama, made_up_rows, make_policy
from benchmarks.runs import Borrowing, EveryStep, LentServer, OnlyTakes, lent_servers, quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.planning.responses import LengthSampler
from lrl.routing.dispatch import (
    DispatchPolicy,
    LeastLoaded,
    LeastTokens,
    RoundRobin,
    SkewnessAware,
)
from lrl.routing.dispatch.base import DecodeLatency
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Prompt

log = logging.getLogger(__name__)

GENERATORS = 2
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 512
EQUAL_TOKENS = 128
"""Of every response while the time of a token is measured."""
BATCHES = (2, 8, 32)
"""Responses on each generator then."""
RULES: dict[str, Callable[[DecodeLatency], DispatchPolicy]] = {
    "RoundRobin": lambda decode_latency: RoundRobin(),
    "LeastLoaded": lambda decode_latency: LeastLoaded(),
    "LeastTokens": lambda decode_latency: LeastTokens(),
    "SkewnessAware": lambda decode_latency: SkewnessAware(decode_latency=decode_latency),
}
CASES = ["RoundRobin:nothing", "LeastLoaded:nothing"]
CASES += [
    f"{rule}:{knows}" for rule in ("LeastTokens", "SkewnessAware") for knows in ("seen", "oracle")
]
"""The rule, and what it knows of lengths; ratios are to the first."""
KNOWS = {"nothing": "", "seen": ", lengths seen before", "oracle": ", oracle"}


class Oracle:
    """The drawn lengths of a first epoch, in which prompt and group have the same number
    (`ExpectedLengths`)."""

    def __init__(self, lengths: LengthSampler, prompts: int, responses: int) -> None:
        drawn = np.array([lengths.of(prompt, prompt, responses) for prompt in range(prompts)])
        self._found = drawn.mean(axis=1)
        self._all = np.sort(drawn.ravel())

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the tokens of a whole response, the mean of those to the prompt; more than
        `written`."""
        return max(float(self._found[prompt.id]), written + 1.0)

    def quantile(self, share: float) -> float:
        return float(np.quantile(self._all, share, method="inverted_cdf"))


class Waits(EveryStep):
    """Keeps the seconds that the trainer waited for each step's groups; put it after
    `Throughput`."""

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput
        self.seconds: list[float] = []

    def step_done(self, trainer: Any) -> None:
        self.seconds.append(self.throughput.times.wait)


def generate(
    servers: Sequence[LentServer],
    args: argparse.Namespace,
    drawn: LengthSampler,
    *,
    groups: int,
    responses: int,
    data: dict[str, Any],
    oracle: Oracle | None = None,
) -> list[float]:
    """Trains every prompt once, if the steps are of `args.groups`; returns the seconds of each
    step's generation. The rule asks the `oracle` for lengths, if there is one."""
    throughput = Throughput()
    waits = Waits(throughput)
    placement = "split" if args.max_lag else "shared"
    trainer = quiet_trainer(
        args.steps,
        args.folder,
        devices=1 + len(servers),
        strategy=Borrowing(servers[0], args.places, servers[1:], placement=placement),
        callbacks=[WeightSync(), throughput, waits],
    )
    rows = list(made_up_rows(args.steps * args.groups))
    module = lrl.RolloutDataModule(
        prompts=lrl.Prompts(rows, prompt_column="question", shuffle=False),
        rewards=[hashed],
        groups_per_step=groups,
        rollouts_per_group=responses,
        max_lag=args.max_lag,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
        **data,
    )
    if oracle is not None:
        predictor: Any = module.length_predictor  # it still learns; dispatch asks the oracle
        predictor.expected = oracle.expected
        predictor.quantile = oracle.quantile
    with forced(drawn, prompts=len(rows)):
        trainer.fit(OnlyTakes(str(args.folder / "policy")), module)
    return waits.seconds


def token_ms(
    servers: Sequence[LentServer], args: argparse.Namespace, groups: int, responses: int
) -> float:
    """Returns the milliseconds of a token in the fastest step."""
    data = {"dispatch": RoundRobin()}
    seconds = generate(
        servers, args, equal(EQUAL_TOKENS), groups=groups, responses=responses, data=data
    )
    return 1e3 * min(seconds) / EQUAL_TOKENS


def calibrate(servers: Sequence[LentServer], args: argparse.Namespace) -> DecodeLatency:
    """Fits a line through the milliseconds of a token with so many responses on each generator."""
    batches = [batch for batch in BATCHES if batch <= args.places]
    per_token = [
        token_ms(servers, args, groups=batch * len(servers) // 2, responses=2) for batch in batches
    ]
    log.info("%s responses on each generator: %s ms a token", batches, per_token)
    response_ms, step_ms = np.polyfit(batches, per_token, 1)
    return DecodeLatency(step_ms=float(step_ms), response_ms=max(0.0, float(response_ms)))


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    texts = [row["question"] for row in made_up_rows(args.steps * args.groups)]
    policy = args.folder / "policy"
    make_policy(llama("5m"), texts, policy, "cpu")
    server = lrl.ServerSettings(
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
        max_num_seqs=args.places,
        dtype="float32",
        kv_cache_gib=0.5,
        threads=1,
    )
    with lent_servers(GENERATORS, policy, server, args.folder) as servers:
        yield from measure_on(servers, args, missing)


def measure_on(
    servers: Sequence[LentServer], args: argparse.Namespace, missing: list[Row]
) -> Iterator[Row]:
    # With lag, steps are written ahead of their waits.
    on_policy = argparse.Namespace(**(vars(args) | {"max_lag": 0}))
    decode_latency = calibrate(servers, on_policy)
    alone = token_ms(servers, on_policy, groups=1, responses=args.responses)
    drawn = long_tailed(args.seed, args.prompt_share)
    before = LengthPredictor()
    size = {"groups": args.groups, "responses": args.responses}
    generate(servers, args, Before(drawn), **size, data={"length_predictor": before})
    oracle = Oracle(drawn, args.steps * args.groups, args.responses)
    for row in missing:
        rule, knows = row["case"].split(":")
        predictor = LengthPredictor()
        predictor.load_state_dict(before.state_dict())
        data = {"dispatch": RULES[rule](decode_latency), "length_predictor": predictor}
        told = oracle if knows == "oracle" else None
        seconds = generate(servers, args, drawn, **size, data=data, oracle=told)
        yield row | {
            "step_ms": records.rounded(decode_latency.step_ms),
            "response_ms": records.rounded(decode_latency.response_ms),
            "alone_ms": records.rounded(alone),
            "longest": longest(drawn, args),
            "seconds": [records.rounded(step) for step in seconds],
        }


def runs(args: argparse.Namespace) -> Iterator[Row]:
    names = ("steps", "groups", "responses", "places", "max_lag", "prompt_share", "seed")
    settings = arguments.chosen(args, *names)
    for repeat in range(args.repeats):
        for case in args.cases:
            yield {"settings": settings, "case": case, "repeat": repeat}


def longest(drawn: LengthSampler, args: argparse.Namespace) -> list[int]:
    steps = [range(step * args.groups, (step + 1) * args.groups) for step in range(args.steps)]
    return [max(max(drawn.of(group, group, args.responses)) for group in step) for step in steps]


def cases_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def title(case: str) -> str:
    rule, knows = case.split(":")
    return rule + KNOWS[knows]


def seconds(rows: Sequence[Row], case: str) -> dict[int, float]:
    return {row["repeat"]: fmean(row["seconds"]) for row in rows if row["case"] == case}


def ratios(rows: Sequence[Row], case: str) -> list[float]:
    base, own = seconds(rows, cases_of(rows)[0]), seconds(rows, case)
    return [own[repeat] / base[repeat] for repeat in sorted(own) if repeat in base]


def floor(rows: Sequence[Row]) -> float:
    return fmean(fmean(row["longest"]) * row["alone_ms"] / 1e3 for row in rows)


def table(rows: Sequence[Row]) -> str:
    lines = [
        (title(case), spread(list(seconds(rows, case).values())), spread(ratios(rows, case)))
        for case in cases_of(rows)
    ]
    lines.append(("the longest group alone", f"{floor(rows):.2f}", ""))
    times = {(row["step_ms"], row["response_ms"]) for row in rows}
    said = ", ".join(
        f"{step:.2f} ms and {response:.3f} ms for each response" for step, response in sorted(times)
    )
    table_ = records.markdown(["rule", "seconds a step", "ratio"], lines)
    return f"{table_}\n\ndecode_latency: {said}"


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("skewness", __doc__)
    arguments.add(
        parser,
        cases=(CASES, "the rule, and what it knows of lengths", CASES),
        steps=(4, "of a run; its prompts are trained once"),
        repeats=(3, "runs of each case, in turn"),
        groups=(32, "prompts of a step"),
        responses=(4, "to each"),
        places=(32, "responses a generator writes at once"),
        max_lag=(0, "see lrl.RolloutDataModule"),
        prompt_share=(1.0, "1: a prompt's responses are alike"),
        seed=(0, "of the lengths"),
    )
    arguments.add_places(parser, "skewness")
    return arguments.run(parser, argv, runs, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
