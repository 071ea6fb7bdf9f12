"""Healthy ranges of a run's metrics, and the advice outside of them."""

import math
from dataclasses import dataclass

LAG = "<k>"
"""In the tag of a rule: any lag from 1 up. The metrics of lag 0 are `policy/mismatch_*`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Healthy range of one metric."""

    metric: str
    """Its tag, `<k>` for any lag."""
    advice: str
    """The cause and the settings that help; `{lag}` is the smallest unhealthy lag, `{below}` the one before, and
    `{percent}` the value."""
    low: float | None = None
    """Smallest healthy value; None is no bound."""
    high: float | None = None
    """Largest one."""

    def holds(self, value: float) -> bool:
        """Tells whether `value` is in the range; NaN is in none."""
        low = -math.inf if self.low is None else self.low
        return low <= value <= (math.inf if self.high is None else self.high)

    @property
    def range(self) -> str:
        """The range in words."""
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


_TOO_FAR = "From lag {lag} on, tokens are too far from the policy: lower data.max_lag to {below}, or model.lr."
_SYNC_LESS = "sync less often (WeightSync.every_n_steps above 1, with data.max_lag at least one less)."

RANGES: dict[str, tuple[float | None, float | None]] = {
    "policy/ess": (0.5, None),
    "policy/kl_behaviour": (None, 0.1),
    "policy/clip_fraction": (None, 0.2),
    "policy/mismatch_kl": (None, 0.01),
    "policy/mismatch_max": (None, 2.0),
    "policy/by_lag/<k>/ess": (0.5, None),
    "policy/by_lag/<k>/kl_behaviour": (None, 0.1),
    "reward/std": (0.01, None),
    "rollouts/truncated": (None, 0.25),
    "rollouts/discarded": (None, 0.0),
}
"""Smallest and largest healthy value; docs/metrics.md has the reasons. The other metrics are shares of the time."""
TIME_SHARE = (None, 0.2)

ADVICE = {
    "policy/ess": "The tokens are too far from the policy that learns from them: lower data.max_lag or model.lr.",
    "policy/kl_behaviour": "The policy moves too far between the writing and the training of a token: lower model.lr "
    "or data.max_lag.",
    "policy/clip_fraction": "The objective limits the ratio of too many tokens: lower data.max_lag or model.lr, or "
    "widen its clip (AIPO: model.objective.rho).",
    "policy/mismatch_kl": "Trainer and generators compute different things with the same weights: compare model.dtype "
    "and trainer.precision with trainer.strategy.server.dtype, look at model.attention, and undo what changes logits "
    "on one side only.",
    "policy/mismatch_max": "On single tokens trainer and generators disagree, with the same weights: compare "
    "model.dtype and trainer.precision with trainer.strategy.server.dtype, and look at model.attention.",
    "policy/by_lag/<k>/ess": _TOO_FAR,
    "policy/by_lag/<k>/kl_behaviour": _TOO_FAR,
    "reward/std": "All responses have the same reward, so nothing is learnt: take easier or harder prompts or a finer "
    "reward, or set data.max_skipped_per_step.",
    "rollouts/truncated": "Many responses are cut, and a cut response is mostly a wrong one: raise "
    "data.max_response_tokens, or add lrl.rewards.LengthPenalty to data.rewards.",
    "rollouts/discarded": "Responses without a reward are not trained: rewards/* counts them by kind, and the first "
    "failure of each kind is in the log. For timeouts raise data.reward_timeout_s or data.reward_workers.",
    "trainer/wait_first": "The trainer waited {percent} of its time for a step's first group: generation is the slower "
    "side. Raise data.max_lag if it is 0, so that generation continues while the trainer trains; otherwise give it "
    "more devices (strategy.generator_devices), or ask for fewer tokens (data.max_response_tokens).",
    "trainer/wait_next": "The trainer waited {percent} of its time between a step's first group and its last: "
    "generation is the slower side. Raise data.max_lag if it is 0; otherwise give it more devices "
    "(strategy.generator_devices).",
    "trainer/wait_last": "The trainer waited {percent} of its time for the last group of a step: raise data.max_lag, "
    "or train without it (data.stragglers: mask).",
    "trainer/wait_reward": "The trainer waited {percent} of its time for the rewards of finished responses: raise "
    "data.reward_workers.",
    "trainer/pack": "Packing took {percent} of the trainer's time: the micro-batches are small; raise "
    "data.micro_batch_tokens.",
    "trainer/ranks": "Rank 0 waited {percent} of its time until the other ranks took their last micro-batches: they "
    "are slower. Give all ranks the same devices; on a CPU, fewer ranks with more cores each.",
    "trainer/stage": f"Preparing weights for the generators took {{percent}} of the trainer's time: {_SYNC_LESS}",
    "trainer/transfer": f"Moving weights into the generators took {{percent}} of the trainer's time: {_SYNC_LESS}",
    "trainer/probe": "Waiting until the last sync is over and verified took {percent} of the trainer's time: "
    + _SYNC_LESS,
    "generators/paused": f"Syncs paused the generators for {{percent}} of their time: {_SYNC_LESS}",
    "generators/starved": "The generators had nothing to write {percent} of their time: pacing started no more. If the "
    "trainer waits as well, raise data.max_lag, or with several generators name a data.dispatch that knows lengths; "
    "if it does not, training is the slower side, and fewer strategy.generator_devices are enough.",
    "generators/idle": "Generators had nothing to write {percent} of their time while requests waited: data.dispatch "
    "held those back. Take fewer data.rollouts_per_group if a group has no room on one generator, or another "
    "data.dispatch.",
}
RULES = tuple(Rule(metric, advice, *RANGES.get(metric, TIME_SHARE)) for metric, advice in ADVICE.items())
