"""Warnings about metrics that leave their healthy range, with the remedy: a short line each, once in
a run.

One step proves nothing: a metric counts as outside after several steps in a row that log it.
"""

import logging
from collections import Counter
from typing import Any

import lightning as L

from lrl.callbacks.base import NewMetrics, OnRankZero
from lrl.errors import at_least, one_of

log = logging.getLogger(__name__)

Range = tuple[float | None, float | None]
"""Smallest and largest healthy value; None is no bound."""
SYNC_LESS = (
    "Sync less often: WeightSync.every_n_steps 2 or more, data.max_lag at least one below it."
)
COMPARE = "Compare model.dtype with trainer.strategy.server.dtype, and look at model.attention."
WAITS = "Raise data.max_lag if it is 0, or give generation more devices."
TIME: Range = (None, 0.2)
OF_TIME = ("trainer/", "generators/")
RULES: dict[str, tuple[Range, str]] = {
    "policy/ess": ((0.5, None), "Lower data.max_lag or model.lr."),
    "policy/kl_behaviour": ((None, 0.1), "Lower model.lr or data.max_lag."),
    "policy/clip_fraction": (
        (None, 0.2),
        "Lower data.max_lag or model.lr, or widen the clip of model.objective.",
    ),
    "policy/mismatch_kl": ((None, 0.01), COMPARE),
    "policy/mismatch_max": ((None, 2.0), COMPARE),
    "reward/std": (
        (0.01, None),
        "Equal rewards teach nothing: take other prompts, or set data.max_skipped_per_step.",
    ),
    "rollouts/truncated": (
        (None, 0.25),
        "Raise data.max_response_tokens, or reward brevity; of episodes, see episodes/*_limit.",
    ),
    "rollouts/discarded": (
        (None, 0.0),
        "Responses without a reward: see rewards/* and the first failures in the log.",
    ),
    "trainer/wait_first": (TIME, WAITS),
    "trainer/wait_next": (TIME, WAITS),
    "trainer/wait_last": (TIME, "Raise data.max_lag, or set data.stragglers to mask."),
    "trainer/wait_reward": (TIME, "Raise data.reward_workers."),
    "trainer/pack": (TIME, "Raise data.micro_batch_tokens."),
    "trainer/ranks": (TIME, "Rank 0 waits for slower ranks: give all the same devices."),
    "trainer/stage": (TIME, SYNC_LESS),
    "trainer/transfer": (TIME, SYNC_LESS),
    "trainer/probe": (TIME, SYNC_LESS),
    "generators/paused": (TIME, SYNC_LESS),
    "generators/starved": (
        TIME,
        "Raise data.max_lag if the trainer waits too; else take fewer, or change data.dispatch.",
    ),
}
"""By metric: its healthy range, and the settings that help. docs/metrics.md lists them. They are wider
than what is sound, so that a warning is worth reading:

- `policy/ess` 0.5: half of the data is lost. VCPO (2602.17616) saw a low one before a collapse.
- `policy/kl_behaviour` 0.1: an effective sample size of 0.82 if ratios are log-normal.
- `policy/mismatch_kl` 0.01: log-probs that differ by 0.14 nats a token, root mean square.
- `policy/mismatch_max` 2: near log 8, above which surrogate drops a token from its loss.
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
    """

    def __init__(
        self,
        ranges: dict[str, Range | None] | None = None,
        steps: int = 3,
        time_after_s: float = 300.0,
    ) -> None:
        at_least(1, "Health", steps=steps)
        at_least(0, "Health", time_after_s=time_after_s)
        self.ranges = {metric: own for metric, (own, _) in RULES.items()}
        for metric, own in (ranges or {}).items():
            one_of("Health", ranges=(list(RULES), metric))
            self.ranges[metric] = own or (None, None)
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
        for name in self.ranges:
            early = name.startswith(OF_TIME) and self._trained_s < self.time_after_s
            if name in metrics and not early:
                self._judge(name, float(metrics[name]), trainer.global_step - 1)

    def _judge(self, name: str, value: float, step: int) -> None:
        """Counts a value; warns when it is the first to make `steps` outside in a row."""
        low, high = self.ranges[name]
        # NaN is in no range.
        if (low is None or value >= low) and (high is None or value <= high):
            self._in_a_row[name] = 0
            return
        self._in_a_row[name] += 1
        self._outside[name] += 1
        if self._in_a_row[name] == self.steps and name not in self._warned:
            self._warned.append(name)
            text = "step %d: %s is %.3g (healthy: %s). %s"
            log.warning(text, step, name, value, in_words(self.ranges[name]), RULES[name][1])


def in_words(healthy: Range) -> str:
    low, high = healthy
    bounds = {"at least": low, "at most": high}
    return ", ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
