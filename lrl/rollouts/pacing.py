"""Who may start when: the bound on lag, by construction.

The run is an endless row of groups, and step s trains as many of them as `groups_in(s)` says. A group may be admitted
only when the generators already hold a version that is at most `max_lag` behind the step by which it must be trained.
Nothing is thrown away to keep the bound, so this is the whole of pacing: a formula, no clock, no state.

Why the bound holds. Groups admitted by version v or an older one number at most `groups_before(v + max_lag + 1)`, and
steps take groups in the order of the version that admitted them (`Ledger.take`). So all of them are trained before step
`v + max_lag + 1` begins. A token is never older than its group's admission, so no trained token lags by more than
`max_lag`. It has to be this order: admission fills every step up to the bound, so each newer group that went first
would push an older one over it.

Skipped groups (`Ledger.skip`) leave the bound where it is. Each lets one more group start, under the version the
generators hold at that moment. So the groups admitted by version v or an older one number at most
`groups_before(v + max_lag + 1)` + those skipped so far; the skipped ones are among them, and nobody trains these. So
those that are trained are still at most `groups_before(v + max_lag + 1)`. And as the replacement starts at once, a step
has as many groups to wait for as without skipping.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """When groups may start and by when they must be trained.

    Args:
        prompts_per_epoch: Prompts in the data set; as many groups are trained in the steps of an epoch.
        groups_per_step: Groups an optimizer step trains; the last step of an epoch takes what is left.
        max_lag: Most versions that may lie between a token and the step that trains it; 0 is on-policy.
        last_step: Steps in the whole run, so that nothing is generated for a step that never comes; None if unknown.
        wait_for_stragglers: Whether a group that has reached the bound holds the trainer. If not, the trainer goes on
            and the group's over-age tokens are masked when it comes.
    """

    prompts_per_epoch: int
    groups_per_step: int
    max_lag: int
    last_step: int | None = None
    wait_for_stragglers: bool = True

    def __post_init__(self) -> None:
        for name, least in {"prompts_per_epoch": 1, "groups_per_step": 1, "max_lag": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that train as many groups as there are prompts."""
        return -(-self.prompts_per_epoch // self.groups_per_step)

    def groups_before(self, step: int) -> int:
        """Groups of the run that are trained before `step` begins."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.prompts_per_epoch + min(within * self.groups_per_step, self.prompts_per_epoch)

    def groups_in(self, step: int) -> int:
        """Groups that `step` trains."""
        return self.groups_before(step + 1) - self.groups_before(step)

    def step_of(self, group: int) -> int:
        """The step that trains this group of the run, when they are trained in their order and none is skipped."""
        epochs, within = divmod(group, self.prompts_per_epoch)
        return epochs * self.steps_per_epoch + within // self.groups_per_step

    def may_have_started(self, generator_version: int) -> int:
        """Groups of the run, the skipped ones not counted, that may have been admitted while the generators hold
        `generator_version`."""
        step = generator_version + self.max_lag + 1
        return self.groups_before(step if self.last_step is None else min(step, self.last_step))
