"""The ledger and its pacing: the state of every group of a run, and when a group may start. Only
this module changes a state.

    waiting ─▶ running ─▶ finished ─▶ handed to a step ─▶ trained, maybe given up
       ▲          ├─────▶ skipped
       └──────────┴───────────┘  restarted

A group that was handed out is not trained yet: its step may never end. The number of steps done
decides, when the state is saved, which groups count as trained. The others are saved as far as they
are written: a resumed run hands out finished groups again and continues the running ones.

Pacing bounds the lag by construction. The run is an endless row of groups, and step s trains
`groups_in(s)` of them. A group may be admitted only when the generators already hold a version that
is at most `max_lag` behind the step by which it must be trained. No rollout is thrown away to keep
the bound, so pacing is a formula without a clock and without state.

Why the bound holds. Groups admitted by version v or an older one number at most `groups_before(v +
max_lag + 1)`, and steps take groups in the order of the version that admitted them (`Ledger.take`).
So all of them are trained before step `v + max_lag + 1` begins. A token is never older than its
group's admission, so no trained token lags by more than `max_lag`. It has to be this order:
admission fills every step up to the bound, so each newer group that went first would push an older
one over it. Each open group keeps the version that admitted it, so the bound holds across a resume.

A skipped group is done without a step: it is never admitted again, and another group starts at once
in its place, under the version the generators hold at that moment. So the groups admitted by
version v or an older one number at most `groups_before(v + max_lag + 1)` plus the skipped ones, and
the bound holds. The steps of an epoch train as many groups as the data set has prompts; with
skipping they consume more of the row, and continue into the next epoch's shuffle.
"""

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from lrl.checkpoints.made_with import fingerprint
from lrl.types import Fork, Group, Prompt, Rollout

log = logging.getLogger(__name__)

DONE = -1
"""Step of a group that is done without one: it comes before all steps."""


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


class PromptRow(Protocol):
    def __getitem__(self, index: int) -> Prompt: ...


