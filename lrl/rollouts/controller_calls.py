"""The controller, as the trainer's thread calls it: each call runs on the controller's loop, and
has a deadline."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lrl.rollouts.controller import Controller
from lrl.rollouts.stream import GroupSource
from lrl.system.event_loop import LoopThread
from lrl.types import Group

ANSWER_S = 60.0
"""Seconds for a call that waits for no rollout."""


@dataclass
class ControllerCalls(GroupSource):
    """Calls of the trainer's thread.

    Args:
        controller: The run's controller.
        loop: The loop of its tasks.
        group_deadline_s: Seconds that a step waits for a group.
        poll: Called a few times a second while a step waits for a group; raises to end the wait.
    """

    controller: Controller
    loop: LoopThread
    _: KW_ONLY
    group_deadline_s: float
    poll: Callable[[], None] | None = None

    def new_version(self, version: int) -> None:
        """Admits the prompts that may start now that the generators hold `version`."""
        what = f"admitting prompts for version {version}"
        self.loop.wait(self.controller.new_version(version), ANSWER_S, what)

    def next_group(self, step: int) -> Group:
        return self.loop.wait(
            self.controller.next_group(step),
            self.group_deadline_s,
            f"waiting for a finished group for step {step}",
            self.poll,
        )

    def give_up(self, group: Group) -> None:
        self.controller.ledger.give_up(group)

    def raise_if_stopped(self) -> None:
        if self.loop.interrupted is not None:
            self.loop.interrupted()

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """Returns `Controller.state_dict`, read where no task writes meanwhile: on the loop, or
        here if that has ended."""
        if self.loop.closed:
            return self.controller.state_dict(steps_done)

        async def read() -> dict[str, Any]:
            return self.controller.state_dict(steps_done)

        return self.loop.wait(read(), ANSWER_S, f"saving the ledger after step {steps_done}")
