"""The loop of an episode, between a scripted pool and an environment on a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lrl.environments import Environment, Observation, Policy, ToolCall, Turns
from lrl.environments.base import Answer
from lrl.planning.clock import run
from lrl.rollouts.controller import Write, score
from lrl.rollouts.episodes.episode import ATTEMPTS, ATTEMPTS_OF_OTHERS, Episodes
from lrl.rollouts.episodes.observations import NO_PARSER
from lrl.rollouts.policy_text import PolicyText
from lrl.routing.dispatch import Home
from lrl.types import ENVIRONMENT, Chat, Prompt, Rollout, Sampling, Turn
from tests.chat_templates import CHATML, MISTRAL, merging_tokenizer
from tests.environments.agents import ADD
from tests.environments.here import Here, of_run
from tests.generators.model_fleet import Asked, ModelClient
from tests.rollouts.episodes.test_observations import HIGHER, opened

PROMPT = Prompt(id=0, token_ids=[7, 8], text="go")
STOP = 9


class Adds(Turns):
    """Replies the sum of a turn's tokens, in as many tokens as it has; ends at a sum of 99."""

    reads_tokens = True
    stop = (chr(STOP),)

    def __init__(
        self, opening: Observation = "", seconds: float = 0.0, deterministic: bool = True
    ) -> None:
        self.opening = opening
        self.seconds = seconds
        self.deterministic = deterministic

    def start(self, prompt: str, **columns: Any) -> Observation:
        self.total = 0
        return self.opening

    async def reply(self, turn: list[int]) -> Answer:
        await asyncio.sleep(self.seconds)
        self.total += sum(turn)
        if 66 in turn:
            raise TimeoutError
        if 77 in turn:
            raise ValueError("77")
        return [self.total] * turn.count(STOP), 99 in turn, self.total / 2


class WritesPrompt(Adds):
    writes_prompt = True


class Script(ModelClient):
    """Writes turns from a list for each rollout."""

    def __init__(self, *scripts: list[list[int]]) -> None:
        super().__init__()
        self.scripts = [list(script) for script in scripts]
        self.firsts = [script[0] for script in scripts]

    async def fill(self, asked: Asked) -> None:
        assert asked.sampling.stop_tokens == (2, STOP)
        for number, rollout in enumerate(asked.rollouts):
            script = self.scripts[number if len(asked.rollouts) > 1 else self._of(asked.prompt_ids)]
            for token in script.pop(0)[: asked.sampling.max_tokens]:
                await asyncio.sleep(1.0)
                asked.add(rollout, token, -token / 8)
            asked.end(rollout)

    def _of(self, prompt_ids: list[int]) -> int:
        """The script of a later turn: its prompt has that script's first turn."""
        written = str(prompt_ids)[1:-1]
        return max(range(len(self.firsts)), key=lambda n: str(self.firsts[n])[1:-1] in written)


@dataclass
class Letters:
    """A tokenizer of so many letters."""

    count: int = 1000

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def __len__(self) -> int:
        return self.count


class Numbers(PolicyText):
    """The text of tokens is their numbers."""

    def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        return str(token_ids)


NUMBERS: Any = Numbers(tokenizer=Letters(), ends=frozenset({2}))  # type: ignore[arg-type]


def play(
    host: Here,
    write: Write,
    rollouts: list[Rollout],
    max_tokens: int = 40,
    policy: PolicyText = NUMBERS,
    prompt: Prompt = PROMPT,
    **settings: Any,
) -> None:
    episodes = Episodes(of_run(host, **settings), write, policy)
    sampling = Sampling(n=len(rollouts), max_tokens=max_tokens, stop_tokens=(2,))
    try:
        run(episodes.generate(prompt, rollouts, sampling, priority=3))
    finally:
        assert host.open_now == 0
    for rollout in rollouts:
        assert rollout.finished and rollout.open_turn is None
        assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions)


def one(host: Here, script: list[list[int]], **changed: Any) -> Rollout:
    rollout = Rollout()
    play(host, Script(script).generate, [rollout], **changed)
    return rollout


