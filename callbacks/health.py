"""Warnings about metrics that leave their healthy range, with the remedy: a short line each, once in
a run.

One step proves nothing: a metric counts as outside after several steps in a row; a step that does
not log it does not count. Shares of the time are judged only in a run that has lasted a while: in a
short one there is little to gain by other settings.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L

from lrl.callbacks.base import NewMetrics, OnRankZero
from lrl.errors import ConfigError, at_least

log = logging.getLogger(__name__)

Range = tuple[float | None, float | None]
"""Smallest and largest healthy value; None is no bound."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Healthy range of one metric."""

    metric: str
    """Its tag."""
    advice: str
    """The settings that help, in a short sentence."""
    low: float = -math.inf
    high: float = math.inf

    def allows(self, value: float) -> bool:
        """Tells whether `value` is in the range; NaN is in none."""
        return self.low <= value <= self.high

    @property
    def is_of_time(self) -> bool:
        """Whether the metric is a share of the time of the trainer or the generators."""
        return self.metric.startswith(("trainer/", "generators/"))

    @property
    def range(self) -> str:
        """The range in words."""
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        return (
            f"at least {self.low:g}" if self.high == math.inf else f"{self.low:g} to {self.high:g}"
        )


_SYNC_LESS = (
    "Sync less often: WeightSync.every_n_steps 2 or more, data.max_lag at least one below it."
)
_COMPARE = "Compare model.dtype with trainer.strategy.server.dtype, and look at model.attention."

_OF_TIME = {
    "trainer/wait_first": "Raise data.max_lag if it is 0, or give generation more devices.",
    "trainer/wait_next": "Raise data.max_lag if it is 0, or give generation more devices.",
    "trainer/wait_last": "Raise data.max_lag, or set data.stragglers to mask.",
    "trainer/wait_reward": "Raise data.reward_workers.",
    "trainer/pack": "Raise data.micro_batch_tokens.",
    "trainer/ranks": "Rank 0 waits for slower ranks: give all the same devices.",
    "trainer/stage": _SYNC_LESS,
    "trainer/transfer": _SYNC_LESS,
    "trainer/probe": _SYNC_LESS,
    "generators/paused": _SYNC_LESS,
    "generators/starved": (
        "Raise data.max_lag if the trainer waits too; otherwise fewer generators do."
    ),
    "generators/idle": "Take fewer data.rollouts_per_group, or another data.dispatch.",
}
RULES = (
    Rule("policy/ess", "Lower data.max_lag or model.lr.", low=0.5),
    Rule("policy/kl_behaviour", "Lower model.lr or data.max_lag.", high=0.1),
    Rule(
        "policy/clip_fraction",
        "Lower data.max_lag or model.lr, or widen the clip of model.objective.",
        high=0.2,
    ),
    Rule("policy/mismatch_kl", _COMPARE, high=0.01),
    Rule("policy/mismatch_max", _COMPARE, high=2.0),
    Rule(
        "reward/std",
        "Equal rewards teach nothing: take other prompts, or set data.max_skipped_per_step.",
        low=0.01,
    ),
    Rule(
        "rollouts/truncated",
        "Raise data.max_response_tokens, or reward brevity; of episodes, see episodes/*_limit.",
        high=0.25,
    ),
    Rule(
        "rollouts/discarded",
        "Responses without a reward: see rewards/* and the first failures in the log.",
        high=0.0,
    ),
    *(Rule(metric, advice, high=0.2) for metric, advice in _OF_TIME.items()),
)
"""docs/metrics.md lists them. They are wider than what is sound, so that a warning is worth reading:

- `policy/ess` 0.5: half of the data is lost. VCPO (2602.17616) saw a low one before a collapse.
- `policy/kl_behaviour` 0.1: an effective sample size of 0.82 if ratios are log-normal.
- `policy/mismatch_kl` 0.01: log-probs that differ by 0.14 nats a token, root mean square.
- `policy/mismatch_max` 2: near log 8, above which surogate drops a token from its loss.
- `reward/std` 0.01: one response of 10,000 differs, with rewards of 0 and 1.
"""


class Health(OnRankZero):
    """Watches the metrics in `RULES`, as far as the run logs them.

    Args:
        ranges: Other ranges for some of the rules, by tag: smallest and largest healthy value, null
            for no bound; null in place of both switches the rule off.
        steps: Steps in a row outside before a metric is reported.
        time_after_s: Seconds of training (`time/step`) before shares of the time are judged:
            `trainer/*` and `generators/*`.

    Raises:
        ValueError: ranges names a metric without a rule; steps is below 1; time_after_s is below 0.
    """

    def __init__(
        self,
        ranges: dict[str, Range | None] | None = None,
        steps: int = 3,
        time_after_s: float = 300.0,
    ) -> None:
        at_least(1, "Health", steps=steps)
        at_least(0, "Health", time_after_s=time_after_s)
        self.rules = with_ranges(ranges or {})
        self.steps = steps
        self.time_after_s = time_after_s
        self._trained_s = 0.0
        self._in_a_row = Counter[str]()
        self._outside = Counter[str]()
        self._warned: list[str] = []
        self._metrics = NewMetrics()

    @property
    def outside(self) -> dict[str, int]:
        """Steps outside its range of each metric that was warned of."""
        return {name: self._outside[name] for name in self._warned}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        metrics = self._metrics.read(trainer)
        reference = getattr(pl_module, "reference", None)
        if reference is not None and reference.rewards_tokens:
            metrics.pop("reward/std", None)
        self._trained_s += float(metrics.get("time/step", 0.0))
        for rule in self.rules:
            early = rule.is_of_time and self._trained_s < self.time_after_s
            if rule.metric in metrics and not early:
                self._judge(rule, float(metrics[rule.metric]), trainer.global_step - 1)

    def _judge(self, rule: Rule, value: float, step: int) -> None:
        """Counts a value; warns when it is the first to make `steps` outside in a row."""
        name = rule.metric
        if rule.allows(value):
            self._in_a_row[name] = 0
            return
        self._in_a_row[name] += 1
        self._outside[name] += 1
        if self._in_a_row[name] == self.steps and name not in self._warned:
            self._warned.append(name)
            text = "step %d: %s is %.3g (healthy: %s). %s"
            log.warning(text, step, name, value, rule.range, rule.advice)


def with_ranges(ranges: Mapping[str, Range | None]) -> list[Rule]:
    """Returns `RULES` with some ranges replaced; in one that is None every value is healthy."""
    known = [rule.metric for rule in RULES]
    if unknown := [metric for metric in ranges if metric not in known]:
        raise ConfigError(
            f"Health.ranges: no rule for {', '.join(unknown)}; there are rules for "
            f"{', '.join(known)}."
        )
    rules = []
    for rule in RULES:
        low, high = ranges.get(rule.metric, (rule.low, rule.high)) or (None, None)
        low, high = -math.inf if low is None else low, math.inf if high is None else high
        rules.append(replace(rule, low=low, high=high))
    return rules
