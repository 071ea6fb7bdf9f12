"""Arithmetic of evaluation: finished groups in, a `Report` with error bars out.

Every problem weighs the same: the mean over problems of the mean over a problem's scored responses
(avg@k). Responses to one problem resemble each other, so the intervals follow from the spread of the
problems. An error is not a reward: responses whose scoring failed are counted and left out.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from lrl.system.output import writable
from lrl.types import Group, Prompt, Rollout, Sampling

Z95 = 1.959964
"""Standard normal deviate of a two-sided 95 % interval."""


@dataclass(slots=True, kw_only=True)
class Report:
    """Result of one evaluation of one data set."""

    dataset: str
    n: int
    """Problems with at least one scored response."""
    k: int
    """Responses to each problem."""
    reward: float
    """Mean reward, every problem weighing the same; the accuracy if `binary`. NaN if n is 0."""
    low: float
    """Lower end of the 95 % interval of `reward`."""
    high: float
    """Upper end of the 95 % interval of `reward`."""
    pass_at_k: dict[int, float]
    """Chance that one of 1, 2, 4, ... and k responses is right. Empty if not `binary`."""
    by: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    """Column -> its value as text -> (mean reward, problems)."""
    versions: list[int] = field(default_factory=list)
    """Policy versions of the responses, ascending; more than one if a sync came between."""
    greedy: bool
    failures: int
    """Responses that got no reward because scoring failed."""
    truncated: int
    """Responses cut at the token limit."""
    binary: bool
    """Whether the rewards tell right from wrong (`Reward.binary`)."""

    @property
    def measure(self) -> str:
        return "accuracy" if self.binary else "mean reward"

    def metrics(self) -> dict[str, float]:
        numbers: dict[str, float] = {"accuracy": self.reward} if self.binary else {}
        numbers |= {"reward": self.reward, "reward_low": self.low, "reward_high": self.high}
        # pass@1 is the accuracy.
        numbers |= {f"pass@{k}": chance for k, chance in self.pass_at_k.items() if k > 1}
        for column, rows in self.by.items():
            numbers |= {f"{column}/{value}": row[0] for value, row in rows.items()}
        numbers |= {"failures": self.failures, "truncated": self.truncated}
        if self.versions:
            numbers |= {"version": self.versions[0], "version_high": self.versions[-1]}
        return {f"eval/{self.dataset}/{name}": float(number) for name, number in numbers.items()}

    def as_line(self) -> str:
        """Returns the mean in one line, with the counts of missing results."""
        line = (
            f"{self.measure} on {self.dataset} {self.reward:.3f} "
            f"({self.low:.3f} to {self.high:.3f}, problems: {self.n})"
        )
        lacks = {"without a reward": self.failures, "cut at the token limit": self.truncated}
        return ", ".join(
            [line, *(f"{problem}: {count}" for problem, count in lacks.items() if count)]
        )

    def as_table(self) -> str:
        how = "greedy" if self.greedy else "sampled"
        lines = [self.as_line(), f"  responses to each problem: {self.k}, {how}"]
        if len(self.pass_at_k) > 1:
            lines += [f"  pass@{k} {chance:.3f}" for k, chance in self.pass_at_k.items()]
        for column, rows in self.by.items():
            width = max(map(len, rows), default=0)
            lines.append(f"  by {column}")
            lines += [
                f"    {value:<{width}}  {mean:.3f}  (n = {n})" for value, (mean, n) in rows.items()
            ]
        return "\n".join(lines)


EVALUATION_PRIORITY = 1_000_000_000
"""Priority of an evaluation's requests: after every rollout of a run."""


