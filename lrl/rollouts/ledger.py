"""Where every group of the run is: running, finished, skipped, handed to a step, trained, or given up. The states move
here alone.

A group that is only handed out is not trained: its step may never end. Which groups count as trained is therefore
decided when the state is saved, from the number of steps that are done. What was running is generated anew after a
resume.

A skipped group is done without a step: it is never trained and never admitted again, and another group may start in its
place. So every prompt of the row is trained once, or is listed as given up or as skipped. The steps of an epoch train
as many groups as the data set has prompts; with skipping they use up more of the row than that, and go on into the next
epoch's shuffle. An epoch of Lightning's is then more than one pass over the data set.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from lrl.data import Group
from lrl.rollouts.pacing import Pacing

DONE = -1
"""Stands for the step of a group that is done whichever steps are: it comes before them all."""


class Ledger:
    """The run's book of groups, by their index in the run's row of prompts.

    The loop's tasks move groups while the trainer's thread gives up and saves. A lock keeps what they share consistent.

    Args:
        pacing: Says which groups may start, and whether older ones are waited for.
    """

    def __init__(self, pacing: Pacing) -> None:
        self.pacing = pacing
        self.next_index = 0
        self.running: dict[int, int] = {}  # index -> version the generators held at its admission
        self.finished: dict[int, tuple[int, Group]] = {}  # index -> (that version, group), in order of arrival
        self.given_up: dict[int, int] = {}  # index -> prompt id
        self.skipped: dict[int, int] = {}  # index -> prompt id
        self._started = 0  # groups running, finished, skipped, handed out or trained
        self._done_through = 0  # every group before this one is trained or skipped
        self._steps: dict[int, int] = {}  # index -> its step, for the groups handed out from there on; DONE without one
        self._open: Counter[int] = Counter()  # version at admission -> groups running or finished
        self._lock = threading.Lock()

    def admit(self, generator_version: int) -> list[int]:
        """Move to running all groups that may start now, and return their indices, oldest first."""
        admitted = []
        with self._lock:
            self.next_index = max(self.next_index, self._done_through)
            while self._started < self.pacing.may_have_started(generator_version) + len(self.skipped):
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

    def skip(self, group: Group) -> None:
        """Note that a running group will not be trained: no step counts it, and one more group may start.

        Call it before the group is finished, and `admit` after it: a step may lack the group already.
        """
        with self._lock:
            self._close(self.running.pop(group.index))
            self._steps[group.index] = DONE
            self.skipped[group.index] = group.prompt.id

    def take(self, step: int) -> Group | None:
        """Hand the next group to `step`, or None when the step has to wait for one.

        Groups that an older version admitted go first, and the trainer waits for them: that is what bounds the lag.
        Among them, and among all when stragglers are masked, the first to finish goes first.
        """
        with self._lock:
            self._settle(step)
            oldest = min(self._open, default=step)
            for index, (version, group) in self.finished.items():
                if version == oldest or not self.pacing.wait_for_stragglers:
                    del self.finished[index]
                    self._close(version)
                    self._steps[index] = step
                    return group
        return None

    def give_up(self, group: Group) -> None:
        """Note that a group that was handed out had nothing to train: its prompt is listed, not lost.

        The trainer's thread may call this while the loop runs: what it writes, the loop's tasks never touch.
        """
        self.given_up[group.index] = group.prompt.id

    def _close(self, version: int) -> None:
        self._open[version] -= 1
        self._open += Counter()  # drops the versions that have no group left

    def _settle(self, steps_done: int) -> None:
        """Keep only what is not yet a done prefix, so that the book does not grow with the steps."""
        while self._steps.get(self._done_through, steps_done) < steps_done:
            del self._steps[self._done_through]
            self._done_through += 1

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """What a checkpoint after `steps_done` steps needs, as plain numbers."""
        with self._lock:
            self._settle(steps_done)
            # A group that an unfinished step gave up is generated anew: it may yet be trained.
            given_up = {index: id for index, id in self.given_up.items() if self._steps.get(index, DONE) < steps_done}
            return {
                "steps_done": steps_done,
                "done_through": self._done_through,
                "done_ahead": sorted(index for index, step in self._steps.items() if step < steps_done),
                "given_up": given_up,
                "skipped": dict(self.skipped),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: what it calls done is never admitted again.

        Raises:
            ValueError: `state` is of a run with other steps; its groups would be trained too late, twice or never.
        """
        done = state["done_through"] + len(state["done_ahead"])
        trained = done - len(state["skipped"])
        if trained != (expected := self.pacing.groups_before(state["steps_done"])):
            groups, prompts = self.pacing.groups_per_step, self.pacing.prompts_per_epoch
            raise ValueError(
                f"The checkpoint has trained {trained} groups in {state['steps_done']} steps. With {prompts} prompts "
                f"and data.groups_per_step {groups} it would be {expected}: resume with the ones it was made with."
            )
        self._started = done
        self._done_through = self.next_index = state["done_through"]
        self._steps = dict.fromkeys(state["done_ahead"], DONE)
        self.given_up = dict(state["given_up"])
        self.skipped = dict(state["skipped"])
