"""The interface of an environment: the loop of one episode, from its side, or turn after turn."""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
"""A chat message: `role`, `content`, and what else its role has (`tool_calls`, `tool_call_id`)."""
Observation = str | list[int] | list[Message]
"""What an environment writes: text; token ids, which are taken as they are; or chat messages, which
the policy's chat template renders."""


BEGINNING = -1
"""In the place of a turn's number: before the first one."""


class ToolCall(NamedTuple):
    """A call of a tool in a turn of the policy."""

    name: str
    arguments: str
    """As the policy wrote them: JSON, if it did well."""
    id: str
    """Nine letters and digits, which some chat templates ask for; the same in every replay."""


def parsed_arguments(arguments: Any) -> Any:
    """Returns the arguments of a call as a mapping; as they are if they are no JSON of one."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # a policy writes any number of brackets
        return arguments
    return found if isinstance(found, dict) else arguments


class Written(NamedTuple):
    """A turn of the policy."""

    text: str
    """Without the end of the response; a token of `Environment.stop` is part of it."""
    token_ids: list[int]
    calls: Sequence[ToolCall] = ()
    content: str = ""
    """The text without its calls."""


class Policy(Protocol):
    """The policy, as an episode sees it."""

    async def turn(
        self,
        observation: Observation = "",
        reward: float = 0.0,
        tools: Sequence[dict[str, Any]] = (),
        after: int | None = None,
    ) -> Written:
        """Has the policy read `observation` and write its next turn. An episode is one sequence, so
        each call is awaited before the next.

        Args:
            observation: It follows the turn before; at the first call, the prompt.
            reward: The reward of the turn before; 0 at the first call.
            tools: JSON schemas of what the policy may call in this episode, with the first
                observation of an environment that `writes_prompt`.
            after: The turn that the observation follows, from 0, if it is not the one before: a
                branch. `BEGINNING` for none: the observation begins as the first one did. Only in
                an environment with `branches`.
        """


class Environment(ABC):
    """Plays episodes with a policy. Subclass `lrl.environments.Turns`, or this one for the loop."""

    stop: tuple[str, ...] = ()
    """Tokens that end a turn, besides the end of a response; each is its last one then."""
    deterministic: bool = False
    """Whether the same turns always get the same observations and rewards: a resumed run then goes
    on in the middle of an episode, which begins again otherwise."""
    opens: bool = False
    """Whether an episode begins with chat messages of the environment, after those of the prompt:
    the header of the policy's first message then stands behind them, and not in the prompt."""
    writes_prompt: bool = False
    """Whether those messages are the whole chat, with the tools of `Policy.turn`: of a row's prompt
    the policy then reads nothing but what they say. `opens` goes with it."""
    branches: bool = False
    """Whether an observation may follow another turn than the last (`Policy.turn`, `after`)."""
    judges_last_turn: bool = False
    """Whether `data.rewards` get the text of the last turn, and not that of the whole episode."""
    gives_rewards: bool = True
    """Whether its own rewards may be other than 0."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the tools that the chat template shows the policy; its calls are then in
        `Written.calls`."""
        return ()

    @abstractmethod
    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        """Plays one episode of at least one turn, and returns the reward of its last turn.

        Each episode has its own copy of the environment (`copy.deepcopy`); what the episodes of a
        process share stands in a module. An episode that raises is counted and gets no reward;
        what the policy should read is an observation.

        Args:
            policy: Writes the turns.
            prompt: The prompt as its author wrote it.
            columns: The other columns of the row.
        """


Answer = tuple[Observation, bool, float]
"""What the policy reads next, whether the episode has ended, and the reward of the turn."""


class Turns(Environment):
    """An environment of two methods, plain or `async`. What an episode remembers is an attribute
    that `start` sets."""

    reads_tokens: bool = False
    """Whether `reply` gets a turn as token ids, and not as text."""

    def start(
        self, prompt: str, **columns: Any
    ) -> Observation | None | Awaitable[Observation | None]:
        """Begins an episode; may return an observation that follows the prompt (`opens` for chat
        messages)."""
        return None

    @abstractmethod
    def reply(self, turn: Any) -> Answer | Awaitable[Answer]:
        """Answers a turn, its text or with `reads_tokens` its token ids: `(observation, done,
        reward)`."""

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        observation = await _result(self.start(prompt, **columns)) or ""
        reward = 0.0
        while True:
            turn = await policy.turn(observation, reward)
            answer = self.reply(turn.token_ids if self.reads_tokens else turn.text)
            observation, done, reward = await _result(answer)
            if type(done).__name__ not in ("bool", "bool_"):  # numpy's
                raise TypeError(
                    f"reply gives (observation, done, reward), and done is {done!r:.80}"
                )
            if done:
                return reward


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
