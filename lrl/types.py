"""Data types of the flow: a `Prompt` becomes a `Group` of `Rollout`s, and groups become the
`MicroBatch`es of a step.

Units are the same everywhere: lengths in tokens, log-probs in nats, versions in optimizer steps
done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Chat(NamedTuple):
    """The input of a chat template."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()
    """Tools as JSON schemas."""
    variables: Mapping[str, Any] = {}
    """Values for variables of the template, such as `enable_thinking`."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One row of a data set, ready for a generator."""

    id: int
    """Row number in the data set; shuffling does not change it."""
    token_ids: list[int]
    """The prompt for the generator, special tokens included."""
    text: str
    """The prompt as its author wrote it (for chat messages: the last user message). Rewards and
    logs see this."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, which every reward gets by name (`answer`, `level`, ...)."""
    chat: Chat | None = None
    """The chat that the tokens render; None for plain text."""


Decode = Callable[[Sequence[int], Sequence[int]], str]
"""Returns the text of tokens of the policy; the second tokens stand before them."""

ENVIRONMENT = -(2**31)
"""The version of a token that no policy wrote: it has no behaviour log-prob, no loss and no lag."""


class Turn(NamedTuple):
    """A stretch of a rollout that the policy wrote in one request: its tokens from `start` to
    before `stop`."""

    start: int
    stop: int


class Fork(NamedTuple):
    """A place in a rollout where a token does not follow the one before it."""

    start: int
    """Its first token."""
    after: int
    """The place behind the token that it follows; 0 for the prompt."""


class Branch(NamedTuple):
    """One sequence of tokens in a rollout, from the prompt on."""

    places: Sequence[int]
    """The places of its tokens in the rollout, in their order."""
    shared: int
    """First tokens of it that an earlier branch has, too."""


class TurnValues(NamedTuple):
    """The values of a turn by `lrl.TurnCritic`, in units of reward."""

    state: float
    """min(V1, V2) before its first token."""
    action: float
    """min(Q1, Q2) behind its last token."""
    targets: tuple[float, float, float, float]
    """What V1, V2, Q1 and Q2 learn to be."""
    to_go: float
    """The discounted rewards from this turn on, which only metrics read."""

    @property
    def advantage(self) -> float:
        """The turn's value minus the value of the state before it."""
        return self.action - self.state


