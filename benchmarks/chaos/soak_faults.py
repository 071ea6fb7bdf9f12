"""The faults of `benchmarks.chaos.soak`: what breaks when."""

from __future__ import annotations

import random
import time
from collections import Counter

from benchmarks.chaos.faults import PARTS, Fault, reward_workers_of
from benchmarks.chaos.launch import Victim
from benchmarks.chaos.settings import GENERATORS

FIRST_S = 15.0
"""Seconds until the first fault, and between those in the steps that are not counted, once all generators serve."""
FIRST = (*(Fault(part, tuple(range(GENERATORS))) for part in PARTS), Fault("EngineCore", (0, 1), freeze=True))
"""The generators' faults in the steps that are not counted; while all are out no step is made."""


class Faults:
    """One of each kind at the start, then one now and then, drawn by a seed.

    Args:
        victim: Who suffers them.
        every_s: Seconds between two.
        seed: Of their kinds.
    """

    def __init__(self, victim: Victim, every_s: float, seed: int) -> None:
        self.victim, self.every_s = victim, every_s
        self.counts: Counter[str] = Counter()
        self._first, self._draw = list(FIRST), random.Random(seed)
        self._next = time.monotonic() + min(FIRST_S, every_s)

    def tick(self, whole: bool) -> None:
        """Break something if it is time; while a generator is out, the rewards."""
        if time.monotonic() < self._next:
            return
        if self._first:
            if whole:
                self._break_rewards()
                self._break(self._first.pop(0))
                self._next = time.monotonic() + min(FIRST_S, self.every_s)
            return
        self._next += self.every_s
        part = self._draw.choice([*PARTS, "reward worker"])
        fault = Fault(part, (self._draw.randrange(GENERATORS),), freeze=self._draw.random() < 0.25)
        if whole and part in PARTS:
            self._break(fault)
        else:
            self._break_rewards()

    def _break(self, fault: Fault) -> None:
        fault.inject(self.victim.process.pid)
        self.counts["freeze" if fault.freeze else "kill"] += len(fault.generators)

    def _break_rewards(self) -> None:
        if workers := reward_workers_of(self.victim.process.pid):
            self._draw.choice(workers).kill()
            self.counts["reward worker"] += 1