class Ledger:
    """Groups of a run, by their index in its row of prompts. It belongs to the thread of the
    controller's loop; the trainer's thread calls only `give_up`."""

    def __init__(self, pacing: Pacing) -> None:
        self.pacing = pacing
        self.next_index = 0
        self.running: dict[int, Group] = {}  # in order of admission
        self.finished: dict[int, Group] = {}  # in order of arrival
        self.given_up: dict[int, int] = {}  # index -> prompt id
        self.skipped: dict[int, int] = {}  # index -> prompt id
        self._handed: dict[int, Group] = {}  # groups of the newest step
        self._started = 0  # groups running, finished, skipped, handed out or trained
        self._done_through = 0  # every group before this one is trained or skipped
        # Index -> its step, for the groups handed out from there on; DONE without one.
        self._steps: dict[int, int] = {}

    def admit(self, generator_version: int, prompts: PromptRow, responses: int) -> list[Group]:
        """Moves all groups that may start while the generators hold this version to running, each
        with so many empty responses, and returns them, oldest first."""
        admitted = []
        self.next_index = max(self.next_index, self._done_through)
        while self._started < self.pacing.may_have_started(generator_version) + len(self.skipped):
            books = (self._steps, self.running, self.finished)
            if not any(self.next_index in book for book in books):
                group = Group(
                    index=self.next_index,
                    prompt=prompts[self.next_index],
                    rollouts=[Rollout() for _ in range(responses)],
                    admitted_by=generator_version,
                    due=self.pacing.step_of(self._started - len(self.skipped)),
                )
                self._started += 1
                self.running[group.index] = group
                admitted.append(group)
            self.next_index += 1
        return admitted

    def finish(self, group: Group) -> None:
        self.finished[group.index] = self.running.pop(group.index)

    def skip(self, group: Group) -> None:
        """Moves a running group to skipped: no step trains it, and one more group may start. Call
        `admit` after it, because a step may already wait for the replacement."""
        del self.running[group.index]
        self._steps[group.index] = DONE
        self.skipped[group.index] = group.prompt.id

    def take(self, step: int) -> Group | None:
        """Hands the next group to `step`; returns None if the step has to wait for one.

        Groups that an older version admitted go first, and the trainer waits for them: that bounds
        the lag. Among them, and among all groups when stragglers are masked, the first to finish
        goes first.
        """
        self._settle(step)
        if not self.finished:
            return None
        group = next(iter(self.finished.values()))
        if self.pacing.wait_for_stragglers:
            group = min(self.finished.values(), key=lambda one: one.admitted_by)
            oldest = next(iter(self.running.values()), group)
            if oldest.admitted_by < group.admitted_by:
                return None
        del self.finished[group.index]
        self._steps[group.index] = step
        self._handed[group.index] = group
        return group

    def give_up(self, group: Group) -> None:
        """Lists the prompt of a group that was handed out and had nothing to train."""
        self.given_up[group.index] = group.prompt.id

    def restart(self, groups: list[Group]) -> None:
        """Moves running and finished groups, which no generator writes, back to waiting: they are
        generated anew."""
        for group in groups:
            (self.running if group.index in self.running else self.finished).pop(group.index)
        self._started -= len(groups)
        self.next_index = self._done_through

    def _settle(self, steps_done: int) -> None:
        """Forgets the groups of done steps: those that were handed out, and in the books those that
        precede all open ones. So the ledger does not grow with the steps."""
        self._handed = {
            index: group
            for index, group in self._handed.items()
            if self._steps.get(index, DONE) >= steps_done
        }
        while self._steps.get(self._done_through, steps_done) < steps_done:
            del self._steps[self._done_through]
            self._done_through += 1

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """Returns the state of a checkpoint after `steps_done` steps, in plain types and tensors.
        Pacing bounds its size: at most `(max_lag + 1) * groups_per_step` groups are open."""
        self._settle(steps_done)
        # A group that an unfinished step gave up is handed out again, and is listed then.
        given_up = {
            index: id
            for index, id in self.given_up.items()
            if self._steps.get(index, DONE) < steps_done
        }
        finished = [*self._handed.values(), *self.finished.values()]
        return {
            "steps_done": steps_done,
            "done_through": self._done_through,
            "done_ahead": sorted(index for index, step in self._steps.items() if step < steps_done),
            "given_up": given_up,
            "skipped": dict(self.skipped),
            "finished": [save_group(group, scored=True) for group in finished],
            "running": [save_group(group, scored=False) for group in self.running.values()],
        }

    def load_state_dict(
        self, state: dict[str, Any], prompt_at: Callable[[int], Prompt], same_rewards: bool = True
    ) -> int:
        """Restores the state: done groups are never admitted again, and open groups are open again.

        Returns the number of finished groups that are running again, whole, because they have to be
        scored again: `same_rewards` is false, or the row has other columns. Raises ValueError if
        the state belongs to a run with other prompts, or with other steps: its groups would be
        trained too late, twice or never.
        """
        done = state["done_through"] + len(state["done_ahead"])
        steps_done = state["steps_done"]
        trained = done - len(state["skipped"])
        expected = self.pacing.groups_before(steps_done)
        if trained != expected:
            raise ValueError(
                f"The checkpoint has trained {trained} groups in {steps_done} steps. With "
                f"{self.pacing.prompts_per_epoch} prompts and data.groups_per_step "
                f"{self.pacing.groups_per_step} it would be {expected}: resume with the ones it "
                "was made with."
            )
        self._done_through = self.next_index = state["done_through"]
        self._steps = dict.fromkeys(state["done_ahead"], DONE)
        self.given_up = dict(state["given_up"])
        self.skipped = dict(state["skipped"])
        self.finished = {}
        running = [load_group(saved, prompt_at(saved["index"])) for saved in state["running"]]
        for saved in state["finished"]:
            prompt = prompt_at(saved["index"])
            if same_rewards and has_same_columns(saved, prompt):
                self.finished[saved["index"]] = load_group(saved, prompt)
            else:
                running.append(load_group(saved, prompt, scored=False))
        groups = sorted(
            [*self.finished.values(), *running], key=lambda one: (one.admitted_by, one.index)
        )
        self.running = {one.index: one for one in groups if one.index not in self.finished}
        self._started = done + len(groups)
        self._set_due(groups, trained)
        return len(running) - len(state["running"])

    def _set_due(self, groups: list[Group], trained: int) -> None:
        """Sets the steps of open groups in the order of their admission; restarts those that would
        be trained too late: a resumed run may have a lower `max_lag`."""
        pacing, late = self.pacing, []
        for group in groups:
            too_late = trained >= pacing.groups_before(group.admitted_by + pacing.max_lag + 1)
            if pacing.wait_for_stragglers and too_late:
                late.append(group)
            else:
                group.due = pacing.step_of(trained)
                trained += 1
        self.restart(late)
        if late:
            log.warning(
                "%d open groups of the checkpoint are generated anew: with data.max_lag %d and "
                "data.stragglers wait they would be trained too late.",
                len(late),
                pacing.max_lag,
            )


# ---- a group in a checkpoint
#
# The prompt is not saved, because its index finds it again; its id and a digest of its tokens show
# whether it is still the same, and a fingerprint whether its other columns are, which rewards read.
# (A column may hold any Python object, and a checkpoint may not.) `PolicyModule.prepare` computes
# its additions again, but a critic's values are those of the step that first trained a group.


