"""The benchmarks of one GPU, as far as they go without one: command lines, shapes, memory plan,
load and report."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig

from benchmarks import random_policy
from benchmarks.gpu import gsm8k_recipe, one_gpu, trainer
from benchmarks.gpu.machine import Cpu
from benchmarks.gpu.memory_plan import GIB, plan_memory
from lrl.cli.recipes import recipes
from lrl.rollouts.prompts import Prompts
from lrl.training.model import open_network, open_tokenizer

H200, H100 = int(139.8 * GIB), int(79.6 * GIB)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [row["question"] for row in random_policy.made_up_rows(64)]


def result(**changes: Any) -> dict[str, Any]:
    step = one_gpu.StepRecord(
        step_s=4.0, wait_s=1.0, train_s=2.5, sync_s=0.5, pause_s=0.4,
        generated_tokens_per_s=16e3, trained_tokens_per_s=15e3,
    )  # fmt: skip
    found = {
        "date": "2026-01-02",
        "command": "python -m x",
        "versions": {"torch": "1"},
        "machine": "G",
        "size": "8b",
    }
    rest = {"transport": "ipc", "copy_s": 0.01, "trainer_peak_gib": 80.0, "device_peak_gib": 120.0}
    rest |= {
        "quantization": None,
        "mismatch_kl": 1e-4,
        "first_sync_gib": 60.0,
        "first_sync_peak_gib": 20.0,
    }
    return found | one_gpu.medians([step] * 4) | rest | changes


def test_without_a_gpu_the_benchmark_ends_with_an_error_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        one_gpu.main(
            ["--size", "8b", "--out", str(tmp_path / "a" / "b"), "--folder", str(tmp_path / "c")]
        )
    assert "sees no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--size", "70b"],
        ["--transport", "shared_memory"],
        ["--transport", "ipc", "--device", "cpu"],
        ["--steps", "3"],
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        one_gpu.main(words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(("size", "parameters"), [("0.5b", 494_005_120), ("8b", 8_030_261_248)])
def test_a_policy_is_as_large_as_its_name(size: str, parameters: int) -> None:
    assert random_policy.num_parameters(random_policy.llama(size)) == parameters


@pytest.mark.parametrize("size", random_policy.SHAPES)
def test_both_policies_fit_beside_vllm_on_an_h200(size: str) -> None:
    plan = plan_memory(random_policy.llama(size))
    assert plan.utilization(H200) * H200 >= plan.weights + plan.kv_cache
    assert plan.utilization(H200) * H200 + plan.trainer < H200


def test_the_operations_of_a_step_are_six_a_token_and_parameter_and_a_tied_embedding_counts_as_the_head() -> (
    None
):
    config = random_policy.llama("0.5b")
    everything = 6.0 * random_policy.num_parameters(config)
    assert trainer.flops(config, tokens=10, response_tokens=10) == 10 * everything
    head = 6.0 * config.vocab_size * config.hidden_size
    assert trainer.flops(config, tokens=10, response_tokens=0) == 10 * (everything - head)
    untied = random_policy.llama("8b")
    both = 2 * 6.0 * untied.vocab_size * untied.hidden_size
    assert trainer.flops(untied, 10, 0) == 10 * (6.0 * random_policy.num_parameters(untied) - both)


def test_a_policy_that_does_not_fit_is_refused_with_both_sides_sizes() -> None:
    with pytest.raises(
        ValueError,
        match=r"trainer takes about \d+ GiB, the generator \d+ GiB, and the GPU has 80 GiB",
    ):
        plan_memory(random_policy.llama("8b")).utilization(H100)


def test_the_memory_plan_includes_keys_and_values_of_all_responses() -> None:
    # 128 KiB a token, as Llama-3.1.
    assert plan_memory(random_policy.llama("8b")).kv_cache == 128 * 1024 * 128 * 1024


def test_every_token_a_random_policy_draws_can_be_decoded(texts: list[str]) -> None:
    tokenizer = random_policy.make_tokenizer(texts, 5000)
    assert len(tokenizer) == 5000
    assert all(tokenizer.decode([token]) for token in range(1, 5000))
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_made_up_prompts_are_as_long_as_real_ones_and_always_the_same(texts: list[str]) -> None:
    tokenizer = random_policy.make_tokenizer(texts, 5000)
    prompts = Prompts(list(random_policy.made_up_rows(64)), prompt_column="question")
    prompts.load(tokenizer, 512)
    assert 10 < max(len(prompt.token_ids) for prompt in prompts) < 128
    assert texts == [row["question"] for row in random_policy.made_up_rows(64)]


def test_a_policy_is_made_once_and_opens(tmp_path: Path, texts: list[str]) -> None:
    config = random_policy.llama("0.5b")
    small = {
        "vocab_size": 600,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    tiny = LlamaConfig(
        **config.to_dict() | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    )
    folder = tmp_path / "policy"
    random_policy.make_policy(tiny, texts, folder, "cpu")
    network = open_network(str(folder), "bfloat16", None, gradient_checkpointing=True)
    assert (
        network.dtype == torch.bfloat16
        and open_tokenizer(str(folder)).eos_token_id == network.config.eos_token_id
    )
    written = (folder / "model.safetensors").stat().st_mtime_ns
    random_policy.make_policy(tiny, texts, folder, "cpu")
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_reward_differs_between_responses() -> None:
    rewards = {random_policy.hashed("p", f"answer {i}", num_tokens=3) for i in range(100)}
    assert len(rewards) == 100 and all(0 <= reward < 1 for reward in rewards)


def test_the_first_steps_and_the_last_are_not_measured() -> None:
    times = [90.0, 80.0, 3.0, 1.0, 2.0, 0.1]
    steps = [
        one_gpu.StepRecord(**dict.fromkeys(one_gpu.StepRecord.__slots__, seconds))
        for seconds in times
    ]
    assert one_gpu.medians(steps)["step_s"] == 2.0


def test_the_table_has_a_cell_for_every_head_and_names_its_command() -> None:
    heads, rule, cells, _, below = one_gpu.table(result()).splitlines()
    assert heads.count("|") == rule.count("|") == cells.count("|")
    assert all(part in below for part in ("2026-01-02", "torch 1", "`python -m x`"))


def test_the_page_has_the_heads_of_the_table() -> None:
    page = Path(one_gpu.__file__).with_name("README.md").read_text()
    assert one_gpu.table(result()).splitlines()[0] in page


def test_the_recipe_is_run_as_it_is_written_but_for_its_files_and_devices(tmp_path: Path) -> None:
    for name in ("gsm8k", "math500"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.jsonl").write_text("{}\n" * 9)
    words = ["--data", str(tmp_path), "--folder", str(tmp_path), "--problems", "3"]
    over = gsm8k_recipe.config(gsm8k_recipe.make_parser().parse_args(words), tmp_path / "policy")
    recipe = yaml.safe_load(recipes()["gsm8k"].read_text())
    assert over["data"]["init_args"].keys() == {"prompts"} and over["model"][
        "init_args"
    ].keys() == {"model"}
    assert over["trainer"]["strategy"]["init_args"]["generator_devices"] == 0
    kinds = [each["class_path"] for each in recipe["trainer"]["callbacks"]]
    assert [each["class_path"] for each in over["trainer"]["callbacks"]] == kinds
    sources = [
        each["init_args"]["prompts"]["init_args"]["source"]
        for each in over["trainer"]["callbacks"][1:3]
    ]
    assert [Path(source).read_text() for source in sources] == ["{}\n" * 3] * 2


def test_on_a_processor_a_machine_measures_what_it_does_on_a_gpu() -> None:
    machine = Cpu()
    machine.begin()
    assert machine.peak > 0 and 0 < machine.used < machine.total and machine.copy_seconds(1000) > 0
    plan = plan_memory(random_policy.llama("tiny"))
    assert machine.server_memory(plan)["kv_cache_gib"] * GIB >= plan.kv_cache
