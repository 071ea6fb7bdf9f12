"""Agents that do what they like with their histories, through the real server of an agent's process.
A stand-in writes the turns at the pool's edge: every token that it has sampled is trained in one
place, where it reads what the sampler read, or it belongs to an episode that is counted as failed.

Covers lrl/environments/agent.py, lrl/rollouts/episodes/episode.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrl.advantages import GroupMean
from lrl.environments import Agent, Message, ToolCall
from lrl.rollouts.controller import score
from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun
from lrl.rollouts.episodes.episode import Episodes
from lrl.rollouts.packing import Packer
from lrl.system.event_loop import together
from lrl.types import Group, Prompt, Rollout, Sampling
from tests import made
from tests.chat_templates import CHATML
from tests.environments.agents import ADD, ask
from tests.environments.here import Here, of_run
from tests.environments.test_agent import DEADLINE_S
from tests.policies import packed
from tests.rollouts.episodes.test_branches import Sampler, trained_tokens
from tests.rollouts.episodes.test_observations import policy_of

SUB = {"type": "function", "function": {"name": "sub"}}
MOVES = ("ask", "ask", "again", "edit", "tools", "together", "retry", "drop", "forge", "raise")
moves = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 7)), min_size=1, max_size=8)


class Speaker:
    """The requests of one agent."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, api_key: str) -> None:
        self.to = session, f"{base_url}/chat/completions", api_key
        self.asked: list[tuple[dict[str, Any], Message]] = []
        """Each request with its answer."""

    async def ask(self, body: dict[str, Any], **headers: str) -> Message:
        status, found = await ask(*self.to, body, **headers)
        if status == 410:
            raise asyncio.CancelledError  # the episode has ended
        assert status == 200, found
        message: Message = found["choices"][0]["message"]
        self.asked.append((body, message))
        return message

    def continued(self, number: int) -> dict[str, Any]:
        """A request that adds to one that was answered."""
        body, message = self.asked[number % len(self.asked)]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            for call in message.get("tool_calls") or []
        ]
        added = results or [{"role": "user", "content": f"more {number}"}]
        return body | {"messages": [*body["messages"], message, *added]}


async def wander(*, base_url: str, api_key: str, plan: Any, **columns: Any) -> float:
    """Has the conversations of a plan."""
    async with aiohttp.ClientSession() as session:
        speaker = Speaker(session, base_url, api_key)
        await speaker.ask({"messages": [{"role": "user", "content": "go"}], "tools": [ADD]})
        for move, number in plan:
            body = speaker.continued(number)
            match move:
                case "ask":
                    await speaker.ask(body)
                case "again":
                    await speaker.ask(speaker.asked[number % len(speaker.asked)][0])
                case "edit":
                    edited = copy.deepcopy(body)
                    place = number % len(edited["messages"])
                    edited["messages"][place]["content"] = f"other words {number}"
                    await speaker.ask(edited)
                case "tools":
                    await speaker.ask(body | {"tools": [[], [SUB], [ADD, SUB]][number % 3]})
                case "together":
                    await asyncio.gather(*(speaker.ask(body) for _ in range(3)))
                case "retry":
                    sent, answer = speaker.asked[-1]
                    again = await speaker.ask(sent, **{"x-stainless-retry-count": "1"})
                    assert again == answer
                case "drop":
                    # Its own words: whether it was answered must not matter to a later retry.
                    own = {"role": "user", "content": f"dropped {len(speaker.asked)}"}
                    dropped = body | {"messages": [*body["messages"], own]}
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(speaker.ask(dropped), number / 1000)
                case "forge":
                    forged = {"role": "assistant", "content": "I never said this"}
                    user = {"role": "user", "content": "did you?"}
                    await speaker.ask(body | {"messages": [*body["messages"], forged, user]})
                case "raise":
                    if number == 7:
                        raise ValueError("the agent is broken")
    return float(len(plan))


class CallingSampler(Sampler):
    """Its turns may have calls."""

    def __init__(self, seed: int = 7) -> None:
        self.policy = replace(policy_of(CHATML), skip_special_tokens=True)
        super().__init__(len(self.policy.tokenizer), seed)

    async def find_calls(
        self, token_ids: list[int], number: int, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, list[ToolCall]]:
        text = self.policy.tokenizer.decode(token_ids, skip_special_tokens=True)
        if sum(token_ids) % 3:
            return text, []
        name = tools[0]["function"]["name"]
        return text, [ToolCall(name, json.dumps({"a": 1}), f"t{number:04d}c000")]


async def no_rewards(prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
    """Scores by the environment alone."""
    for rollout in rollouts:
        if rollout.reward_failure is None:
            rollout.reward = sum(rollout.turn_rewards)


async def play_to_the_end(
    played_by: EnvironmentOfRun,
    sampler: CallingSampler,
    group: Group,
    *meanwhile: Awaitable[None],
    max_tokens: int = 2000,
) -> None:
    """Plays episodes and scores them, beside other work."""
    policy = sampler.policy
    episodes = Episodes(played_by, sampler.generate, policy, sampler.find_calls)
    sampling = Sampling(
        n=len(group.rollouts), max_tokens=max_tokens, stop_tokens=tuple(sorted(policy.ends))
    )
    async with asyncio.timeout(DEADLINE_S):
        playing = episodes.generate(group.prompt, group.rollouts, sampling, priority=0)
        await together([playing, *meanwhile])
        how: Any = {"decode": policy.decode, "rewards": no_rewards, "judges_last_turn": True}
        await score(group.prompt, group.rollouts, **how)


def play(plan: Any, seed: int, max_tokens: int, max_turns: int) -> tuple[Group, Sampler]:
    sampler, host = CallingSampler(seed), Here(Agent(wander))
    played_by = of_run(host, max_turns=max_turns, max_turn_tokens=40)
    rollouts = [Rollout() for _ in range(3)]
    group = made.group(0, *rollouts, prompt=[], text="go", columns={"plan": plan})
    asyncio.run(play_to_the_end(played_by, sampler, group, max_tokens=max_tokens))
    assert host.open_now == 0
    return group, sampler


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(moves, st.integers(0, 1000), st.sampled_from([300, 5000]), st.sampled_from([4, 100]))
def test_every_sampled_token_is_trained_in_one_place_or_counted_as_left_out(
    plan: Any, seed: int, max_tokens: int, max_turns: int
) -> None:
    group, sampler = play(plan, seed, max_tokens, max_turns)
    packer = Packer(64, GroupMean(), 1.0)
    found = trained_tokens(packed(packer, [group]))
    times = Counter(logprob for logprob, _ in found)
    assert max(times.values(), default=1) == 1
    for logprob, read in found:
        assert read == sampler.read[logprob]
    failed = [rollout for rollout in group.rollouts if rollout.failure]
    assert all("the agent is broken" in rollout.failure for rollout in failed), failed
    left_out = sampler.read.keys() - times.keys()
    scored = {logprob for rollout in group.scored for logprob in rollout.logprobs}
    if len(failed) < 2:
        assert packer.discarded_rollouts == len(failed) and packer.sequences == 3 - len(failed)
        assert not left_out & scored
    assert bool(left_out) == bool(failed)
    for rollout in group.rollouts:
        after_the_prompt = rollout.token_ids[rollout.turns[0].start if rollout.turns else 0 :]
        assert len(after_the_prompt) <= max_tokens and len(rollout.turn_ends) <= max_turns
