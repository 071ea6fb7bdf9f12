"""Prompts: their order, their tokens, and the rows that are refused by name.

Covers lrl/rollouts/policy_text.py.
"""

import json
import logging
import re
from typing import Any

import pytest

from lrl.rollouts.policy_text import VARIABLES, render_chat
from lrl.rollouts.prompts import Prompts
from lrl.types import Chat
from tests.tiny_policies import byte_tokenizer, with_special_tokens

CHAT = (
    "{% for m in messages %}<{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}>{{ "
    "m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [{"prompt": f"{a}+1?", "answer": a + 1, "level": "easy"} for a in range(7)]


FULL = (
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}{% if style is defined %}{{ style }}\n{% "
    "endif %}" + CHAT
)
"""A chat template with tools and a variable."""
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""One that leaves system messages, tools and calls of them out."""


def loaded(
    source: Any = ROWS, chat_template: str | None = None, most: int = 10_000, **settings: Any
) -> Prompts:
    prompts = Prompts(source, **settings)
    prompts.load(byte_tokenizer(chat_template=chat_template), most)
    return prompts


def rendered(rows: list[dict[str, Any]], chat_template: str | None, **settings: Any) -> str:
    prompts = loaded(rows, chat_template, shuffle=False, **settings)
    return byte_tokenizer().decode(prompts[0].token_ids)


def seen(prompts: Prompts, start: int, stop: int) -> list[int]:
    return [prompts[index].id for index in range(start, stop)]


def test_every_epoch_has_every_prompt_once_in_another_order() -> None:
    prompts = loaded([{"prompt": str(n)} for n in range(50)])
    first, second = seen(prompts, 0, 50), seen(prompts, 50, 100)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != sorted(first)


def test_a_resumed_run_sees_the_order_of_the_first_one() -> None:
    run = seen(loaded(), 0, 40)
    assert seen(loaded(), 17, 40) == run[17:]
    assert run[:14] == [3, 2, 1, 6, 0, 4, 5, 4, 5, 1, 6, 2, 0, 3], "the same on every machine"
    back_and_forth = loaded()
    assert [back_and_forth[index].id for index in reversed(range(40))] == run[::-1]
    assert seen(loaded(seed=1), 0, 40) != run


def test_file_order_is_that_of_an_iteration_and_repeats_without_shuffle() -> None:
    assert [prompt.id for prompt in loaded(limit=5)] == list(range(5))
    prompts = loaded(shuffle=False, limit=5)
    assert seen(prompts, 0, 11) == [*range(5), *range(5), 0]


def test_rewards_get_the_other_columns_untouched() -> None:
    row = {"prompt": "When?", "answer": "2024-01-01", "tests": [{"in": 1}, {"out": None}]}
    prompts = loaded([row])
    assert prompts[0].columns == {"answer": "2024-01-01", "tests": [{"in": 1}, {"out": None}]}
    assert prompts.columns == ["answer", "tests"]


def test_the_template_fills_in_columns_and_keeps_double_braces() -> None:
    prompts = loaded(template="({level}) {prompt}\nAnswer in \\boxed{{}}.", shuffle=False)
    assert prompts[0].text == "(easy) 0+1?\nAnswer in \\boxed{}."
    assert byte_tokenizer().decode(prompts[0].token_ids) == prompts[0].text


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SYSTEM = [said("system", "Add."), said("user", "2+2?")]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_variables_of_a_row_are_rendered_by_the_chat_template() -> None:
    with_nulls = {**TOOL, "strict": None}  # as Arrow gives it, where another row's tool has the key
    for tools in ([TOOL], json.dumps([TOOL]), [with_nulls]):
        text = rendered([{"prompt": "2+2?", "tools": tools}], FULL)
        assert text == f"tools {json.dumps([TOOL])}\n<user>2+2?\n<assistant>"
    for none in (None, [], "", "null"):
        assert rendered([{"prompt": "2+2?", "tools": none}], FULL) == "<user>2+2?\n<assistant>"
    by_hand = rendered(
        [{"prompt": "2+2?", "tools": "add(a, b)"}], FULL, template="{tools}: {prompt}"
    )
    assert by_hand == "<user>add(a, b): 2+2?\n<assistant>"
    row = {"prompt": "2+2?", VARIABLES: {"style": "brief", "other": None}}
    assert rendered([row], FULL) == "brief\n<user>2+2?\n<assistant>"


CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}


LEFT_OUT = "leaves out the tool_calls of the assistant message"
NO_SCHEMAS = "column 'tools': .*hammer.* is no list of JSON schemas.*Rename"
ONLY_CHAT = "only a chat template.*chat=false"


BARE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}>"


@pytest.mark.parametrize(
    ("form", "text", "prompt", "template", "chat"),
    [
        ("<|start|> $A <|end|>", "2+2=", "<|start|>2+2=", None, "auto"),
        ("<|start|> $A", "<|start|>2+2=", "<|start|>2+2=", None, "auto"),
        ("$A <|end|>", "<|start|>2+2=<|end|>", "<|start|>2+2=<|end|>", None, "auto"),
        ("<|start|> $A <|end|>", "2+2=", "<|start|>2+2=>", BARE, True),
        ("<|start|> $A <|end|>", "<|start|>2+2=>", "<|start|>2+2=>", BARE, False),
    ],
)
def test_a_plain_prompt_begins_once_and_does_not_end_and_a_chat_does_as_its_template(
    form: str, text: str, prompt: str, template: str | None, chat: Any
) -> None:
    tokenizer = with_special_tokens(form, template)
    prompts = Prompts([{"prompt": text}], chat=chat)
    prompts.load(tokenizer, 10)
    assert tokenizer.decode(prompts[0].token_ids) == prompt


def test_messages_keep_their_turns_and_the_template_fills_the_last_question() -> None:
    turns = [
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2+2?"},
    ]
    settings = {"system_prompt": "Add.", "template": "{prompt} Think."}
    prompts = loaded([{"prompt": turns}], chat_template=CHAT, **settings)
    text = byte_tokenizer().decode(prompts[0].token_ids)
    assert text == "<system>Add.\n<user>Hi\n<assistant>Hello\n<user>2+2? Think.\n<assistant>"
    assert prompts[0].text == "2+2? Think."
    assert turns[-1]["content"] == "2+2?", "the caller's rows are not changed"


TURNS = [{"role": "system", "content": 'Say "yes".'}, {"role": "user", "content": "Café?"}]


@pytest.mark.parametrize(
    "stored",
    [json.dumps(TURNS), f"\n{json.dumps(TURNS, indent=1, ensure_ascii=False)}", str(TURNS)],
)
def test_messages_stored_as_text_are_the_messages(stored: str) -> None:
    assert rendered([{"prompt": stored}], CHAT) == rendered([{"prompt": TURNS}], CHAT)
    prompts = loaded([{"prompt": stored}], chat_template=CHAT)
    assert prompts.typed(prompts[0]) == "Café?"
    with pytest.raises(ValueError, match="only a chat template renders it"):
        loaded([{"prompt": stored}])


@pytest.mark.parametrize(
    "text", ['[{"part": "role"}]', '[{"role": "user"} is no JSON: mend it.', "[" * 9_000 + "role"]
)
def test_other_text_is_what_a_user_says(text: str) -> None:
    assert rendered([{"prompt": text}], CHAT) == f"<user>{text}\n<assistant>"


SHOWS_ARGUMENTS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% set a = call.function.arguments %}"
    "ARGUMENTS{% endfor %}{{ m.content }}{% endfor %}"
)
ARGUMENTS_AS_TEXT = '{"city": "Z\u00fcrich", "days": 2}'


@pytest.mark.parametrize("stored", [json.loads(ARGUMENTS_AS_TEXT), ARGUMENTS_AS_TEXT])
@pytest.mark.parametrize(
    ("shows", "text"),
    [
        ("{{ '(' + a + ')' }}", f"({ARGUMENTS_AS_TEXT})"),
        ("{{ a }}", ARGUMENTS_AS_TEXT),
        ("{{ a | tojson }}", ARGUMENTS_AS_TEXT),
        ("{{ a if a is string else a | tojson }}", ARGUMENTS_AS_TEXT),
        ("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", "city=Z\u00fcrich;days=2;"),
    ],
)
def test_a_template_reads_the_arguments_of_a_call_as_a_dict_or_as_text(
    shows: str, text: str, stored: Any
) -> None:
    call = {"type": "function", "function": {"name": "go", "arguments": stored}}
    chat = Chat([{"role": "assistant", "content": "", "tool_calls": [call]}])
    tokenizer = byte_tokenizer(chat_template=SHOWS_ARGUMENTS.replace("ARGUMENTS", shows))
    assert render_chat(tokenizer, chat) == text
    assert call["function"]["arguments"] is stored


HAS_CHAT = {"chat_template": CHAT}
WITHOUT_SYSTEM = {"chat_template": NO_SYSTEM}
WITH_TOOLS = {"chat_template": FULL}
CANNOT_FILL = "Row 1 .*cannot be filled: {} is n".format
SYSTEM_LEFT_OUT = "leaves out the content of the system message"
ANSWERED = [said("user", "x"), said("assistant", "y")]


@pytest.mark.parametrize(
    ("settings", "row", "words"),
    [
        *(
            ({"template": template}, {}, "`template")
            for template in ("\\boxed{} {prompt}", "no field", "{prompt")
        ),
        ({"template": "{question}"}, {}, "names question, but .* columns prompt, answer"),
        ({"template": "{prompt} {answer.hint}"}, {}, "Row 0 of prompts: .*cannot be filled"),
        ({"template": "{meta[hint]}"}, {"meta": {"hint": None}}, CANNOT_FILL(r"meta\[hint\]")),
        ({"template": "{number}"}, {"number": float("nan")}, CANNOT_FILL("number")),
        ({}, {"prompt": "half a \ud83d"}, r"Row 1 .*cannot encode 'half a \\ud83d'"),
        ({"limit": 0}, {}, "prompts is empty"),
        ({"chat": True}, {}, "`chat=true` needs a chat template"),
        ({"system_prompt": "Add."}, {}, "`system_prompt` needs a chat template"),
        ({}, {"prompt": [said("user", "x")]}, "Row 1 .*only a chat template renders it"),
        ({}, {"prompt": None}, "Row 1 .*not None"),
        (HAS_CHAT, {"prompt": [said("system", "x")]}, "Row 1 .*has a user's message"),
        (HAS_CHAT, {"prompt": ANSWERED}, "not end with the assis"),
        (HAS_CHAT | {"system_prompt": "Add."}, {"prompt": SYSTEM}, "system message of its own"),
        (WITHOUT_SYSTEM, {"prompt": SYSTEM}, f"Row 1 .*{SYSTEM_LEFT_OUT}"),
        (WITHOUT_SYSTEM | {"system_prompt": "Add."}, {}, SYSTEM_LEFT_OUT),
        (WITHOUT_SYSTEM, {"tools": [TOOL]}, "Row 1 .*leaves out the tools"),
        (WITHOUT_SYSTEM, {"prompt": [*SYSTEM[1:], CALL, *SYSTEM[1:]]}, f"Row 1 .*{LEFT_OUT}"),
        ({}, {"tools": [TOOL]}, f"Row 1 .*column 'tools': {ONLY_CHAT}"),
        (WITH_TOOLS, {"tools": ["hammer"]}, f"Row 1 .*{NO_SCHEMAS}"),
        (WITH_TOOLS, {VARIABLES: {"thinking": False}}, "Row 1 .*no variable 'thinking'"),
        ({}, {VARIABLES: {"style": "x"}}, f"Row 1 .*'{VARIABLES}': {ONLY_CHAT}"),
        (WITH_TOOLS, {"images": ["photo"]}, "Row 1 .*column 'images': lrl trains on text alone"),
        ({"prompt_column": "question"}, {}, "`prompt_column` names question, .* prompt, answer"),
    ],
)
def test_a_row_that_cannot_be_a_prompt_is_refused_by_name(
    settings: dict[str, Any], row: dict[str, Any], words: str
) -> None:
    right = {"prompt": "1+1?", "answer": 2, "meta": {"hint": "h"}, "number": 1.0}
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        loaded([right, right | row], **settings)


def test_prompts_are_never_cut_but_refused_by_row() -> None:
    rows = [{"prompt": "x" * length} for length in range(1, 21)]
    with pytest.raises(
        ValueError, match=r"12 prompts .* the longest 20: rows 8, 9, .*, 17, .*Raise"
    ):
        loaded(rows, most=8)


def test_skipped_prompts_are_listed_and_the_others_keep_their_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [{"prompt": "x" * length} for length in (9, 1, 9, 2)]
    with caplog.at_level(logging.WARNING):
        prompts = loaded(rows, most=8, too_long="skip", shuffle=False)
    assert seen(prompts, 0, 4) == [1, 3, 1, 3] and "rows 0, 2" in caplog.text
    assert len(loaded(rows, most=9)) == 4, "a prompt of exactly the limit stays"
    with pytest.raises(ValueError, match="4 prompts"):
        loaded(rows, most=0, too_long="skip")


def test_short_names_know_their_columns_and_explicit_settings_win() -> None:
    prompts = Prompts("openai/gsm8k")
    assert (prompts.source, prompts.subset, prompts.split) == ("openai/gsm8k", "main", "train")
    assert (prompts.prompt_column, prompts.name) == ("question", "gsm8k")
    held_out = Prompts.coerce("gsm8k", split="test")
    assert (held_out.source, held_out.split) == ("openai/gsm8k", "test")
    assert held_out.prompt_column == "question"
    other = Prompts("math500", prompt_column="solution", name="proofs")
    assert (other.split, other.prompt_column, other.name) == ("test", "solution", "proofs")
    assert Prompts("x/y-v1.5.csv.gz").name == "y-v1.5"
