"""`lrl chat`: responses of an exported policy, from the command line and line by line."""

import io
import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from lrl.callbacks.summary import chat_command
from lrl.cli import chat
from lrl.cli.main import main
from lrl.quickstart.warmup import VOCABULARY, make_model, make_tokenizer
from lrl.rollouts import prompt_form
from lrl.rollouts.prompts import Prompts
from lrl.types import Prompt
from tests.tiny_policies import with_special_tokens

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


def test_a_prompt_on_the_command_line_is_answered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(folder), "1+7="]) == 0
    assert capsys.readouterr().out == "8\n"


def test_lines_are_answered_until_an_empty_one(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+7=\nhello\n2+6=\n\n3+5=\n"))
    assert chat.main([str(folder)]) == 0
    written = capsys.readouterr()
    assert written.out == "8\n8\n"
    assert "cannot read 'hello'" in written.err


def test_the_end_of_the_input_ends_the_chat(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+7="))
    assert chat.main([str(folder)]) == 0
    assert capsys.readouterr().out == "8\n"


def test_a_folder_without_a_policy_or_a_prompt_that_cannot_be_read_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", str(tmp_path / "nowhere"), "1+7="]) == 2
    written = capsys.readouterr()
    assert not written.out and written.err.count("\n") == 2 and "nowhere" in written.err
    assert chat.main([str(folder), "hello"]) == 2
    assert "cannot read 'hello'" in capsys.readouterr().err


def test_a_quantised_policy_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantised = shutil.copytree(folder, tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(config))
    assert chat.main([str(quantised), "1+7="]) == 2
    assert "quant_method fp8" in capsys.readouterr().err


BROKEN = {
    "a config that is no JSON": {"config.json": "{"},
    "no weights and no tokenizer": {"config.json": '{"model_type": "llama"}'},
    "weights that are none": {"config.json": '{"model_type": "llama"}', "model.safetensors": "x"},
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
def test_a_folder_that_is_not_a_whole_policy_is_an_error_of_two_lines(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "model.safetensors" in files:
        make_tokenizer().save_pretrained(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["chat", str(tmp_path), "1+7="]) == 2
    error = capsys.readouterr().err
    message = error[error.index("lrl: error: ") :]
    assert (
        message.startswith(f"lrl: error: {tmp_path} cannot be opened as a policy: ")
        and message.count("\n") == 2
    )


def test_options_may_stand_before_the_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat.main([str(folder), "--max_tokens", "4", "1+7="]) == 0
    assert capsys.readouterr().out == "8\n"


def test_only_the_folder_has_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        chat.main([])
    assert capsys.readouterr().err.endswith("the following arguments are required: folder\n")


def test_input_that_is_no_text_ends_the_chat_with_a_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8"))
    assert chat.main([str(folder)]) == 0
    assert "is no UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--temperature", "-1"], ["--temperature", "nan"], ["--max_tokens", "0"]]
)
def test_a_value_out_of_range_is_named(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        chat.main([str(folder), *words])
    assert " ".join(words) in capsys.readouterr().err


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


def thinking(folder: Path, target: Path) -> Path:
    """A policy that says `8` and then ends, and whose `8` is a special token."""
    shutil.copytree(folder, target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_special_tokens({"additional_special_tokens": ["8"]})
    tokenizer.save_pretrained(target)
    return target


def test_special_tokens_are_printed_and_the_end_of_a_response_is_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = thinking(folder, tmp_path / "policy")
    assert chat.main([str(policy), "1+7="]) == 0
    assert capsys.readouterr().out == "8\n"


@pytest.mark.parametrize("named", [[VOCABULARY.index("5")], None])
def test_a_response_ends_where_a_generator_would_end_it(
    named: list[int] | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shutil.copytree(folder, tmp_path / "policy")
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert chat.main([str(policy), "1+7="]) == 0
    assert capsys.readouterr().out == "8\n", "the tokenizer's end ends it, too"


def test_a_response_without_an_end_is_no_longer_than_the_policy_was_made_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[EOS, 1] = 0.0
        model.lm_head.weight[EIGHT, 1] = 1.0
    model.config.max_position_embeddings = 24
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    assert chat.main([str(tmp_path), "1+7="]) == 0
    prompt = len(make_tokenizer()("1+7=")["input_ids"])
    assert capsys.readouterr().out == "8" * (24 - prompt) + "\n"


@pytest.mark.parametrize("text", ["1+7=", "<|start|>1+7="])
def test_a_prompt_begins_once_and_does_not_end(text: str) -> None:
    tokenizer = with_special_tokens("<|start|> $A <|end|>")
    assert tokenizer.decode(chat.encode(tokenizer, text)["input_ids"][0]) == "<|start|>1+7="


def test_a_chat_template_is_used() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}>{% endfor %}"
    assert tokenizer.decode(chat.encode(tokenizer, "1+7=")["input_ids"][0]).endswith("1+7=>")


FORMS = {
    "a template": Prompts([{"question": "1+7"}], prompt_column="question", template="{question}="),
    "a system prompt": Prompts(
        [{"prompt": "1+7"}], system_prompt="2", template="{prompt}=", chat=True
    ),
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
    assert (
        chat.encode(tokenizer, typed, prompts.form)["input_ids"][0].tolist() == prompts[0].token_ids
    )


def test_the_system_prompt_and_the_template_of_the_run_are_used_and_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shutil.copytree(folder, tmp_path / "policy")
    prompt_form.save(FORMS["a template"].form, policy)
    assert chat.main([str(policy), "1+7"]) == 0
    written = capsys.readouterr()
    assert (
        written.out == "8\n"
        and written.err == "With the template of the run (--plain leaves them out).\n"
    )
    assert chat.main([str(policy), "--plain", "1+7="]) == 0
    assert capsys.readouterr().err == ""


def test_a_template_with_other_columns_asks_for_a_whole_prompt(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = shutil.copytree(folder, tmp_path / "policy")
    prompts = Prompts([{"prompt": "1+7", "level": "3"}], template="{level}{prompt}=")
    prompts.load(make_tokenizer(), 100)
    prompt_form.save(prompts.form, policy)
    assert chat.main([str(policy), "1+7"]) == 2
    message = capsys.readouterr().err
    assert "`template` names level" in message and "with --plain" in message
    command = shlex.split(chat_command(policy, prompts))
    assert command[1:] == ["chat", str(policy), "--plain", "31+7="], "the printed command works"


def test_the_command_of_the_summary_is_quoted_for_the_shell(folder: Path, tmp_path: Path) -> None:
    prompts = Prompts([{"prompt": "1+7 'or' $HOME="}], template="Q: {prompt}")
    prompts.read()
    prompts._prompts = [Prompt(id=0, token_ids=[1], text="Q: 1+7 'or' $HOME=")]
    command = shlex.split(chat_command(tmp_path / "my policy's", prompts))
    assert command[1:] == ["chat", str(tmp_path / "my policy's"), "1+7 'or' $HOME="]
