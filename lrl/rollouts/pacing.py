"""Pacing: when a group may start. It bounds the lag by construction.

The run is an endless row of groups, and step s trains `groups_in(s)` of them. A group may be
admitted only when the generators already hold a version that is at most `max_lag` behind the step
by which it must be trained. No rollout is thrown away to keep the bound, so pacing is a formula
without a clock and without state.

Why the bound holds. Groups admitted by version v or an older one number at most `groups_before(v +
max_lag + 1)`, and steps take groups in the order of the version that admitted them (`Ledger.take`).
So all of them are trained before step `v + max_lag + 1` begins. A token is never older than its
group's admission, so no trained token lags by more than `max_lag`. It has to be this order:
admission fills every step up to the bound, so each newer group that went first would push an older
one over it.

Skipped groups (`Ledger.skip`) do not change the bound. Each lets one more group start, under the
version the generators hold at that moment. So the groups admitted by version v or an older one
number at most `groups_before(v + max_lag + 1)` plus the skipped ones, and skipped groups are not
trained. As the replacement starts at once, a step waits for as many groups as without skipping.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """The steps at which groups may start and must be trained.

    Args:
        prompts_per_epoch: Prompts in the data set; the steps of an epoch train as many groups.
        groups_per_step: Groups an optimizer step trains; the last step of an epoch trains the rest.
        max_lag: Most versions between a token and the step that trains it; 0 is on-policy.
        last_step: Steps in the whole run, so that no group is generated for a later step; None if
            unknown.
        wait_for_stragglers: Whether the trainer waits for a group that has reached the bound. If
            not, it masks the group's too old tokens when it comes.
    """

    prompts_per_epoch: int
    groups_per_step: int
    max_lag: int
    last_step: int | None = None
    wait_for_stragglers: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.prompts_per_epoch // self.groups_per_step)

    def groups_before(self, step: int) -> int:
        """Returns the number of groups that are trained before `step` begins."""
        epochs, within = divmod(step, self.steps_per_epoch)
        return epochs * self.prompts_per_epoch + min(
            within * self.groups_per_step, self.prompts_per_epoch
        )

    def groups_in(self, step: int) -> int:
        """Returns the number of groups that `step` trains."""
        return self.groups_before(step + 1) - self.groups_before(step)

    def step_of(self, group: int) -> int:
        """Returns the step that trains the group at this place, if groups are trained in order and
        none is skipped."""
        epochs, within = divmod(group, self.prompts_per_epoch)
        return epochs * self.steps_per_epoch + within // self.groups_per_step

    def may_have_started(self, generator_version: int) -> int:
        """Returns how many groups, without skipped ones, may be admitted while generators hold
        `generator_version`."""
        step = generator_version + self.max_lag + 1
        return self.groups_before(step if self.last_step is None else min(step, self.last_step))