async def answer(
    prompts: Iterable[Prompt],
    sampling: Sampling,
    generate: Callable[..., Awaitable[None]],
    score: Callable[[Prompt, list[Rollout]], Awaitable[None]],
    *,
    at_once: int,
    deadline_s: float,
    done: Callable[[], Any],
) -> list[Group]:
    """Answers and scores problems, a group each, and calls `done` after each.

    `generate` (`GeneratorPool.generate`) is asked for so many responses `at_once`, and has
    `deadline_s` seconds for a request.
    """
    free = asyncio.Semaphore(max(1, at_once // sampling.n))

    async def group_of(prompt: Prompt) -> Group:
        rollouts = [Rollout() for _ in range(sampling.n)]
        async with free:
            await generate(
                prompt, rollouts, sampling, priority=EVALUATION_PRIORITY, deadline_s=deadline_s
            )
        await score(prompt, rollouts)
        done()
        return Group(index=prompt.id, prompt=prompt, rollouts=rollouts)

    return list(await asyncio.gather(*map(group_of, prompts)))


def evaluate(
    dataset: str, groups: Iterable[Group], *, greedy: bool, binary: bool, by: Sequence[str] = ()
) -> Report:
    """Sums up finished groups, one per problem, under the name `dataset`; breaks their mean down by
    the columns `by`."""
    groups = list(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [group for group in groups if group.scored]
    scores = [group.rewards for group in scored]
    reward, low, high = mean_interval(scores)
    k = max((len(group.rollouts) for group in groups), default=0)
    return Report(
        dataset=dataset,
        n=len(scored),
        k=k,
        reward=reward,
        low=low,
        high=high,
        pass_at_k=_pass_at_powers(scores, k) if binary else {},
        by={column: _breakdown(column, scored) for column in by},
        versions=sorted({version for rollout in rollouts for version in rollout.policy_versions}),
        greedy=greedy,
        failures=sum(rollout.reward is None for rollout in rollouts),
        truncated=sum(rollout.cut for rollout in rollouts),
        binary=binary,
    )


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """Returns the 95 % interval of a share, 0 to 1, of n independent trials (Wilson 1927); holds near
    0 and 1 and for small n, which may be an effective number."""
    centre = (share + Z95**2 / (2 * n)) / (1 + Z95**2 / n)
    half = Z95 / (1 + Z95**2 / n) * math.sqrt(share * (1 - share) / n + Z95**2 / (4 * n**2))
    # The share lies inside by algebra; at 0 and 1 rounding would put it 1e-17 outside.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def mean_interval(scores: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Returns the mean over problems of the mean over responses, with its 95 % interval (problems
    are the clusters).

    Scores of 0 and 1: Wilson's interval at the effective number of trials, p (1 - p) / variance of
    the mean, at most the number of responses (Franco, Little, Louis and Slud 2019, for shares from
    cluster samples). With one response a problem that is the plain Wilson interval. Other scores:
    the normal interval from the spread of the problems' means (Miller 2024, 2411.00640).

    Args:
        scores: For each problem the scores of its responses, at least one.

    Returns:
        Mean, low and high; all NaN without problems, low and high NaN for one problem with scores
            other than 0 and 1.
    """
    if not scores:
        return math.nan, math.nan, math.nan
    means = [fmean(problem) for problem in scores]
    mean, n = fmean(means), len(means)
    variance = pvariance(means, mean) / n
    if any(score not in (0, 1) for problem in scores for score in problem):
        if n == 1:
            return mean, math.nan, math.nan
        half = Z95 * math.sqrt(variance * n / (n - 1))
        return mean, mean - half, mean + half
    responses = sum(map(len, scores))
    if n == 1 or mean in (0.0, 1.0):
        trials: float = n  # without a spread: as if the responses to one problem all agreed
    else:
        trials = min(responses, mean * (1 - mean) / variance) if variance > 0 else responses
    return mean, *wilson_interval(mean, trials)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Returns the chance that one of k responses is right, unbiased from n with `correct` right
    (2107.03374, eq. 1); k is at most n."""
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def write_responses(path: Path | str, dataset: str, groups: Iterable[Group]) -> None:
    """Writes every response, scored or not, as one JSON line."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for group in groups:
            for rollout in group.rollouts:
                row = {
                    "dataset": dataset,
                    "id": group.prompt.id,
                    "prompt": group.prompt.text,
                    "response": rollout.text,
                    "reward": rollout.reward,
                    "reward_parts": rollout.reward_parts,
                    "reward_failure": rollout.reward_failure,
                    "finish_reason": rollout.finish_reason,
                    "versions": sorted(set(rollout.policy_versions)),
                    "columns": group.prompt.columns,
                }
                # default=str: a data set may hold dates and other values that JSON cannot express.
                line = json.dumps(row, ensure_ascii=False, default=str)
                file.write(writable(line) + "\n")


def _pass_at_powers(scores: Sequence[Sequence[float]], most: int) -> dict[int, float]:
    """Returns pass@1, 2, 4, ... and `most`, each over the problems with as many scored
    responses."""
    found: dict[int, float] = {}
    for k in sorted({2**power for power in range(most.bit_length())} | {most}):
        chances = [
            pass_at_k(len(problem), int(sum(problem)), k) for problem in scores if len(problem) >= k
        ]
        found |= {k: fmean(chances)} if chances else {}
    return found


def _breakdown(column: str, groups: Sequence[Group]) -> dict[str, tuple[float, int]]:
    means: dict[str, list[float]] = {}
    for group in groups:
        value = writable(str(group.prompt.columns.get(column)))
        means.setdefault(value, []).append(fmean(group.rewards))
    ordered = sorted(means, key=lambda text: (int(text) if text.isdecimal() else math.inf, text))
    return {value: (fmean(means[value]), len(means[value])) for value in ordered}
