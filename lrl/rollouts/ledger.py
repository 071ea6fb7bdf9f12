"""Where every group of the run is: running, finished, handed to a step, trained, or given up. The states move here
alone.

A group that is only handed out is not trained: its step may never end. Which groups count as trained is therefore
decided when the state is saved, from the number of steps that are done. What was running is generated anew after a
resume.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lrl.data import Group
from lrl.rollouts.pacing import Pacing


class Ledger:
    """The run's book of groups, by their index in the run's row of prompts.

    Args:
        pacing: Says which groups may start, and whether older ones are waited for.
    """

    def __init__(self, pacing: Pacing) -> None:
        self.pacing = pacing
        self.next_index = 0
        self.running: dict[int, int] = {}  # index -> version the generators held at its admission
        self.finished: dict[int, tuple[int, Group]] = {}  # index -> (that version, group), in order of arrival
        self.given_up: dict[int, int] = {}  # index -> prompt id
        self._started = 0  # groups running, finished, handed out or trained
        self._trained_through = 0  # every group before this one is trained
        self._steps: dict[int, int] = {}  # index -> its step, for the groups handed out from there on
        self._open: Counter[int] = Counter()  # version at admission -> groups admitted and not yet handed out

    def admit(self, generator_version: int) -> list[int]:
        """Move to running all groups that may start now, and return their indices, oldest first."""
        admitted = []
        self.next_index = max(self.next_index, self._trained_through)
        while self._started < self.pacing.may_have_started(generator_version):
            if self.next_index not in self._steps:
                self.running[self.next_index] = generator_version
                self._open[generator_version] += 1
                self._started += 1
                admitted.append(self.next_index)
            self.next_index += 1
        return admitted

    def finish(self, group: Group) -> None:
        """Move a running group to finished."""
        self.finished[group.index] = (self.running.pop(group.index), group)

    def take(self, step: int) -> Group | None:
        """Hand the next group to `step`, or None when the step has to wait for one.

        Groups that an older version admitted go first, and the trainer waits for them: that is what bounds the lag.
        Among them, and among all when stragglers are masked, the first to finish goes first.
        """
        self._settle(step)
        oldest = min(self._open, default=step)
        for index, (version, group) in self.finished.items():
            if version == oldest or not self.pacing.wait_for_stragglers:
                del self.finished[index]
                self._open[version] -= 1
                self._open += Counter()  # drops the versions that have no group left
                self._steps[index] = step
                return group
        return None

    def give_up(self, group: Group) -> None:
        """Note that a group that was handed out had nothing to train: its prompt is listed, not lost.

        The trainer's thread may call this while the loop runs: what it writes, the loop's tasks never touch.
        """
        self.given_up[group.index] = group.prompt.id

    def _settle(self, steps_done: int) -> None:
        """Keep only what is not yet a trained prefix, so that the book does not grow with the run."""
        while self._steps.get(self._trained_through, steps_done) < steps_done:
            del self._steps[self._trained_through]
            self._trained_through += 1

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """What a checkpoint after `steps_done` steps needs, as plain numbers."""
        self._settle(steps_done)
        ahead = sorted(index for index, step in self._steps.items() if step < steps_done)
        # A group that an unfinished step gave up is generated anew: it may yet be trained.
        given_up = {index: prompt for index, prompt in self.given_up.items() if self._steps.get(index, -1) < steps_done}
        return {
            "steps_done": steps_done,
            "trained_through": self._trained_through,
            "trained_ahead": ahead,
            "given_up": given_up,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: what it calls trained is never admitted again.

        Raises:
            ValueError: `state` is of a run with other steps; its groups would be trained too late, twice or never.
        """
        trained = state["trained_through"] + len(state["trained_ahead"])
        if trained != (expected := self.pacing.groups_before(state["steps_done"])):
            groups, prompts = self.pacing.groups_per_step, self.pacing.prompts_per_epoch
            raise ValueError(
                f"The checkpoint has trained {trained} groups in {state['steps_done']} steps. With {prompts} prompts "
                f"and data.groups_per_step {groups} it would be {expected}: resume with the ones it was made with."
            )
        self._started = trained
        self._trained_through = self.next_index = state["trained_through"]
        self._steps = dict.fromkeys(state["trained_ahead"], -1)
        self.given_up = dict(state["given_up"])