def save_group(group: Group, *, scored: bool) -> dict[str, Any]:
    """Returns a group of T tokens, in S runs of one version, in plain types and tensors:
    `token_ids` int32 [T], `logprobs` float32 [T], `versions` int32 [S] and `spans` int64 [S]
    (tokens of each run); if it was `scored`, with its rewards and texts. An open turn is part of
    its episode's tokens."""
    rollouts = [flattened(rollout) for rollout in group.rollouts]

    def joined(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([one for each in rollouts for one in getattr(each, name)], dtype=dtype)

    versions, spans = torch.unique_consecutive(joined("versions", torch.int32), return_counts=True)
    fields = ("text", "reward", "reward_parts", "reward_failure", "values", "turn_weight")
    return {
        "index": group.index,
        "admitted_by": group.admitted_by,
        "prompt_id": group.prompt.id,
        "prompt_digest": _digest(group.prompt),
        "columns": fingerprint(group.prompt.columns),
        "token_ids": joined("token_ids", torch.int32),
        "logprobs": joined("logprobs", torch.float32),
        "versions": versions,
        "spans": spans,
        "lengths": [len(rollout.token_ids) for rollout in rollouts],
        "finish_reasons": [rollout.finish_reason for rollout in rollouts],
        "episodes": [_episode(rollout) for rollout in group.rollouts],
        "judgements": [
            {name: getattr(rollout, name) for name in fields if scored} for rollout in rollouts
        ],
    }


def has_same_columns(saved: dict[str, Any], prompt: Prompt) -> bool:
    return bool(saved.get("columns") == fingerprint(prompt.columns))


def load_group(saved: dict[str, Any], prompt: Prompt, *, scored: bool = True) -> Group:
    """Returns the group of `save_group`, with its rewards only if `scored`; raises ValueError if it
    had another prompt."""
    if (prompt.id, _digest(prompt)) != (saved["prompt_id"], saved["prompt_digest"]):
        same_row = prompt.id == saved["prompt_id"]
        difference = "has other tokens" if same_row else f"is row {prompt.id}"
        raise ValueError(
            f"The checkpoint has responses to row {saved['prompt_id']} of the data set at place "
            f"{saved['index']} of the run, and the prompt there {difference}: data.prompts has "
            "changed (rows, seed, template, tokenizer). Resume with the data set it was made with."
        )
    lengths = saved["lengths"]
    tokens = zip(
        saved["token_ids"].split(lengths),
        saved["logprobs"].split(lengths),
        saved["versions"].repeat_interleave(saved["spans"]).split(lengths),
        strict=True,
    )
    rollouts = [
        Rollout(
            token_ids=token_ids.tolist(),
            logprobs=logprobs.tolist(),
            versions=versions.tolist(),
            finish_reason=saved["finish_reasons"][place],
            **(saved["judgements"][place] if scored else {}),
        )
        for place, (token_ids, logprobs, versions) in enumerate(tokens)
    ]
    for rollout, episode in zip(rollouts, saved.get("episodes", ()), strict=False):
        _restore_episode(rollout, episode)
    return Group(
        index=saved["index"], prompt=prompt, rollouts=rollouts, admitted_by=saved["admitted_by"]
    )


def flattened(rollout: Rollout) -> Rollout:
    """Returns a rollout with the tokens and the end of its open turn."""
    if (turn := rollout.open_turn) is None:
        return rollout
    return replace(
        rollout,
        token_ids=rollout.token_ids + turn.token_ids,
        logprobs=rollout.logprobs + turn.logprobs,
        versions=rollout.versions + turn.versions,
        finish_reason=turn.finish_reason,
    )


def _episode(rollout: Rollout) -> dict[str, Any]:
    """Returns the fields that only environments fill in; empty without one."""
    if not (rollout.turn_ends or rollout.open_turn is not None or rollout.failure):
        return {}
    return {
        "turn_ends": list(rollout.turn_ends),
        "turn_rewards": list(rollout.turn_rewards),
        "forks": [tuple(fork) for fork in rollout.forks],
        "recorded": None if rollout.open_turn is None else len(rollout.token_ids),
        "failure": rollout.failure,
    }


def _restore_episode(rollout: Rollout, saved: dict[str, Any]) -> None:
    """Undoes `flattened`, and fills in the rest."""
    if not saved:
        return
    rollout.turn_ends = saved["turn_ends"]
    rollout.turn_rewards = saved["turn_rewards"]
    rollout.forks = [Fork(*fork) for fork in saved.get("forks", ())]
    rollout.failure = saved["failure"]
    if (recorded := saved["recorded"]) is None:
        return
    rollout.open_turn = Rollout(finish_reason=rollout.finish_reason)
    rollout.finish_reason = ""
    for name in ("token_ids", "logprobs", "versions"):
        whole = getattr(rollout, name)
        setattr(rollout.open_turn, name, whole[recorded:])
        del whole[recorded:]


def _digest(prompt: Prompt) -> int:
    return zlib.crc32(np.asarray(prompt.token_ids, dtype="<i4").tobytes())
