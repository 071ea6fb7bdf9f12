"""Where every group of the run is: running, finished, handed to a step, trained, or given up. The states move here alone.

A group that is only handed out is not trained: its step may never end. Which groups count as trained is therefore decided
when the state is saved, from the number of steps that are done. What was running is generated anew after a resume.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lrl.data import Group
from lrl.rollouts.pacing import Pacing


class Ledger:
    """The run's book of groups, by their index in the run's row of prompts.

    Args:
        pacing: Says which groups may start, and which must be trained first.
    """

    def __init__(self, pacing: Pacing) -> None:
        self.pacing = pacing
        self.next_index = 0
        self.running: dict[int, int] = {}  # index -> version the generators held at its admission
        self.finished: dict[int, tuple[int, Group]] = {}  # index -> (that version, group), in order of arrival
        self.given_up: dict[int, int] = {}  # index -> prompt id
        self._handed_out = 0
        self._trained_through = 0  # every group before this one is trained
        self._steps: dict[int, int] = {}  # index -> its step, for the groups handed out from there on
        self._open: Counter[int] = Counter()  # version at admission -> groups admitted and not yet handed out

    def admit(self, generator_version: int) -> list[int]:
        """Move to running all groups that may start now, and return their indices, oldest first."""
        admitted = []
        while self.next_index < self.pacing.may_have_started(generator_version):
            if self.next_index not in self._steps:
                self.running[self.next_index] = generator_version
                self._open[generator_version] += 1
                admitted.append(self.next_index)
            self.next_index += 1
        return admitted

    def finish(self, group: Group) -> None:
        """Move a running group to finished."""
        self.finished[group.index] = (self.running.pop(group.index), group)

    def take(self, step: int) -> Group | None:
        """Hand the next group to `step`, or None when the step has to wait for one.

        The first to finish goes first, unless the step has just enough places left for the groups that are due.
        """
        self._settle(step)
        places = self.pacing.groups_before(step + 1) - self._handed_out
        due = sum(count for version, count in self._open.items() if self.pacing.is_due(version, step))
        for index, (version, group) in self.finished.items():
            if due < places or self.pacing.is_due(version, step):
                del self.finished[index]
                self._open[version] -= 1
                self._open += Counter()  # drops the versions that have no group left
                self._steps[index] = step
                self._handed_out += 1
                return group
        return None

    def give_up(self, group: Group) -> None:
        """Note that a group that was handed out had nothing to train: its prompt is listed, not lost."""
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
        return {"trained_through": self._trained_through, "trained_ahead": ahead, "given_up": dict(self.given_up)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: what it calls trained is never admitted again."""
        self._trained_through = self.next_index = state["trained_through"]
        self._steps = dict.fromkeys(state["trained_ahead"], -1)
        self._handed_out = self._trained_through + len(self._steps)
        self.given_up = dict(state["given_up"])