@dataclass(slots=True, kw_only=True)
class Rollout:
    """The record of one episode after a prompt: turns of the policy, and between them what an
    environment wrote. Without an environment it is a single turn.

    Its tokens are one sequence, unless an agent has changed its history: then they are a tree, of
    which each token is recorded once, in the order of time, and `forks` says what follows what.

    The three lists are equally long. Without an environment they grow while the response is being
    written; with one they grow by a whole turn and its observation (`lrl.rollouts.episodes.episode`).
    """

    token_ids: list[int] = field(default_factory=list)
    """All tokens; the end-of-sequence token is among them when the response ended by itself."""
    logprobs: list[float] = field(default_factory=list)
    """Behaviour log-prob of each token in nats: log mu(token) under the distribution from which it
    was sampled; 0 for an environment's token."""
    versions: list[int] = field(default_factory=list)
    """Policy version that wrote each token, or `ENVIRONMENT`. An in-flight sync makes them grow
    within one response."""
    finish_reason: str = ""
    """`stop` (ended by itself, or by the environment), `length` (cut at a token limit), `turns`
    (cut at the turn limit), `failed` (see `failure`), or empty while it is being written."""
    text: str = ""
    """The tokens decoded, without the end of the response
    (`RolloutDataModule.skip_special_tokens`). Never tokenised again."""
    judged: str | None = None
    """The text that rewards get, if it is not `text`."""
    reward: float | None = None
    """Weighted sum of the reward parts; None until scored, and if scoring failed (an error is not a
    reward)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Each reward by name, before its weight."""
    reference_logprobs: list[float] | None = None
    """Log-prob of each token in nats under the reference policy; None without one."""
    values: list[float] | None = None
    """The critic's value before each token, in units of reward; None without a critic."""
    returns: list[float] | None = None
    """What the critic's value before each token learns to be, 0 for an environment's; None without
    a critic."""
    turn_values: list[TurnValues] | None = None
    """For each of `turns`, what the critic of turns says; None without `lrl.TurnCritic`."""
    kl_penalty: float = 0.0
    """KL penalty that is subtracted from the reward before the baseline; 0 unless it is
    configured."""
    reward_failure: str | None = None
    """Cause of a missing reward: one of `lrl.rewards.pool.KINDS`, a colon and the
    message."""
    turn_ends: list[int] = field(default_factory=list)
    """For each whole turn, the index after its last token; empty without an environment."""
    turn_rewards: list[float] = field(default_factory=list)
    """The environment's reward for each of these turns."""
    turn_weight: float = 1.0
    """The share of `turn_rewards` in `reward`: the weight of `lrl.rewards.TurnRewards`."""
    open_turn: Rollout | None = None
    """The turn that is being written or waits for its reply; its tokens are not among those above.
    None before the first turn, at the end, and without an environment."""
    forks: list[Fork] = field(default_factory=list)
    """The places at which tokens continue earlier ones, in order; empty for one sequence."""
    failure: str = ""
    """Why the episode has failed through no fault of the policy, as in `reward_failure`: it gets
    no reward."""

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def cut(self) -> bool:
        return self.finish_reason in ("length", "turns")

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy wrote so far."""
        own = len(self.token_ids) - self.versions.count(ENVIRONMENT)
        return own if self.open_turn is None else own + self.open_turn.num_tokens

    @property
    def mask(self) -> list[bool]:
        return [version != ENVIRONMENT for version in self.versions]

    @property
    def policy_versions(self) -> list[int]:
        return [version for version in self.versions if version != ENVIRONMENT]

    @property
    def turns(self) -> list[Turn]:
        """The whole turns, in order. An empty observation stands between two without a token."""
        found, start = [], 0
        for stop in self.turn_ends or [len(self.token_ids)] * bool(self.token_ids):
            while start < stop and self.versions[start] == ENVIRONMENT:
                start += 1
            if start < stop:
                found.append(Turn(start, stop))
            start = stop
        return found

    def path_to(self, end: int) -> list[int]:
        """Returns the places of the tokens that lead to the one before `end`, that one included."""
        found: list[int] = []
        for fork in reversed(self.forks):
            if fork.start < end:
                found = [*range(fork.start, end), *found]
                end = fork.after
        return [*range(end), *found]

    @property
    def context(self) -> list[int]:
        """The places of the tokens that the next token follows, in order."""
        end = len(self.token_ids)
        if self.forks and self.forks[-1].start == end:
            end = self.forks[-1].after
        return self.path_to(end)

    @property
    def branches(self) -> list[Branch]:
        """All sequences of tokens that nothing continues; one, unless there are forks."""
        if not self.forks:
            return [Branch(range(len(self.token_ids)), 0)]
        begun = [fork for fork in self.forks if fork.start < len(self.token_ids)]
        continued = {fork.after for fork in begun}
        found: list[Branch] = []
        known: set[int] = set()
        for stop in [*(fork.start for fork in begun), len(self.token_ids)]:
            if stop not in continued:
                places = self.path_to(stop)
                found.append(Branch(places, sum(place in known for place in places)))
                known.update(places)
        return found


@dataclass(slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt: the unit of admission and training."""

    index: int
    """Place in the run's endless row of prompts: epoch * prompts per epoch + position in the
    epoch."""
    prompt: Prompt
    rollouts: list[Rollout] = field(default_factory=list)
    admitted_by: int = 0
    """Generator version at the group's admission; none of its tokens is older."""
    due: int = 0
    """Step that trains it if groups are trained in the order of admission; not saved in a
    checkpoint."""
    scoring_s: float = 0.0
    """Seconds between its last token and its last reward."""
    asked_s: float | None = None
    """Time of the request on the controller's clock; None if a checkpoint had all responses
    whole."""
    written_s: float | None = None
    """End of its last response, on the same clock."""
    reference_version: int | None = None
    """`Reference.version` of the rollouts' `reference_logprobs`; None before they are computed."""

    @property
    def scored(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.reward is not None]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def num_tokens(self) -> int:
        return sum(rollout.num_tokens for rollout in self.rollouts)

    @property
    def has_tokens(self) -> bool:
        return any(rollout.token_ids for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Smallest version among the policy's tokens of the group; ValueError for a group without
        one."""
        return min(version for rollout in self.rollouts for version in rollout.policy_versions)


class LabelIndex(NamedTuple):
    """Places and owners of a micro-batch's n labels, found once on the CPU.

    A GPU that is asked for the places of a mask has the host wait.
    """

    places: Tensor
    """int64 [n]: r * L + i of each label [r, i]."""
    responses: Tensor
    """int64 [n]: the response of each label, 0 to S - 1."""
    groups: Tensor
    """int64 [n]: the group of each label, 0 to G - 1."""
    num_responses: int
    """S."""
    num_groups: int
    """G."""
    mask: Tensor
    """The mask whose places these are."""
    changes: int
    """Of the mask, until then."""

    @classmethod
    def of(cls, micro: MicroBatch) -> LabelIndex:
        places = micro.mask.flatten().nonzero().squeeze(1)
        responses, groups = (
            torch.unique(ids.flatten()[places], return_inverse=True)
            for ids in (micro.sequence_ids, micro.group_ids)
        )
        return cls(
            places,
            responses[1],
            groups[1],
            num_responses=len(responses[0]),
            num_groups=len(groups[0]),
            mask=micro.mask,
            changes=_changes(micro.mask),
        )

    def is_of(self, mask: Tensor) -> bool:
        """Whether it is of this mask, and nobody has changed that."""
        return self.mask is mask and self.changes == _changes(mask)


def _moved(fields: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Returns the tensors among `fields` on `device`. No host waits until they are on a GPU: that
    takes them from pinned memory, which torch uses again only once it has."""
    to_gpu = torch.device(device).type == "cuda"
    return {
        name: one.pin_memory().to(device, non_blocking=True)
        if to_gpu and one.device.type == "cpu"
        else one.to(device)
        for name, one in fields.items()
        if isinstance(one, Tensor)
    }


class SequenceBounds(NamedTuple):
    """The N sequences of a micro-batch, for attention without masks.

    A sequence is the shared part of a tree, one of its branches, a rollout of its own, or the
    padding of a row. A token attends to those before it in its sequence; a branch's keys are the
    shared tokens and its own.
    """

    queries: Tensor
    """int32 [N + 1]: the first token of each sequence, and R * L."""
    keys: Tensor
    """int32 [N + 1]: the same among the keys."""
    longest_query: int
    """Tokens of the longest sequence."""
    longest_key: int
    """Keys of the sequence with most."""
    key_places: Tensor | None = None
    """int32 [K]: r * L + i of each key; None where every sequence has its own tokens alone."""


def _changes(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place, as torch counts."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rollouts packed into rows of equal length, for one forward and backward pass.

    R rows of L tokens. Several rollouts may share a row, if the policy keeps them apart
    (`lrl.training.trials`); `position_ids` start again at 0 with each of them, and attention
    builds its block-diagonal mask from that. Rollouts of a group may also share their first tokens
    (`lrl.training.prefix_tree`); `readers_end` then says who reads what.

    All per-token fields are aligned with the position that *predicts* the token: `labels[r, i]` is
    the token after `input_ids[r, i]`.
    """

    input_ids: Tensor
    """int64 [R, L]: prompt and response tokens; padding repeats the row's last token, as a separate
    sequence."""
    position_ids: Tensor
    """int64 [R, L]: position within the rollout (prompt included)."""
    labels: Tensor
    """int64 [R, L]: the response token predicted here; 0 where `mask` is false."""
    mask: Tensor
    """bool [R, L]: true where `labels` is a response token that is trained."""
    behaviour_logprobs: Tensor
    """float32 [R, L], nats: log mu of the label; 0 where `mask` is false."""
    advantages: Tensor
    """float32 [R, L]: advantage of the label's rollout; 0 where `mask` is false."""
    versions: Tensor
    """int64 [R, L]: policy version of the label; -1 where `mask` is false."""
    sequence_ids: Tensor
    """int64 [R, L]: number of the rollout within this micro-batch, from 0; -1 for padding. Shared
    tokens count as those of the first one."""
    group_ids: Tensor
    """int64 [R, L]: number of the rollout's group within this micro-batch, from 0; -1 for
    padding."""
    trained_elsewhere: Tensor
    """int64 [R, L]: trained tokens of the label's rollout in its other branches; 0 where `mask` is
    false."""
    temperature: float
    """Sampling temperature of the run: the policy divides its logits by it."""
    readers_end: Tensor | None = None
    """int64 [R, L]: a token is read by those from its own place to before this one, and by no
    other. None where every rollout has its own copy of all of its tokens, so that `position_ids`
    tell them apart."""
    reference_logprobs: Tensor | None = None
    """float32 [R, L], nats: log-prob of the label under the reference policy, 0 where `mask` is
    false; or None."""
    returns: Tensor | None = None
    """float32 [R, L]: `Rollout.returns` of the label, 0 where `mask` is false; or None."""
    turn_targets: Tensor | None = None
    """float32 [R, L, 5]: `TurnValues.targets` and `to_go`, NaN where there is none: those of V1, V2 and
    `to_go` at a turn's first label, those of Q1 and Q2 at its last. None without
    `lrl.TurnCritic`."""
    partial: bool = False
    """Whether `mask` has only some of a response's own tokens, because the others are too old to
    train, or in another branch."""
    label_index: LabelIndex | None = None
    """See `index`; made by `to`."""
    bounds: SequenceBounds | None = None
    """The sequences that `position_ids` and `readers_end` tell apart; made in collation."""

    @property
    def index(self) -> LabelIndex:
        """The places of the labels; found anew unless `to` has found them, and the mask is still the
        same."""
        made = self.label_index
        return made if made is not None and made.is_of(self.mask) else LabelIndex.of(self)

    def of_labels(self, values: Tensor) -> Tensor:
        """Returns [n, ...]: the values [R, L, ...] at the labels.

        They are selected, not multiplied by the mask: 0 * NaN would reach the gradient.
        """
        return values.flatten(0, 1).index_select(0, self.index.places)

    def at_labels(self, values: Tensor) -> Tensor:
        """Returns [R, L, ...]: the values [n, ...] at their labels, and 0 elsewhere."""
        shape = self.mask.shape
        zeros = values.new_zeros(shape.numel(), *values.shape[1:])
        return zeros.index_copy(0, self.index.places, values).unflatten(0, shape)

    @property
    def num_tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def num_sequences(self) -> int:
        return int(self.sequence_ids.max()) + 1 if self.sequence_ids.numel() else 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout, prompt and response; of each tree, where rollouts share
        tokens."""
        read = self.sequence_ids >= 0
        begins = read & (self.position_ids == 0)
        return (begins.flatten().cumsum(0)[read.flatten()] - 1).bincount().tolist()

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = _moved({name: getattr(self, name) for name in self.__slots__}, device)
        mask, index = moved["mask"], self.index
        found = {"places": index.places, "responses": index.responses, "groups": index.groups}
        there = {"mask": mask, "changes": _changes(mask)} | _moved(found, device)
        moved["label_index"] = index._replace(**there)
        if self.bounds is not None:
            moved["bounds"] = self.bounds._replace(**_moved(self.bounds._asdict(), device))
        return replace(self, **moved)


class Step(Protocol):
    """The micro-batches of one optimizer step. Iterating may wait for rollouts; the counts are
    right at its end."""

    def __iter__(self) -> Iterator[MicroBatch]: ...

    @property
    def num_tokens(self) -> int:
        """Response tokens in the loss, over all ranks."""

    @property
    def num_sequences(self) -> int:
        """Responses with at least one token in the loss, over all ranks."""

    def finish(self) -> None:
        """Ends the step after its optimizer step; not called if an error ends the step before."""


LEAST_TEMPERATURE = 0.01
"""vLLM samples at it instead of any lower temperature but 0, with only a line in its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one request. It has no setting under which the log-probs would be wrong (top-p,
    penalties).

    Args:
        n: Responses per prompt.
        max_tokens: Most tokens of a response.
        temperature: Divisor of the logits before sampling, at least `LEAST_TEMPERATURE`; 0 is
            greedy.
        stop_tokens: Tokens that end a response; each is its last one then.
    """

    n: int = 1
    max_tokens: int = 1024
    temperature: float = 1.0
    stop_tokens: tuple[int, ...] = ()

    def as_vllm(self, n: int, written: int) -> dict[str, Any]:
        """Returns the `sampling_params` of a request for `n` responses that have `written` tokens
        already."""
        return {
            "n": n,
            "max_tokens": self.max_tokens - written,
            "temperature": self.temperature,
            "stop_token_ids": list(self.stop_tokens),
            "ignore_eos": True,  # those that vLLM would add of its own
            "logprobs": 0,  # the log-prob of the sampled token alone
            "detokenize": False,  # its text is not read, and vLLM would decode every token twice
        }
