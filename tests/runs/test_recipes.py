"""The shipped recipes: they build, settings change what they say, and they run with tiny policies
for big ones, whose chats have the same form.

The data sets are folders that lie where the hub's names point, so the recipes are run as they are
written; `RECIPES` has the settings that are others here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu.what_fits import CARDS, POLICIES, generator_bytes
from lrl.callbacks import Evaluation
from lrl.callbacks.base import find_all
from lrl.cli.lightning import LrlCLI
from lrl.cli.main import RECIPES as FOLDER
from lrl.cli.main import recipes
from lrl.planning.roofline import Held, parse_cluster, training_memory, usable
from lrl.viewer.rollout_file import RolloutIndex
from tests.chat_templates import FAMILIES
from tests.lent_server import LentServer
from tests.runs import recipe_run
from tests.strategies.forked_ranks import run_alone, run_ranks
from tests.tiny_policies import byte_tokenizer, with_chats

PROBLEMS = 8
"""Of each evaluation."""
TRAINED = 6
"""Problems of each data set that are trained; MATH has one more, which is too long."""
ON_CPU = ["--trainer.accelerator", "cpu"]
FEW = (
    *ON_CPU,
    *("--data.groups_per_step", "2", "--data.rollouts_per_group", "2"),
    *("--data.reward_workers", "1", "--data.max_response_tokens", "24"),
)
"""Fewer of everything. Three steps train all problems of GSM8K or MATH once."""
SMALL = (
    *FEW,
    *["--trainer.max_steps", "3", "--data.max_response_tokens", "8"],
    *["--trainer.strategy.server.max_num_seqs", "16", "--trainer.strategy.server.dtype", "float32"],
)


def gsm8k_rows(count: int) -> list[dict[str, Any]]:
    """Rows in the form of GSM8K."""
    return [
        {
            "question": f"Ann has {n} pears and picks 9 more. How many has she then?",
            "answer": f"She has {n}+9=<<{n}+9={n + 9}>>{n + 9} pears.\n#### {n + 9}",
        }
        for n in range(count)
    ]


def math_rows(count: int) -> list[dict[str, Any]]:
    """Rows in the form of MATH."""
    return [
        {
            "problem": f"What is $x$ if $x - 9 = {n}$?",
            "solution": f"It is $\\boxed{{{n + 9}}}$.",
            "answer": str(n + 9),
            "subject": "Algebra",
            "level": 1,
        }
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the hub's names are folders, each with a few short rows."""
    folder = tmp_path_factory.mktemp("hub")
    gsm8k, math = gsm8k_rows(PROBLEMS + TRAINED), math_rows(PROBLEMS + TRAINED + 1)
    columns = ("problem", "solution")
    trained = gsm8k[PROBLEMS:]
    write_split(folder / "openai/gsm8k", "main", "train", with_long(trained, "question", 900))
    write_split(folder / "openai/gsm8k", "main", "test", gsm8k[:PROBLEMS])
    write_split(folder / "HuggingFaceH4/MATH-500", "default", "test", math[:PROBLEMS])
    rows = [{name: row[name] for name in columns} for row in math[PROBLEMS:]]
    rows = with_long(rows, "problem", 400, 3000)
    write_split(folder / "DigitalLearningGmbH/MATH-lighteval", "default", "train", rows)
    return folder


def with_long(rows: list[dict[str, Any]], column: str, *lengths: int) -> list[dict[str, Any]]:
    """The rows, of which the last ones begin with a story, and then have so many characters."""
    found = list(rows)
    for place, length in enumerate(lengths, len(rows) - len(lengths)):
        text = rows[place][column]
        story = ("Once there was a number. " * length)[: length - len(text)]
        found[place] = rows[place] | {column: story + text}
    return found


def write_split(folder: Path, subset: str, split: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / f"{split}.jsonl", rows)
    files = [{"split": path.stem, "path": path.name} for path in sorted(folder.glob("*.jsonl"))]
    card = yaml.safe_dump({"configs": [{"config_name": subset, "data_files": files}]})
    (folder / "README.md").write_text(f"---\n{card}---\n")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", [*sorted(recipes()), str(recipes()["quickstart"])])
def test_every_recipe_builds_by_its_name_and_one_by_its_path(build: Any, name: str) -> None:
    trainer, _, _ = build("--config", name)
    assert trainer.max_steps > 0 and find_all(trainer, Evaluation)


