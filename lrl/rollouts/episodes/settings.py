"""The settings of episodes. A run without an environment imports no more of episodes than these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from lrl.system.config_errors import above, at_least, fault

if TYPE_CHECKING:
    from lrl.members.launchers import Launcher


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """The settings of `RolloutDataModule` that have a meaning with an environment alone."""

    max_turns: int = 16
    max_turn_tokens: int | None = None
    turn_timeout_s: float = 60.0
    episode_timeout_s: float = 1800.0
    environment_workers: int = 1
    environment_launcher: Launcher | None = None
    environment_memory_gib: float | None = 4.0

    def check(self) -> None:
        """Checks them, for a run with an environment."""
        self._check_limits()
        at_least(0, "data", environment_workers=self.environment_workers)
        if not self.environment_workers and self.environment_launcher is None:
            fault(
                "data.environment_workers is 0, and there is no data.environment_launcher: nothing "
                "would play episodes. Raise it, or name a launcher (Given, if others start it)."
            )
        above(0, "data", environment_memory_gib=self.environment_memory_gib)

    def check_unused(self) -> None:
        """Refuses those that are set in a run without an environment."""
        for name, shown in self._changed():
            fault(
                f"data.{name} is {shown}, and there is no data.environment: a response is a "
                "single turn. Name one, or leave the setting out."
            )

    def check_external(self) -> None:
        """Checks them, for a run whose agents lrl does not start."""
        for name, shown in self._changed():
            if name.startswith("environment_"):
                fault(
                    f"data.{name} is {shown}, and agents play that lrl does not start (Agent.port): "
                    "leave it out."
                )
        self._check_limits()

    def _check_limits(self) -> None:
        at_least(1, "data", max_turns=self.max_turns, max_turn_tokens=self.max_turn_tokens)
        above(
            0,
            "data",
            turn_timeout_s=self.turn_timeout_s,
            episode_timeout_s=self.episode_timeout_s,
        )

    def _changed(self) -> Iterator[tuple[str, Any]]:
        """Yields the names of settings that are not at their defaults, with what an error shows."""
        for one in fields(self):
            if (value := getattr(self, one.name)) != one.default:
                yield one.name, value if isinstance(value, int | float) else type(value).__name__
