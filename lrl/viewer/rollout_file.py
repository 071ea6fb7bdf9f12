"""`rollouts.jsonl` in a run's folder: rollouts of finished steps as lines of JSON.

    {"kind": "group", "step": 3, "index": 7, "prompt": "47+38=", "responses": [...], ...}
    {"kind": "prompt", "token_ids": [...], "texts": [...], ...}
    {"kind": "response", "token_ids": [...], "texts": [...], "logprobs": [...], ...}

A group's line has what a list shows of it, and says how many responses follow. So an index of the
file reads these lines alone, and the tokens of a group when somebody looks at it.
`lrl.callbacks.RolloutFile` writes the file; docs/view.md has all fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

FILE = "rollouts.jsonl"
Record = dict[str, Any]
GROUP = b'{"kind": "group"'
"""Beginning of a group's line."""
NEEDED = ("step", "index", "prompt_id", "prompt", "responses")
"""What it must say, so that the group can be listed."""
OTHERS = (b'{"kind": "prompt"', b'{"kind": "response"')
END = b"}\n"
CUT = " (cut short)\n"
"""What ends half a line, which is then no whole one."""


def lines_of(group: Record, prompt: Record, responses: Sequence[Record]) -> str:
    """Returns the lines of a group: what a list shows of it and its responses, the prompt with its
    tokens, and each response with its own."""
    lines = [{"kind": "group"} | group, {"kind": "prompt"} | prompt]
    lines += [{"kind": "response"} | response for response in responses]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def append(path: Path, text: str) -> None:
    """Writes lines after the others, and after half a line, which a full disk may have left."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = CUT * (file.read() != b"\n") + text
        file.write(text.encode())


def truncate(path: Path, step: int) -> int:
    """Removes the groups of `step` and later ones, which are trained again, and a last one that was
    cut short; returns how many whole ones. Does nothing if there is no file."""
    if not path.exists():
        return 0
    index = RolloutIndex(path)
    index.refresh()
    kept = [group.end for group in index.groups if group.shown["step"] < step]
    if len(kept) == len(index.groups) and not index.cut_short:
        return 0
    # Not in place: a viewer of the file sees by the new inode that it is another one.
    draft = path.with_name(f".{FILE}")
    with path.open("rb") as old, draft.open("wb") as new:
        left = kept[-1] if kept else 0
        while part := old.read(min(left, 2**24)):
            new.write(part)
            left -= len(part)
    os.replace(draft, path)
    return len(index.groups) - len(kept)


@dataclass(slots=True)
class GroupLines:
    """A group of the file: its lines, and what the first one says."""

    start: int
    end: int
    """First byte, and the one after the last."""
    shown: Record

    def matches(self, wanted: Wanted) -> bool:
        """Whether the group is wanted: for its responses, whether any one of them is."""
        if not wanted.first_step <= self.shown["step"] <= wanted.last_step:
            return False
        words = f"{self.shown['prompt_id']} {self.shown['prompt']}".lower()
        if wanted.prompt.lower() not in words:
            return False
        return any(map(wanted.has, self.shown["responses"]))

    @property
    def reward(self) -> float | None:
        """Mean reward of the responses that have one."""
        rewards = [one["reward"] for one in self.shown["responses"] if one["reward"] is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def lag(self) -> int:
        """Largest lag of a response."""
        return max((one["lag"] or 0 for one in self.shown["responses"]), default=0)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A filter of groups; its defaults let every group pass."""

    first_step: int = 0
    last_step: int = 2**62
    prompt: str = ""
    """A part of the prompt's text, or its row number."""
    least_reward: float = -math.inf
    most_reward: float = math.inf
    least_lag: int = 0
    finish_reason: str = ""
    failure: str = ""
    """A kind of failure."""

    def has(self, response: Mapping[str, Any]) -> bool:
        """Whether a response is wanted; one without a reward, if any reward is."""
        reward = response["reward"]
        any_reward = (self.least_reward, self.most_reward) == (-math.inf, math.inf)
        return (
            (any_reward if reward is None else self.least_reward <= reward <= self.most_reward)
            and (response["lag"] or 0) >= self.least_lag
            and self.finish_reason in ("", response["finish_reason"])
            and self.failure in ("", response["failure"])
        )


ORDERS: dict[str, Callable[[GroupLines], Any]] = {
    "newest": lambda group: -group.start,
    "oldest": lambda group: group.start,
    "worst": lambda group: (group.reward is None, group.reward or 0.0),
    "best": lambda group: (group.reward is None, -(group.reward or 0.0)),
    "lag": lambda group: -group.lag,
}
"""Name of each order of groups, and its key."""


@dataclass
class RolloutIndex:
    """The groups of a file that may grow, or be replaced by a resumed run."""

    path: Path
    groups: list[GroupLines] = field(default_factory=list)
    revision: int = 0
    """Grows with every change of `groups`."""
    cut_short: bool = False
    """Whether the file ends within a group: it is being written, or the run was killed then."""
    _inode: int = 0
    _end: int = 0
    """End of the last whole group."""

    def refresh(self) -> None:
        """Reads what was written since the last call. Raises OSError if the file cannot be read."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._end:
                self._inode = status.st_ino
                self._end = 0
                self.groups = []
                self.revision += 1
            file.seek(self._end)
            self._read(file)

    def _read(self, file: BinaryIO) -> None:
        """Adds the whole groups after `_end`."""
        group: GroupLines | None = None
        to_come = 0
        at = self._end
        for line in file:
            if line.startswith(GROUP):
                group = _group(line, at)
                to_come = 1 + len(group.shown["responses"]) if group else 0
            elif line.startswith(OTHERS) and line.endswith(END):
                to_come -= 1
            else:
                group = None
            at += len(line)
            if group is not None and not to_come:
                group.end = self._end = at
                self.groups.append(group)
                self.revision += 1
                group = None
        self.cut_short = at > self._end

    def find(self, wanted: Wanted, order: str) -> list[GroupLines]:
        """Returns the wanted groups in an order of `ORDERS`."""
        return sorted((one for one in self.groups if one.matches(wanted)), key=ORDERS[order])

    def read(self, step: int, index: int) -> Record | None:
        """Returns a group with its prompt and its responses' tokens, or None; raises ValueError if a
        line of it is broken."""
        places = {(one.shown["step"], one.shown["index"]): one for one in self.groups}
        group = places.get((step, index))
        if group is None:
            return None
        with self.path.open("rb") as file:
            file.seek(group.start)
            lines = file.read(group.end - group.start).splitlines()
        prompt, *responses = map(json.loads, lines[1:])
        return group.shown | {"prompt": prompt, "responses": responses}


def _group(line: bytes, start: int) -> GroupLines | None:
    """Returns the group whose first line is given; None if it is not whole, or broken."""
    try:
        shown = json.loads(line) if line.endswith(END) else {}
    except ValueError:
        return None
    if any(name not in shown for name in NEEDED):
        return None
    del shown["kind"]
    return GroupLines(start, start, shown)
