"""Which figures of a run have a healthy range, and what to do outside of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

LAG = "<k>"
"""In the tag of a rule: any lag from 1 up. The figures of lag 0 are those of `policy/mismatch_*`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a figure is healthy, and what to do when it is not."""

    metric: str
    """Its tag, `<k>` for any lag."""
    low: float | None
    """Smallest healthy value; None is no bound."""
    high: float | None
    """Largest one."""
    advice: str
    """The cause and the settings that help. `{lag}` is the smallest unhealthy lag, `{below}` the one before, and
    `{percent}` the value."""

    def holds(self, value: float) -> bool:
        """Whether `value` is in the range; NaN is in none."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return low <= value <= high

    @property
    def range(self) -> str:
        """The range in words."""
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


_TOO_FAR = "From lag {lag} on, tokens are too far from the policy: lower data.max_lag to {below}, or model.lr."

_SYNC_LESS = "sync less often (WeightSync.every_n_steps above 1, with data.max_lag at least one less)."
_PHASES = {
    "stage": "Preparing weights for the generators",
    "transfer": "Moving weights into the generators",
    "probe": "Waiting until the last sync is over and proved",
}

RULES = (
    Rule(
        "policy/ess",
        0.5,
        None,
        "The tokens are too far from the policy that learns from them: lower data.max_lag or model.lr.",
    ),
    Rule(
        "policy/kl_behaviour",
        None,
        0.1,
        "The policy moves too far between the writing and the training of a token: lower model.lr or data.max_lag.",
    ),
    Rule(
        "policy/clip_fraction",
        None,
        0.2,
        "The objective holds back the ratio of too many tokens: lower data.max_lag or model.lr, or widen its clip "
        "(AIPO: model.objective.rho).",
    ),
    Rule(
        "policy/mismatch_kl",
        None,
        0.01,
        "Trainer and generators compute different things with the same weights: compare model.dtype and "
        "trainer.precision with trainer.strategy.server.dtype, look at model.attention, and undo what changes logits "
        "on one side only.",
    ),
    Rule(
        "policy/mismatch_max",
        None,
        2.0,
        "On single tokens trainer and generators disagree, with the same weights: compare model.dtype and "
        "trainer.precision with trainer.strategy.server.dtype, and look at model.attention.",
    ),
    Rule("policy/by_lag/<k>/ess", 0.5, None, _TOO_FAR),
    Rule("policy/by_lag/<k>/kl_behaviour", None, 0.1, _TOO_FAR),
    Rule(
        "reward/std",
        0.01,
        None,
        "All responses are worth the same, so nothing is learnt: take easier or harder prompts or a reward with more "
        "shades, or set data.max_skipped_per_step.",
    ),
    Rule(
        "rollouts/truncated",
        None,
        0.25,
        "Many responses are cut, and a cut response is mostly a wrong one: raise data.max_response_tokens, or add "
        "lrl.rewards.LengthPenalty to data.rewards.",
    ),
    Rule(
        "rollouts/discarded",
        None,
        0.0,
        "Responses without a reward are not trained: rewards/* counts them by kind, and the first failure of "
        "each kind is in the log. For timeouts raise data.reward_timeout_s or data.reward_workers.",
    ),
    Rule(
        "trainer/wait_first",
        None,
        0.2,
        "The trainer waited {percent} of its time for a step's first group: generation is the slower side. Raise "
        "data.max_lag if it is 0, so that it goes on while the trainer trains; otherwise give it more devices "
        "(strategy.generator_devices), or ask for fewer tokens (data.max_response_tokens).",
    ),
    Rule(
        "trainer/wait_next",
        None,
        0.2,
        "The trainer waited {percent} of its time between a step's first group and its last: generation is the slower "
        "side. Raise data.max_lag if it is 0; otherwise give it more devices (strategy.generator_devices).",
    ),
    Rule(
        "trainer/wait_last",
        None,
        0.2,
        "The trainer waited {percent} of its time for the last group of a step: raise data.max_lag, or go on without "
        "it (data.stragglers: mask).",
    ),
    Rule(
        "trainer/wait_reward",
        None,
        0.2,
        "The trainer waited {percent} of its time for the rewards of responses that were written: raise "
        "data.reward_workers.",
    ),
    Rule(
        "trainer/pack",
        None,
        0.2,
        "Packing took {percent} of the trainer's time: the micro-batches are small; raise data.micro_batch_tokens.",
    ),
    Rule(
        "trainer/ranks",
        None,
        0.2,
        "Rank 0 waited {percent} of its time until the other ranks took their last micro-batches: they are slower. "
        "Give all ranks the same devices; on a CPU, fewer ranks with more cores each.",
    ),
    *(
        Rule(f"trainer/{phase}", None, 0.2, f"{what} took {{percent}} of the trainer's time: {_SYNC_LESS}")
        for phase, what in _PHASES.items()
    ),
    Rule(
        "generators/paused",
        None,
        0.2,
        f"The generators stood still for syncs {{percent}} of their time: {_SYNC_LESS}",
    ),
    Rule(
        "generators/starved",
        None,
        0.2,
        "The generators had nothing to write {percent} of their time: pacing let nothing more start. If the trainer "
        "waits as well, raise data.max_lag, or with several generators name a data.dispatch that knows lengths; if it "
        "does not, training is the slower side, and fewer strategy.generator_devices do.",
    ),
    Rule(
        "generators/idle",
        None,
        0.2,
        "Generators had nothing to write {percent} of their time while requests waited: data.dispatch held those back. "
        "Take fewer data.rollouts_per_group if a group has no room on one generator, or another data.dispatch.",
    ),
)
