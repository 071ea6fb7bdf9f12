"""Episodes: turns of the policy, and between them what an environment writes.

Hides turns from whoever asks for responses, and chat templates from environments. A run without an
environment imports no more of it than these settings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lrl.errors import above, at_least


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """The settings of `RolloutDataModule` that have a meaning with an environment alone."""

    max_turns: int = 16
    max_turn_tokens: int | None = None
    turn_timeout_s: float = 60.0
    episode_timeout_s: float = 1800.0
    environment_workers: int = 1
    environment_memory_gib: float | None = 4.0

    def __post_init__(self) -> None:
        at_least(1, "data", max_turns=self.max_turns, max_turn_tokens=self.max_turn_tokens)
        at_least(0, "data", environment_workers=self.environment_workers)
        above(
            0,
            "data",
            turn_timeout_s=self.turn_timeout_s,
            episode_timeout_s=self.episode_timeout_s,
            environment_memory_gib=self.environment_memory_gib,
        )

    @property
    def changed(self) -> list[str]:
        """The settings that are not at their defaults."""
        return [one.name for one in fields(self) if getattr(self, one.name) != one.default]