def test_first_turns_are_one_request_and_each_later_one_follows_all_that_is_recorded() -> None:
    pool = Script([[1, STOP], [99, 2]], [[4, 2], [3, STOP], [99]])
    first, second = Rollout(), Rollout()
    homes: list[Any] = []
    """The generators that wrote before, of each request; a request is a generator here."""

    async def write(*words: Any, home: Home, **how: Any) -> None:
        homes.append(home.generator)
        home.generator = len(homes)  # type: ignore[assignment]
        await pool.generate(*words, **how)

    play(Here(Adds()), write, [first, second])
    asked = [(one.prompt_ids, len(one.rollouts), one.sampling.max_tokens) for one in pool.asked]
    assert first.token_ids == [1, STOP, 10, 99, 2] and second.token_ids == [4, 2, 3, STOP, 18, 99]
    assert asked[0] == ([7, 8], 2, 20)
    assert sorted(asked[1:]) == sorted(
        [([7, 8, 1, STOP, 10], 1, 20), ([7, 8, 4, 2], 1, 20), ([7, 8, 4, 2, 3, STOP, 18], 1, 20)]
    )
    assert homes == [None, 1, 1, 3], "each prefers the one that wrote its turn before"
    assert first.versions == [5, 5, ENVIRONMENT, 5, 5] and first.logprobs[2] == 0.0
    assert first.turn_rewards == [5.0, 55.5] and first.finish_reason == "stop"
    assert first.num_tokens == 4 and first.policy_versions == [5] * 4


def test_an_episode_does_not_wait_for_the_longest_first_turn_of_its_group() -> None:
    pool = Script([[1, 2], [99]], [[3] * 18 + [2], [99]])
    play(Here(Adds()), pool.generate, [Rollout(), Rollout()])
    assert pool.asked[1].prompt_ids == [7, 8, 1, 2]
    assert [asked.at for asked in pool.asked] == [0.0, 2.0, 21.0]


def test_a_prompt_that_the_environment_writes_takes_nothing_of_the_episodes_tokens() -> None:
    """Nor after a resume, which knows it by the tokens that are nobody's."""

    script, limits = [[4, 2], [5, 2], [6, 2]], {"max_tokens": 4, "max_prompt_tokens": 12}
    rollout = one(Here(WritesPrompt("0123456789")), script, **limits)
    assert rollout.turns == [Turn(10, 12), Turn(12, 14)] and rollout.finish_reason == "length"
    resumed = Rollout(**{name: getattr(rollout, name)[:12] for name in ("logprobs", "versions")})
    resumed.token_ids, resumed.turn_ends, resumed.turn_rewards = rollout.token_ids[:12], [12], [3.0]
    resumed.open_turn = Rollout()
    play(Here(WritesPrompt("0123456789")), Script(script[1:]).generate, [resumed], **limits)
    assert resumed == rollout
    too_long = one(Here(WritesPrompt("01234567890")), script, **limits)
    assert "the first request has 13 tokens" in too_long.failure
    assert "data.max_prompt_tokens is 12: raise it" in too_long.failure


class Reads(Turns):
    """Keeps the texts of turns, which it answers with `c` until the third."""

    stop = (chr(STOP),)

    def start(self, prompt: str, **columns: Any) -> Observation:
        self.texts: list[str] = []
        return ""

    async def reply(self, turn: str) -> Answer:
        self.texts.append(turn)
        return "c", len(self.texts) == 3, float(self.texts == ["8:4", "99:5", "99:6"])


