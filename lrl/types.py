"""What flows through the house: a `Prompt` becomes a `Group` of `Rollout`s, and groups become the `MicroBatch`es of a
step.

The units are the same everywhere: lengths in tokens, log-probs in nats, versions in optimizer steps done.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One row of a data set, ready for a generator."""

    id: int
    """Row number in the data set; shuffling does not change it."""
    token_ids: list[int]
    """The whole prompt as the generator gets it, special tokens included."""
    text: str
    """The prompt as its author wrote it (for chat messages: the last user message). Rewards and logs see this."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, handed to every reward by name (`answer`, `level`, ...)."""


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One response to a prompt, with the proof of where each token came from. The three lists are equally long, and
    grow together while it is being written."""

    token_ids: list[int] = field(default_factory=list)
    """The sampled tokens; the end-of-sequence token is among them when the response ended by itself."""
    logprobs: list[float] = field(default_factory=list)
    """Behaviour log-prob of each token in nats: log mu(token), under the distribution it was really sampled from."""
    versions: list[int] = field(default_factory=list)
    """Policy version that wrote each token. An in-flight sync makes them grow within one response."""
    finish_reason: str = ""
    """`stop` (ended by itself), `length` (cut at the token limit), or empty while it is being written."""
    text: str = ""
    """The tokens decoded, special tokens left out. Never tokenised again."""
    reward: float | None = None
    """Weighted sum of the reward parts; None until scored, and if scoring failed (an error is not a reward)."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Each reward by name, before its weight."""
    reference_logprobs: list[float] | None = None
    """Log-prob of each token in nats under the reference policy; None without one."""
    kl_penalty: float = 0.0
    """What the KL to the reference takes off the reward before the baseline; 0 unless it is told to."""
    reward_failure: str | None = None
    """Why there is no reward: one of the kinds in `lrl.rewards.failure_stats.KINDS`, then a colon and the message."""

    @property
    def finished(self) -> bool:
        """Whether the response is whole."""
        return bool(self.finish_reason)


@dataclass(slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt: the unit that is admitted, finished, and trained exactly once."""

    index: int
    """Place in the run's endless row of prompts: `epoch * prompts per epoch + position in the epoch`."""
    prompt: Prompt
    rollouts: list[Rollout] = field(default_factory=list)
    admitted_by: int = 0
    """Version that the generators held at the group's admission; none of its tokens is older."""
    due: int = 0
    """Step that trains it when groups are trained in the order of their admission; a checkpoint does not need it."""
    scoring_s: float = 0.0
    """Seconds between its last token and its last reward."""
    asked_s: float | None = None
    """When its responses were asked for, on the clock of the controller's loop; None if a checkpoint had them whole."""
    written_s: float | None = None
    """When the last of them ended, on the same clock."""
    reference_version: int | None = None
    """`Reference.version` of the reference that gave the rollouts their `reference_logprobs`; None before that."""

    @property
    def scored(self) -> list[Rollout]:
        """The rollouts that have a reward."""
        return [rollout for rollout in self.rollouts if rollout.reward is not None]

    @property
    def num_tokens(self) -> int:
        """Tokens written so far, over all responses."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def has_tokens(self) -> bool:
        """Whether any response has a token."""
        return any(rollout.token_ids for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """The smallest version among the group's tokens; raises ValueError for a group without a token."""
        return min(version for rollout in self.rollouts for version in rollout.versions)


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rollouts packed into rows of equal length; what one forward and backward pass sees.

    R rows of L tokens. Several rollouts may share a row, if the policy has been seen to keep them apart
    (`lrl.training.isolation`); `position_ids` start again at 0 with each of them, and attention that is told of them
    builds its block-diagonal mask from that. All per-token fields are aligned with the position that *predicts* the
    token: `labels[r, i]` is the token after `input_ids[r, i]`.
    """

    input_ids: Tensor
    """int64 [R, L]: prompt and answer tokens; padding repeats the row's last one, as a sequence of its own."""
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
    """int64 [R, L]: policy version that wrote the label; -1 where `mask` is false."""
    sequence_ids: Tensor
    """int64 [R, L]: number of the rollout within this micro-batch, from 0; -1 for padding."""
    group_ids: Tensor
    """int64 [R, L]: number of the rollout's group within this micro-batch, from 0; -1 for padding."""
    temperature: float
    """Sampling temperature of the labels: the policy divides its logits by it. One for the whole run."""
    reference_logprobs: Tensor | None = None
    """float32 [R, L], nats: log-prob of the label under the reference policy, 0 where `mask` is false; or None."""

    @property
    def num_tokens(self) -> int:
        """Answer tokens in the loss."""
        return int(self.mask.sum())

    @property
    def num_sequences(self) -> int:
        """Rollouts in this micro-batch."""
        return int(self.sequence_ids.max()) + 1 if self.sequence_ids.numel() else 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each rollout in it, prompt and answer."""
        return self.sequence_ids[self.sequence_ids >= 0].bincount().tolist()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        tensors = {name: getattr(self, name) for name in self.__slots__ if isinstance(getattr(self, name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


class Step(Protocol):
    """The work of one optimizer step. Iterating may wait for rollouts; the counts are right once it has ended."""

    def __iter__(self) -> Iterator[MicroBatch]: ...

    @property
    def num_tokens(self) -> int:
        """Answer tokens in the loss, over all ranks."""

    @property
    def num_sequences(self) -> int:
        """Responses with at least one token in the loss, over all ranks."""

    def finish(self) -> None:
        """Called once its optimizer step is done, and not when an error ends it before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one request. Nothing that changes the distribution behind the log-probs' back (top-p, penalties) is
    here.

    Args:
        n: Responses per prompt.
        max_tokens: Most tokens of a response.
        temperature: Logits are divided by it before sampling; 0 is greedy.
    """

    n: int = 1
    max_tokens: int = 1024
    temperature: float = 1.0

    def as_vllm(self, n: int, written: int) -> dict[str, Any]:
        """The `sampling_params` of a request for `n` answers that have `written` tokens already.

        `logprobs: 0` asks for the sampled token's own log-prob. Nobody reads the server's text: without `detokenize:
        false` it decodes every token twice, for the response and for its log-prob.
        """
        length = {"n": n, "max_tokens": self.max_tokens - written}
        return length | {"temperature": self.temperature, "logprobs": 0, "detokenize": False}
