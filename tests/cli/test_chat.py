"""`lrl chat`: responses of an exported policy, from the command line and line by line."""

import io
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from lrl.callbacks.summary import chat_command
from lrl.cli import chat
from lrl.quickstart.warmup import VOCABULARY, make_model, make_tokenizer
from lrl.rollouts import policy_text
from lrl.rollouts.prompts import Prompts
from tests.cli.conftest import Say

EIGHT, EOS = VOCABULARY.index("8"), VOCABULARY.index("<eos>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that says 8 after anything but 8, and then ends: its response to `1+7=` is `8`."""
    folder = tmp_path_factory.mktemp("policy")
    model = make_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.model.embed_tokens.weight[EIGHT, 1] = 10.0
        model.lm_head.weight[EIGHT, 0] = 1.0
        model.lm_head.weight[EOS, 1] = 1.0
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_a_prompt_on_the_command_line_is_answered(folder: Path, say: Say) -> None:
    assert say("chat", folder, "1+7=")[:2] == (0, "8\n")
    assert say("chat", folder, "--max_tokens", "4", "1+7=")[:2] == (0, "8\n")


def test_lines_are_answered_until_an_empty_one(
    folder: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"1+7=\nhello\n2+6=\n\n3+5=\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, error = say("chat", folder)
    assert (status, out) == (0, "8\n8\n") and "hello" in error


NO_WEIGHTS = {"config.json": '{"model_type": "llama"}'}
BROKEN = {
    "nothing": ({}, "holds no policy"),
    "no weights": (NO_WEIGHTS, "no file named model.safetensors"),
    "a quantised policy": (
        {"config.json": '{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}'},
        "quant_method fp8",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_is_not_a_whole_policy_is_an_error_of_two_lines(
    case: str, tmp_path: Path, say: Say
) -> None:
    files, told = BROKEN[case]
    make_tokenizer().save_pretrained(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    status, out, error = say("chat", tmp_path, "1+7=")
    assert (status, out) == (2, "") and told in error[error.index("lrl: error: ") :]


def test_sampling_settings_in_the_folder_do_not_count(folder: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    chosen = GenerationConfig(
        do_sample=True, temperature=0.3, top_p=0.2, repetition_penalty=1.5, eos_token_id=[EOS, 5]
    )
    chosen.save_pretrained(tmp_path)
    greedy = chat.open_policy(tmp_path, 0.0, 7)[0].generation_config
    drawn = chat.open_policy(tmp_path, 0.5, 7)[0].generation_config
    assert not greedy.do_sample and not greedy.repetition_penalty and greedy.max_new_tokens == 7
    assert (drawn.do_sample, drawn.temperature, drawn.top_p, drawn.top_k) == (True, 0.5, 1.0, 0)
    assert greedy.eos_token_id == [EOS, 5]


def test_a_response_without_an_end_is_no_longer_than_the_policy_was_made_for(
    folder: Path, tmp_path: Path, say: Say
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[EOS, 1] = 0.0
        model.lm_head.weight[EIGHT, 1] = 1.0
    model.config.max_position_embeddings = 24
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    prompt = len(make_tokenizer()("1+7=")["input_ids"])
    assert say("chat", tmp_path, "1+7=")[1] == "8" * (24 - prompt) + "\n"


SYSTEM = {"system_prompt": "2", "template": "{prompt}=", "chat": True}
ROLES = [{"role": "system", "content": "2"}, {"role": "user", "content": "1+7="}]
FORMS = {
    "a template": Prompts([{"question": "1+7"}], prompt_column="question", template="{question}="),
    "a system prompt": Prompts([{"prompt": "1+7"}], **SYSTEM),
    "a system message in each row": Prompts([{"prompt": ROLES}]),
    "no chat": Prompts([{"prompt": "1+7="}], chat=False),
    "nothing": Prompts([{"prompt": "1+7="}]),
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_typed_prompt_has_the_tokens_that_the_run_trained_on(kind: str) -> None:
    tokenizer, prompts = make_tokenizer(), FORMS[kind]
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}>{% endfor %}"
    prompts.load(tokenizer, 100)
    typed = prompts.typed(prompts[0])
    assert typed is not None
    found = chat.encode(tokenizer, typed, prompts.form)["input_ids"][0].tolist()
    assert found == prompts[0].token_ids


def test_the_system_prompt_and_the_template_of_the_run_are_used_and_said(
    folder: Path, tmp_path: Path, say: Say
) -> None:
    policy = shutil.copytree(folder, tmp_path / "policy")
    policy_text.save_form(FORMS["a template"].form, policy)
    told = "With the template of the run (--plain leaves them out).\n"
    assert say("chat", policy, "1+7") == (0, "8\n", told)
    assert say("chat", policy, "--plain", "1+7=") == (0, "8\n", "")


def test_a_template_with_other_columns_asks_for_a_whole_prompt(
    folder: Path, tmp_path: Path, say: Say
) -> None:
    policy = shutil.copytree(folder, tmp_path / "policy")
    prompts = Prompts([{"prompt": "1+7", "level": "3"}], template="{level}{prompt}=")
    prompts.load(make_tokenizer(), 100)
    policy_text.save_form(prompts.form, policy)
    status, _, message = say("chat", policy, "1+7")
    assert status == 2
    assert "`template` names level" in message and "--plain" in message
    command = shlex.split(chat_command(policy, prompts))
    assert command[1:] == ["chat", str(policy), "--plain", "31+7="], "the printed command works"