def test_the_text_of_a_turn_and_the_text_that_is_judged_are_read_with_what_stands_before() -> None:
    """A tag that the prompt or an observation opens is part of them (`PolicyText`)."""

    class Context(PolicyText):
        def decode(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
            return f"{before[-1]}:{token_ids[0]}"

    text: Any = Context(tokenizer=Letters(), ends=frozenset({2}))  # type: ignore[arg-type]
    rollout = one(Here(Reads()), [[4, 2], [5, 2], [6, 2]], policy=text)
    assert rollout.turn_rewards == [0.0, 0.0, 1.0]
    run(score(PROMPT, [rollout], decode=text.decode, rewards=judge, judges_last_turn=True))
    assert (rollout.text, rollout.judged) == ("8:4", "99:6")


def test_what_the_policy_causes_is_cut_and_scored_by_its_name() -> None:
    turns = one(Here(Adds()), [[4, 2]] * 9, max_turns=3)
    assert turns.finish_reason == "turns" and len(turns.turns) == 3 and turns.cut
    assert turns.turn_rewards == [3.0, 6.0, 9.0], "the last turn gets its reward"
    turn = one(Here(Adds()), [[4, 2], [5] * 30], max_turn_tokens=10)
    assert turn.finish_reason == "length" and turn.token_ids == [4, 2, *[5] * 10]
    assert turn.turn_rewards == [3.0, 0.0], "the environment is not asked about half a turn"
    pool, whole = Script([[STOP] * 8, [3] * 20]), Rollout()
    play(Here(Adds()), pool.generate, [whole], max_tokens=20)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 20
    assert pool.asked[-1].sampling.max_tokens == 4, (
        "the limit of an episode counts the environment's tokens"
    )
    full = one(Here(Adds()), [[STOP] * 10], max_tokens=20)
    assert full.finish_reason == "length" and full.token_ids == [STOP] * 10
    assert not any(rollout.failure for rollout in (turns, turn, whole, full))


async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        if rollout.reward_failure is None:
            rollout.reward = 1.0


def test_what_the_environment_causes_fails_by_its_name_and_gets_no_reward() -> None:
    pool = Script([[66, 2]], [[77, 2]], [[99, 2]])
    rollouts = [Rollout(), Rollout(), Rollout()]
    play(Here(Adds()), pool.generate, rollouts)
    slow = one(Here(Adds(seconds=30.0)), [[4, 2]] * 9, episode_timeout_s=70.0)
    unreadable = one(Here(Adds()), [[990, 2, STOP]])
    rollouts += [slow, unreadable]
    run(score(PROMPT, rollouts, decode=NUMBERS.decode, rewards=judge))
    kinds = [(one.reward_failure or "").partition(":")[0] for one in rollouts]
    wrong = "environment_error"
    assert kinds == ["tool_timeout", wrong, "", "episode_timeout", wrong]
    assert [one.reward for one in rollouts] == [None, None, 1.0, None, None]
    assert {one.finish_reason for one in rollouts if one.failure} == {"failed"}
    assert len(slow.turns) == 2 and "the token 1001" in unreadable.failure


class PaysAtOnce(Environment):
    stop = (chr(STOP),)

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        await policy.turn("go", reward=1.0)
        return 0.5


def test_a_reward_that_no_turn_has_earned_fails_the_episode_and_is_not_dropped() -> None:
    rollout = one(Here(PaysAtOnce()), [[4, 2]])
    assert rollout.failure.startswith("environment_error: the episode has the reward 1.0 before")


class SendsTools(Environment):
    opens = writes_prompt = True

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        await policy.turn(HIGHER, tools=[ADD])
        return 0.5


def test_an_agent_that_sends_tools_to_a_run_without_a_parser_fails_its_episode() -> None:
    transcript = opened(CHATML, SendsTools())
    of_chats = {"policy": transcript.policy, "prompt": transcript.prompt}
    rollout = one(Here(SendsTools()), [[]], **of_chats)
    assert rollout.failure == f"environment_error: {NO_PARSER}" and not rollout.turns


def unwritten(script: list[list[int]], rollout: Rollout) -> list[list[int]]:
    """What a rollout does not have yet."""
    open_turn, left = rollout.open_turn, [list(turn) for turn in script[len(rollout.turn_ends) :]]
    assert open_turn is not None and not rollout.finished
    if open_turn.finished:
        return left[1:]
    return [left[0][len(open_turn.token_ids) :], *left[1:]]


def recorded() -> Rollout:
    """Two turns with their replies, and half of a third."""
    return Rollout(
        token_ids=[4, 2, 1, STOP, 16],
        logprobs=[-0.5, -0.25, -0.125, -1.125, 0.0],
        versions=[3, 3, 4, 4, ENVIRONMENT],
        turn_ends=[2, 4],
        turn_rewards=[3.0, 8.0],
        open_turn=Rollout(token_ids=[5], logprobs=[-0.625], versions=[4]),
    )


class Asks(Turns):
    """Replies to each call with a message, and to text with the end."""

    deterministic = True
    tools = (ADD,)

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        turn = await policy.turn()
        while turn.calls:
            await asyncio.sleep(2.5)
            result = {"role": "tool", "tool_call_id": turn.calls[0].id, "content": turn.text}
            turn = await policy.turn([result, {"role": "user", "content": "on"}])
        return 1.0

    def reply(self, turn: str) -> Any: ...


@pytest.mark.parametrize("seconds", [1, 4, 6, 9])
def test_an_episode_of_messages_and_calls_goes_on_from_its_recorded_turns(seconds: int) -> None:
    tokenizer = merging_tokenizer(MISTRAL.template)
    end = tokenizer.convert_tokens_to_ids("</s>")
    chat = Chat([{"role": "user", "content": "go"}])
    prompt = replace(PROMPT, token_ids=tokenizer.encode("[INST] go[/INST]"), chat=chat)
    policy = PolicyText(tokenizer=tokenizer, ends=frozenset({end}))

    async def find_calls(token_ids: list[int], turn: int, tools: Any) -> tuple[str, list[ToolCall]]:
        await asyncio.sleep(0.5)
        return "", [ToolCall("add", "{}", f"t{turn:04d}c000")] * (100 in token_ids)

    def played(rollout: Rollout, script: list[list[int]], seconds: float = 1e6) -> Here:
        host = Here(Asks())
        episodes = Episodes(of_run(host), Script(script).generate, policy, find_calls)
        sampling = Sampling(n=1, max_tokens=400, stop_tokens=(2, STOP))
        playing = episodes.generate(prompt, [rollout], sampling, priority=3)
        with contextlib.suppress(TimeoutError):
            run(asyncio.wait_for(playing, seconds))
        return host

    script = [[100, 101], [100, end], [102, end]]
    whole, rollout = Rollout(), Rollout()
    played(whole, script)
    assert whole.finish_reason == "stop"
    assert list(map(len, script)) == [turn.stop - turn.start for turn in whole.turns]
    text = tokenizer.decode(whole.token_ids)
    assert '"id": "t0000c000"}[/TOOL_RESULTS][INST] on[/INST]' in text, "rendered by the template"
    assert whole.token_ids[2] == end, "a turn that ends otherwise gets its end"
    played(rollout, script, seconds)
    written = len(rollout.turn_ends)
    host = played(rollout, unwritten(script, rollout))
    assert rollout == whole and host.counts["replayed"] == bool(written)


MORE = {"logprobs": [0.0] * 6, "versions": [3, 3, ENVIRONMENT, 4, 4, ENVIRONMENT]}


@pytest.mark.parametrize(
    ("deterministic", "changed"),
    [
        (True, {"token_ids": [4, 2, 1, STOP, 17]}),
        (True, MORE | {"token_ids": [4, 2, 50, 1, STOP, 16], "turn_ends": [2, 5]}),
        (True, {"turn_rewards": [3.0, 8.5]}),
        (False, {}),
    ],
)
def test_a_reply_that_is_not_or_may_not_be_the_recorded_one_begins_the_episode_anew(
    deterministic: bool, changed: dict[str, Any]
) -> None:
    host, rollout = Here(Adds(deterministic=deterministic)), replace(recorded(), **changed)
    play(host, Script([[99, 2]]).generate, [rollout])
    assert rollout.token_ids == [99, 2] and rollout.turn_ends == [2]
    assert host.counts["restarted"] == 1 and host.counts["replayed"] == 0


def test_a_recorded_turn_continues_and_the_first_one_needs_no_replay() -> None:
    same, host = recorded(), Here(Adds(deterministic=False))
    play(Here(Adds()), Script([[99]]).generate, [same])
    assert same.token_ids == [4, 2, 1, STOP, 16, 5, 99] and same.versions[5:] == [4, 5]
    unanswered = Rollout(open_turn=Rollout(token_ids=[4], logprobs=[-0.5], versions=[3]))
    play(host, Script([[99]]).generate, [unanswered])
    assert unanswered.token_ids == [4, 99] and not host.counts["restarted"]


@pytest.mark.parametrize("call", [1, 3])
def test_a_lost_environment_costs_a_deterministic_episode_nothing(call: int) -> None:
    script = [[4, 2], [1, STOP], [99]]
    whole, host = one(Here(Adds()), script), Here(Adds(), lost={1: call, 2: call})
    assert one(host, script) == whole and host.opened == 3


@pytest.mark.parametrize(("by_other", "attempts"), [(False, ATTEMPTS), (True, ATTEMPTS_OF_OTHERS)])
def test_an_environment_that_is_lost_again_and_again_is_given_up_sooner_if_by_itself(
    by_other: bool, attempts: int
) -> None:
    script, others = [[4, 2], [1, STOP]] * attempts + [[99]], " by other episodes" * by_other
    call = 2
    lost = dict.fromkeys(range(1, attempts), call)
    rollout = one(Here(Adds(deterministic=False), lost=lost, by_other=by_other), script)
    assert not rollout.failure
    lost = dict.fromkeys(range(1, attempts + 1), call)
    rollout = one(Here(Adds(deterministic=False), lost=lost, by_other=by_other), script)
    assert rollout.failure.startswith(f"environment_lost: {attempts} times{others}, at last: its")


def test_an_error_of_the_pool_is_the_errors_of_all_and_ends_their_episodes() -> None:
    async def fails(prompt: Prompt, rollouts: Sequence[Rollout], *rest: Any, **how: Any) -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        play(Here(Adds()), fails, [Rollout(), Rollout()])