def test_every_recipe_has_its_expected_result_beside_it() -> None:
    for name, file in recipes().items():
        assert f"## {name}\n" in file.with_name("README.md").read_text(), name


def test_a_module_that_saves_its_settings_gets_those_of_lightnings_command_line(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = LrlCLI._dump_config, []

    def both(cli: LrlCLI) -> None:
        own(cli)
        found = cli.__dict__.pop("config_dump")
        LightningCLI._dump_config(cli)
        seen.append(found == cli.config_dump)

    monkeypatch.setattr(LrlCLI, "_dump_config", both)
    build("--config", "gsm8k", "--model.objective", "AIPO")
    assert seen and all(seen)


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", gsm8k_rows(3)), ("math", math_rows(3))])
def test_a_file_takes_the_place_of_a_recipes_data_set(
    build: Any, name: str, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", rows)
    _, _, data = build("--config", name, "--data.prompts.source", str(file))
    data.prompts.load(byte_tokenizer(), 4096)
    assert len(data.prompts) == 3 and data.prompts.name == name
    question = rows[0].get("question") or rows[0]["problem"]
    assert next(iter(data.prompts)).text.startswith(question)
    assert next(iter(data.prompts)).text.endswith("put your final answer in \\boxed{}.")


README = FOLDER / "README.md"
ON_GPUS = dict(
    re.findall(r"^\| (\d of \d+ GB) \|.*\| `lrl fit (.*)` \|$", README.read_text(), re.M)
)
"""The words after `lrl fit` by the GPUs for which the page names them."""


@pytest.mark.parametrize("gpus", ON_GPUS)
def test_a_run_fits_the_gpus_for_which_the_page_names_it(gpus: str, build: Any) -> None:
    """Beside it CUDA and NCCL have 4 GB, and the generator has room for as many responses as it may
    write, each half as long as it may be."""
    trainer, policy, data = build(*ON_GPUS[gpus].split())
    count, gigabytes = gpus.split(" of ")
    card = parse_cluster(f"1x{CARDS[gigabytes]}").device
    strategy = trainer.strategy
    server = strategy.server_settings
    shape = POLICIES[policy.model.removeprefix("Qwen/").removesuffix("-Instruct")]
    held = Held(
        dtype=policy.dtype_name,
        recompute_every=int(policy.gradient_checkpointing),
        lora_rank=policy.lora.rank if policy.lora else 0,
    )
    taken = training_memory(shape, strategy.shards, 1, held).bytes_for(data.micro_batch_tokens)
    generator = server.gpu_memory_utilization * card.memory
    assert taken + (generator if strategy.shares_device else 0) < usable(card)
    assert generator_bytes(shape, server.max_num_seqs, data.max_model_tokens // 2) < generator
    assert server.dtype == "bfloat16", "what is left of the recipe"
    devices = len(strategy.parallel_devices) + len(strategy.generator_devices)
    assert devices == int(count)


@dataclass(frozen=True)
class OnCpu:
    """How a recipe is run here: what of its settings is another one, besides `FEW`."""

    family: str
    """The form of its model's chat template."""
    evaluations: set[str]
    longest: int
    """Tokens of a prompt that are fewer than those of the longest one."""
    ranks: int = 1
    settings: str = ""
    resumes: bool = False


OFTEN = "--trainer.callbacks.every_n_train_steps 2"
"""The last callback of these recipes is the one that saves."""
MATH = {"math500"}
OF_GPUS = f"{OFTEN} --trainer.strategy.server.dtype float32"
"""Not every CPU computes in bfloat16 (`lrl doctor` says)."""
LONG = "--data.max_prompt_tokens 1024"
"""The longest problem of GSM8K here has 900 tokens, one for each byte."""
TWO_RANKS = f"{OF_GPUS} --trainer.strategy.generator_devices 1 --trainer.devices 3"
RECIPES = {
    "gsm8k": OnCpu("chatml", {"gsm8k", "math500"}, 900, settings=OF_GPUS),
    "one_gpu_24gb": OnCpu("chatml", {"gsm8k"}, 450, settings=f"{OF_GPUS} {LONG}", resumes=True),
    "qwen3": OnCpu("thinking", MATH, 450, settings=OF_GPUS),
    "word_problems": OnCpu("chatml", {"held_out"}, 90, settings="--data.max_response_tokens 32"),
    "cluster/llama_8b_one_node": OnCpu("llama", MATH, 450, ranks=2, settings=TWO_RANKS),
}
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL = {
    "chatml": CHATML,
    "thinking": CHATML,
    "llama": ("<|bot|>", "<|head|>", "<|eot|>", "<|/head|>"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_resumes_evaluates_and_exports(
    name: str, hub: Path, lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    how, file = RECIPES[name], FOLDER / f"{name}.yaml"
    chats = SPECIAL[how.family], FAMILIES[how.family].template
    policy = with_chats(policy_folder, tmp_path / "policy", *chats)
    words = ["fit", "--config", str(file), "--model.model", str(policy), *FEW]
    words += how.settings.split()
    words += ["--trainer.logger.save_dir", str(tmp_path)]
    for more in (["2"], ["3", "--ckpt_path", "last"]) if how.resumes else (["3"],):
        said = [*words, "--trainer.max_steps", *more]
        arguments = (tmp_path, hub, lent_server.url, lent_server.token, said)
        if how.ranks > 1:
            run_ranks(recipe_run.main, how.ranks, *arguments)
        else:
            run_alone(recipe_run.main, *arguments)
    folders = sorted((tmp_path / file.stem).glob("version_*"))
    assert len(folders) == 1 + how.resumes

    board = EventAccumulator(str(folders[-1])).Reload()
    tags = set(board.Tags()["scalars"])
    assert {"policy/loss", "reward/mean", "time/step", "fleet/alive"} <= tags
    assert {tag.split("/")[1] for tag in tags if tag.startswith("eval/")} == how.evaluations
    of_kinds = any(re.match(r"eval/\w+/(level|kind)/", tag) for tag in tags)
    assert of_kinds == (how.evaluations != {"gsm8k"}), "its problems are of one kind"

    groups = [group for folder in folders for group in groups_of(folder)]
    assert [group["step"] for group in groups] == [0, 0, 1, 1, 2, 2]
    assert len({group["prompt_id"] for group in groups}) == len(groups), "each problem once"
    for group in groups:
        prompt = group["prompt"]
        assert prompt["texts"][0] in SPECIAL[how.family], "it is a chat"
        assert all(0 <= one["lag"] <= 1 for one in group["shown"])
    assert max(len(group["prompt"]["token_ids"]) for group in groups) > how.longest
    ends = {one["finish_reason"] for group in groups for one in group["shown"]}
    assert "length" in ends, "some responses are cut"

    AutoModelForCausalLM.from_pretrained(folders[-1] / "policy")
    assert AutoTokenizer.from_pretrained(folders[-1] / "policy").chat_template


def groups_of(run: Path) -> list[dict[str, Any]]:
    """The groups of a run's file of rollouts; under `shown` what the list shows of responses."""
    index = RolloutIndex(run / "rollouts.jsonl")
    index.refresh()
    return [
        (index.read(one.shown["step"], one.shown["index"]) or {})
        | {"shown": one.shown["responses"]}
        for one in index.groups
    ]


def test_validate_prints_the_report_and_writes_every_response(
    hub: Path, lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    prompts = {"class_path": "lrl.Prompts", "init_args": {"source": "math500", "split": "test"}}
    sampled = {"prompts": prompts, "samples": 4, "temperature": 1.0}
    callbacks = [
        {"class_path": "lrl.callbacks.WeightSync"},
        {"class_path": "lrl.callbacks.Evaluation", "init_args": sampled},
    ]
    four_responses = tmp_path / "four_responses.yaml"
    four_responses.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}}))
    words = ["validate", "--config", recipes()["math"], "--config", four_responses, *SMALL]
    words += ["--model.model", policy_folder, "--trainer.logger.save_dir", tmp_path]
    where = (lent_server.url, lent_server.token)
    printed = run_alone(recipe_run.main, tmp_path, hub, *where, [*map(str, words)])
    assert f"problems: {PROBLEMS}" in printed and "each problem: 4, sampled" in printed
    assert "on math500 " in printed and "pass@4" in printed

    file = tmp_path / "math/version_0/evaluation/math500-step000000.jsonl"
    assert str(file) in printed
    responses = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(answer["id"] for answer in responses) == sorted(list(range(PROBLEMS)) * 4)
    assert all(
        answer["reward"] in (0, 1) and answer["response"] is not None for answer in responses
    )
