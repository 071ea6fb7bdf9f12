"""One rule says where a response ends, for generators, rewards, `lrl chat` and the checks, and it
is vLLM's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lrl
from lrl.callbacks import Evaluation
from lrl.cli import chat
from lrl.generators.settings import ServerSettings
from lrl.rewards import ExactMatch
from lrl.training.model import open_tokenizer
from tests.tiny_policies import byte_tokenizer, tiny_llama

END = byte_tokenizer().eos_token_id
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool, set[int]]] = {
    "all agree": ({"eos_token_id": END}, {"eos_token_id": END}, True, {END}),
    "several ends": ({"eos_token_id": END}, {"eos_token_id": [7, 9]}, True, {END, 7, 9}),
    "none of generation": ({"eos_token_id": [END, 11]}, None, True, {END, 11}),
    "generation without ends": ({"eos_token_id": 11}, {"temperature": 0.5}, True, {END}),
    "generation over the config": ({"eos_token_id": 11}, {"eos_token_id": 7}, True, {END, 7}),
    "no end of the tokenizer": ({"eos_token_id": 11}, {"eos_token_id": [7]}, False, {7}),
    "no end of the tokenizer nor of generation": ({"eos_token_id": 11}, None, False, {11}),
    "no end at all": ({"eos_token_id": None}, None, False, set()),
}
"""config.json, generation_config.json, whether the tokenizer has an end, and the stop tokens."""


@pytest.fixture(params=FOLDERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    config, generation, tokenizer_ends, _ = FOLDERS[kind]
    folder = tiny_llama(tmp_path / "policy")
    of_model = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(of_model | config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if not tokenizer_ends:
        tokenizer = byte_tokenizer()
        tokenizer.eos_token = None
        tokenizer.save_pretrained(folder)
    return folder


def test_every_part_of_a_run_knows_the_same_ends(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = FOLDERS[kind][-1]
    policy, data = (
        lrl.PolicyModule(str(folder)),
        lrl.RolloutDataModule([{"prompt": "1"}], ExactMatch()),
    )
    running: Any = type(
        "Running", (), {"lightning_module": policy, "datamodule": data, "is_global_zero": False}
    )()
    data.trainer = running
    assert policy.stop_tokens == wanted
    assert policy.ends_of_text - wanted == {policy.tokenizer.pad_token_id}
    evaluation = Evaluation([{"prompt": "1"}], rewards=ExactMatch())
    monkeypatch.setattr(
        data.reward_pool, "like", lambda *args, **kwargs: type("Pool", (), {"start": print})()
    )
    evaluation.setup(running, policy, "fit")
    for sampling in (data.requests, evaluation.sampling):
        asked = sampling.as_vllm(n=1, written=0)
        assert set(asked["stop_token_ids"]) == wanted and asked["ignore_eos"]
    ends = chat.open_policy(folder, 0.0, 4)[0].generation_config.eos_token_id
    assert set(ends or ()) == wanted


def test_the_rule_is_that_by_which_vllm_serves_the_folder(folder: Path, kind: str) -> None:
    """Its own code is called, with what its API server gives it: the folder's settings and the
    tokenizer's end."""
    config = pytest.importorskip("vllm.transformers_utils.config")
    from vllm.sampling_params import SamplingParams

    found = config.try_get_generation_config(str(folder), trust_remote_code=False)
    served, ours = (
        SamplingParams(),
        SamplingParams(stop_token_ids=sorted(FOLDERS[kind][-1]), ignore_eos=True),
    )
    for one in (served, ours):
        one.update_from_generation_config(
            found.to_diff_dict(), open_tokenizer(str(folder)).eos_token_id
        )
    assert {*served.stop_token_ids, served.eos_token_id} - {None} == FOLDERS[kind][-1]
    assert {*ours.stop_token_ids, ours.eos_token_id} - {None} == FOLDERS[kind][-1]


@pytest.mark.parametrize(
    "name", ["skip-tokenizer-init", "skip_tokenizer_init", "--no-skip-tokenizer-init", "skip-tok"]
)
def test_a_generator_without_a_tokenizer_is_refused(name: str) -> None:
    with pytest.raises(lrl.ConfigError, match="is set by lrl"):
        ServerSettings(extra_args={name: True})
