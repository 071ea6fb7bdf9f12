"""The quickstart's tokenizer, and the warm-up that makes its policy."""

import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

from lrl.quickstart import warmup
from lrl.quickstart.task import problems, worked
from lrl.quickstart.warmup import WarmUp, make_model, make_policy, make_tokenizer, policy

TINY = WarmUp(loss=10.0, habit_steps=2, examples=4)


def test_the_tokenizer_has_every_token_of_the_policy_and_gives_every_character_back() -> None:
    tokenizer = make_tokenizer()
    text = "47+38=7+8=15,4+3+1=8>85"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id and len(ids) == len(text) + 1
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert make_model().config.vocab_size == len(tokenizer)
    with pytest.raises(Exception, match="WordLevel"):
        tokenizer("4x7=")


def test_the_warm_up_shows_training_problems_and_learns_only_their_answers() -> None:
    tokenizer, training = make_tokenizer(), {row["prompt"]: row["answer"] for row in problems()}
    input_ids, labels = warmup._batch(tokenizer, 64, 0.5, random.Random(0))
    direct = 0
    for ids, targets in zip(input_ids, labels, strict=True):
        prompt, response = str(tokenizer.decode(ids[1:7])), tokenizer.decode(targets[targets >= 0])
        short = f">{training[prompt]}<eos>"
        direct += response == short
        assert response in (short, f"{worked(prompt)}{short}")
    assert 16 <= direct <= 48


def test_a_warm_up_that_does_not_learn_is_an_error_and_leaves_no_policy(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="max_steps=3"):
        make_policy(tmp_path / "policy", 0, WarmUp(loss=0.0, max_steps=3, examples=4))
    assert not (tmp_path / "policy").exists()


def test_the_saved_policy_opens_as_any_hugging_face_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        folder = make_policy(tmp_path / "policy", 0, TINY)
    first, *_ = caplog.messages
    assert first.startswith("warming up the quickstart's policy, about a minute: 0 of ")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 1_054_080 and model.dtype == torch.float32
    ids = tokenizer("47+38=").input_ids
    assert ids == make_tokenizer()("47+38=").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "47+38="
    config = model.generation_config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)


def test_the_same_seed_makes_the_same_policy_also_behind_a_killed_warm_up_and_another_seed_another(
    tmp_path: Path,
) -> None:
    (tmp_path / "b.unfinished").mkdir()
    (tmp_path / "b.unfinished" / "stale").touch()
    before = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
    seeds = {"a": 0, "b": 0, "c": 1}
    folders = [make_policy(tmp_path / name, seed, TINY) for name, seed in seeds.items()]
    first, second, third = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second != third and not (tmp_path / "b" / "stale").exists()
    # The run's own state and threads are as before.
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.get_num_threads()) == before[1:]


def test_ranks_that_ask_together_get_one_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def train(*args: object) -> int:
        trained.append(args)
        return 0

    monkeypatch.setattr(warmup, "train", train)
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(lambda _: make_policy(tmp_path / "policy", 0, TINY), range(4)))
    assert len(trained) == 1


def test_policy_takes_the_seed_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(warmup, "make_policy", lambda *given: made.append(given))
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    policy()
    assert made == [(Path("runs/quickstart/policy-seed3"), 3)]
