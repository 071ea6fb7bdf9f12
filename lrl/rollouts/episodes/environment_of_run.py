"""The environment of a run: its settings, and its processes, which it tries before a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrl.checkpoints.made_with import Settings, fingerprint
from lrl.environments import Agent, Environment, Written
from lrl.environments.external_agents import ExternalAgents
from lrl.environments.play import Reply
from lrl.environments.pool import EnvironmentPool
from lrl.errors import ConfigError, EpisodeError, above, at_least
from lrl.rewards.base import trial_response
from lrl.rollouts.episodes.observations import Transcript, call_tokens, check_result
from lrl.rollouts.policy_text import PolicyText, encode
from lrl.system.event_loop import LoopThread
from lrl.types import Prompt
from lrl.workers.pool import WorkerPool
from lrl.workers.worker import START_TIMEOUT_S

if TYPE_CHECKING:
    from lrl.generators.tool_calls import ToolCallParser


class EnvironmentOfRun:
    """Plays the episodes of a run, each of at most `max_tokens` tokens after its prompt; the other
    settings are `RolloutDataModule`'s. Raises ConfigError if the environment cannot be sent to a
    process."""

    def __init__(
        self,
        environment: Environment,
        *,
        max_tokens: int,
        max_prompt_tokens: int,
        max_turns: int,
        max_turn_tokens: int | None,
        turn_timeout_s: float,
        episode_timeout_s: float,
        environment_workers: int,
        environment_memory_gib: float | None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        at_least(1, "data", max_turns=max_turns, max_turn_tokens=max_turn_tokens)
        at_least(0, "data", environment_workers=environment_workers)
        above(
            0,
            "data",
            turn_timeout_s=turn_timeout_s,
            episode_timeout_s=episode_timeout_s,
            environment_memory_gib=environment_memory_gib,
        )
        if (longest := max_turn_tokens or max_tokens) > max_tokens:
            raise ConfigError(
                f"data.max_turn_tokens is {longest}, more than data.max_response_tokens, "
                f"{max_tokens}, which the whole episode has: lower it, or leave it out."
            )
        self.environment = environment
        self.timeout_s = episode_timeout_s
        """From the end of the first turn to the end of the episode."""
        self.max_turns = max_turns
        self.max_turn_tokens = longest
        self.max_prompt_tokens = max_prompt_tokens if environment.writes_prompt else None
        """Of a prompt whose rest is the opening observation, which then takes nothing of the
        episode's tokens; None if the prompt is there before."""
        self._max_tokens = max_tokens
        self.pool: EnvironmentPool | ExternalAgents
        self.external: ExternalAgents | None = None
        """The pool, if lrl does not start the agents."""
        if isinstance(environment, Agent) and environment.port is not None:
            self.pool = self.external = ExternalAgents(environment, turn_timeout_s)
        else:
            self.pool = EnvironmentPool(
                environment,
                environment_workers,
                turn_timeout_s=turn_timeout_s,
                memory_gib=environment_memory_gib,
                start_timeout_s=start_timeout_s,
            )
        self.made_with: Settings = {
            "data.environment": fingerprint([type(environment).__mro__, vars(environment)]),
            "data.max_turns": max_turns,
            "data.max_turn_tokens": longest,
        }
        """The settings on which episodes depend."""

    @property
    def workers(self) -> WorkerPool | None:
        """The workers that play episodes; None if lrl does not start the agents."""
        return None if isinstance(self.pool, ExternalAgents) else self.pool.workers

    def start(
        self, loop: LoopThread, policy: PolicyText, first: Prompt | None, parses: bool
    ) -> None:
        """Starts the processes, and tries the environment with the reference answer of the `first`
        prompt as a turn (`EnvironmentPool.start`). Agents that lrl does not start are not tried.
        `parses` says whether the generators find calls of tools."""
        if isinstance(self.pool, ExternalAgents):
            return
        if self.environment.tools:
            check_result(policy, self.environment)
        text = "" if first is None else trial_response(first.columns)
        try:
            turn = Written(text, encode(policy.tokenizer, text), content=text)
        except ConfigError:  # the answer need not be in the policy's tokens
            turn = Written("", [])

        def check(opening: Reply, reply: Reply) -> None:
            assert first is not None, "without a prompt no episode is tried"
            transcript = Transcript(first, policy, self.environment, parses)
            begins = len(transcript.ids(opening, None))
            if self.max_prompt_tokens is not None:
                check_prompt(len(first.token_ids) + begins, self.max_prompt_tokens)
            elif begins >= self._max_tokens:
                text = f"an episode begins with {begins} tokens, and has data.max_response_tokens "
                raise EpisodeError(
                    "environment_error", f"{text}{self._max_tokens} in all: raise it"
                )
            transcript.ids(reply, turn)

        self.pool.start(loop, first, turn, check)

    async def try_parser(self, parser: ToolCallParser, policy: PolicyText) -> None:
        """Warns if the parser finds no call of a tool where the chat template writes one."""
        if tools := self.environment.tools:
            call = call_tokens(policy, tools)
            await parser.try_out(call, policy.decode(call, ()), tools)


def check_prompt(tokens: int, most: int) -> None:
    if tokens > most:
        text = (
            f"the first request has {tokens} tokens, its tools' schemas included, and "
            f"data.max_prompt_tokens is {most}: raise it"
        )
        raise EpisodeError("environment_error", text)
