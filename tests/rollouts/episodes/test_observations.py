"""Observations in the policy's tokens: what it sampled stays, and the rest is the template's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lrl.environments import Environment, Message, Policy, ToolCall, Written
from lrl.environments.base import BEGINNING
from lrl.environments.play import Reply
from lrl.errors import EpisodeError
from lrl.rollouts.episodes.observations import Transcript, call_tokens
from lrl.rollouts.policy_text import PolicyText
from lrl.rollouts.prompts import Prompts
from lrl.types import Prompt
from tests.chat_templates import CHATML, FAMILIES, GLM, HARMONY, LLAMA, Family, merging_tokenizer
from tests.environments.agents import ADD

HIGHER = [{"role": "user", "content": "higher"}]


class Plays(Environment):
    def __init__(self, opens: bool = False, writes_prompt: bool = False) -> None:
        self.opens = opens
        self.writes_prompt = writes_prompt

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float: ...  # type: ignore[empty-body]


def policy_of(family: Family) -> PolicyText:
    tokenizer = merging_tokenizer(family.template)
    ends = frozenset(tokenizer.convert_tokens_to_ids(end) for end in family.ends)
    return PolicyText(tokenizer=tokenizer, ends=ends)


def opened(
    family: Family,
    environment: Environment = Plays(),  # noqa: B008
    row: Mapping[str, Any] = {},
) -> Transcript:
    policy = policy_of(family)
    prompts = Prompts([{"prompt": "Guess my number.", **row}])
    prompts.load(policy.tokenizer, 1000, environment)
    return Transcript(prompts[0], policy, environment)


def tool_results(*calls: ToolCall) -> list[Message]:
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": "5"}
        for call in calls
    ]


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param  # type: ignore[no-any-return]


TURNS = {
    "plain": "50?",
    "empty": "",
    "line": "\nassistant\n\n",
    "thinks": "<think>\nlow\n</think>\n\n50",
    "quotes the stand-in": "standin standinx",
    "call": '<tool_call>{"name": "add"}</tool_call>',
}


def test_what_follows_a_turn_is_what_the_template_puts_there_whatever_was_sampled(
    family: Family,
) -> None:
    transcript = opened(family)
    tokenizer = transcript.tokenizer
    end, *other_ends = (tokenizer.convert_tokens_to_ids(end) for end in family.ends)
    user = tokenizer.encode(family.user, add_special_tokens=False)
    # Letters of special tokens, each a token of its own, as a policy can write them.
    spelt = [token for letter in "".join(family.ends) * 2 for token in tokenizer.encode(letter)]
    assert tokenizer.decode(spelt) == "".join(family.ends) * 2 and not transcript.policy.ends & {
        *spelt
    }
    turns = [*(tokenizer.encode(text) for text in TURNS.values()), spelt]
    for turn in turns:
        written = Written(tokenizer.decode(turn), [*turn, end])
        assert transcript.ids(Reply(HIGHER), written) == user
        # A turn that ends at a token of the environment gets the end from it.
        written = Written(tokenizer.decode(turn), turn)
        assert transcript.ids(Reply(HIGHER), written) == [end, *user]
        for other in other_ends:  # it stays, and the template's own follows
            assert transcript.ids(Reply(HIGHER), Written("", [*turn, other])) == [end, *user]


CALL = ToolCall("add", "{}", "t0001c000")
RESULT = tool_results(CALL)
SYSTEM = [{"role": "system", "content": "Be quick."}, *HIGHER]
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
GLM_USER = "<|user|>\nhigher<|assistant|>\n"
GLM_TOOL = "<|observation|>\n5<|assistant|>\n"
HARMONY_ENDS = ("<|endoftext|>", "<|return|>", "<|call|>")
HARMONY_USER = "<|end|><|start|>user<|message|>higher<|end|><|start|>assistant"
HARMONY_TOOL = "<|call|><|start|>functions.add<|message|>5<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "ends", "sampled", "calls", "messages", "follows"),
    [
        (GLM, GLM_ENDS, "<|user|>", [], HIGHER, GLM_USER.removeprefix("<|user|>")),
        (GLM, GLM_ENDS, "<|observation|>", [], HIGHER, GLM_USER),
        (GLM, GLM_ENDS, "<|endoftext|>", [], HIGHER, GLM_USER),
        (GLM, GLM_ENDS, "", [], HIGHER, GLM_USER),
        (GLM, GLM_ENDS, "<|user|>", [CALL], RESULT, GLM_TOOL),
        (GLM, GLM_ENDS, "<|observation|>", [CALL], RESULT, GLM_TOOL[len("<|observation|>") :]),
        (GLM, GLM_ENDS, "<|user|>", [], SYSTEM, f"<|system|>\nBe quick.{GLM_USER}"),
        (CHATML.template, CHATML.ends, "<|endoftext|>", [], HIGHER, f"<|im_end|>{CHATML.user}"),
        (CHATML.template, CHATML.ends, "<|endoftext|>", [CALL], RESULT, f"<|im_end|>{CHATML.tool}"),
        (LLAMA.template, LLAMA.ends, "<|eom|>", [CALL], RESULT, f"<|eot|>{LLAMA.tool}"),
        (HARMONY, HARMONY_ENDS, "<|return|>", [], HIGHER, HARMONY_USER),
        (HARMONY, HARMONY_ENDS, "<|return|>", [CALL], RESULT, HARMONY_TOOL),
        (HARMONY, HARMONY_ENDS, "<|call|>", [CALL], RESULT, HARMONY_TOOL.removeprefix("<|call|>")),
    ],
)
def test_the_sampled_end_of_a_turn_stays_and_the_template_s_own_follows_unless_it_is_that(
    template: str,
    ends: tuple[str, ...],
    sampled: str,
    calls: list[ToolCall],
    messages: list[Message],
    follows: str,
) -> None:
    """A tool's result behind GLM's `<|user|>` was read as a user's words."""
    transcript = opened(Family(template, ends, "", ""))
    turn = Written("", transcript.tokenizer.encode("50" + sampled), calls)
    assert transcript.tokenizer.decode(transcript.ids(Reply(messages), turn)) == follows


def test_the_results_of_calls_follow_them_and_a_strange_name_of_a_tool_changes_nothing(
    family: Family,
) -> None:
    transcript = opened(family)
    tool = transcript.tokenizer.encode(family.tool, add_special_tokens=False)
    (end,) = transcript.tokenizer.convert_tokens_to_ids([family.ends[0]])
    for tool_name in ("add", "".join(family.ends), ""):
        call = ToolCall(tool_name, '{"a": 2', "t0001c000")
        written = Written("the call", [5, end], [call])
        assert transcript.ids(Reply(tool_results(call)), written) == tool
    user = transcript.tokenizer.encode(family.user, add_special_tokens=False)
    assert transcript.ids(Reply(HIGHER), Written("50", [5, end])) == user


def test_results_of_several_calls_are_one_message_where_the_template_takes_one_call(
    family: Family,
) -> None:
    transcript = opened(family)
    calls = [ToolCall("add", "{}", f"t0001c00{number}") for number in range(2)]
    reply = Reply([*tool_results(*calls), *HIGHER])
    text = transcript.tokenizer.decode(transcript.ids(reply, Written("", [5], calls)))
    assert text.count("5") == 2 and text.count("higher") == 1
    assert text.count("ipython") == (family is LLAMA)


def test_an_episode_that_opens_with_messages_is_rendered_as_one_chat(
    family: Family,
) -> None:
    transcript = opened(family, Plays(opens=True))
    prompt = transcript.prompt
    opening: Any = [{"role": "user", "content": "It is below 100."}]
    observation = transcript.ids(Reply(opening), None)
    assert prompt.chat is not None
    whole = transcript.tokenizer.apply_chat_template(
        [*prompt.chat.messages, *opening], add_generation_prompt=True, return_dict=False
    )
    assert prompt.token_ids + observation == whole
    user = transcript.tokenizer.encode(family.user, add_special_tokens=False)
    (end,) = transcript.tokenizer.convert_tokens_to_ids([family.ends[0]])
    assert transcript.ids(Reply(HIGHER), Written("50", [5, end])) == user


def test_a_call_is_what_the_template_writes_between_header_and_end() -> None:
    policy = policy_of(FAMILIES["mistral"])
    call = '[TOOL_CALLS][{"name": "add", "arguments": {"value": "standin"}}]'
    assert policy.tokenizer.decode(call_tokens(policy, [ADD])).endswith(call)


def test_the_variables_of_a_row_reach_the_chats_that_an_agent_writes() -> None:
    """They were checked against the template, and then left out."""
    template = "{% if brief %}Be brief. {% endif %}" + CHATML.template
    row = {"chat_template_kwargs": {"brief": True}}
    transcript = opened(
        CHATML._replace(template=template), Plays(opens=True, writes_prompt=True), row
    )
    for after in (None, BEGINNING):
        read = transcript.prompt.token_ids + transcript.ids(Reply(HIGHER, after=after), None)
        text = transcript.tokenizer.decode(read)
        assert text.startswith("Be brief. <|im_start|>user\nhigher")


def test_text_continues_the_turn_and_tokens_are_taken_as_they_are() -> None:
    transcript = opened(LLAMA)
    assert transcript.ids(Reply("5"), Written("", [7])) == transcript.tokenizer.encode("5")
    assert transcript.ids(Reply([5, 6]), Written("", [7])) == [5, 6]
    assert transcript.ids(Reply([]), Written("", [7])) == []
    assert transcript.ids(Reply(HIGHER, done=True), Written("", [7])) == []


WITHOUT_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
REFUSING = (
    "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}"
    "{{ messages[0].content }}"
)


def refusal(
    observation: Any,
    template: str = LLAMA.template,
    environment: Environment = Plays(),  # noqa: B008
    *,
    first: bool = False,
) -> str:
    transcript = opened(Family(template, LLAMA.ends, "", ""), environment)
    with pytest.raises(EpisodeError) as failed:
        transcript.ids(Reply(observation), None if first else Written("", [7]))
    text = str(failed.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_what_no_template_can_render_is_refused_with_its_remedy() -> None:
    assert "set `opens = True` in the environment's class" in refusal(HIGHER, first=True)
    text = refusal(HIGHER, WITHOUT_END)
    assert "puts no token that ends a response ('<|eom|>', '<|eot|>') behind" in text
    assert "refuses messages with the roles user, assistant, tool: no tools" in refusal(
        tool_results(ToolCall("add", "", "1")), REFUSING
    )
    left_out = LLAMA.template.replace("m.content | trim", "'' if m.role == 'tool' else m.content")
    assert "leaves out the content of the tool message, or puts it before the end" in refusal(
        tool_results(ToolCall("add", "", "1")), left_out
    )
    prompt_last = "{% for m in messages | reverse %}{{ m.content }}<|eot|>{% endfor %}"
    assert "renders the prompt otherwise with messages behind it" in refusal(
        HIGHER, prompt_last, Plays(opens=True), first=True
    )
    assert "the tokenizer cannot encode" in refusal("a\ud800")
    assert "the observation has the token 9999" in refusal([9999])
    plain = replace(opened(LLAMA), prompt=Prompt(id=0, token_ids=[5], text="go"))
    with pytest.raises(EpisodeError, match="chat messages, and the prompt is plain text"):
        plain.ids(Reply(HIGHER), Written("", [7]))
