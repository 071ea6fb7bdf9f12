"""A server's settings: which flags of vLLM are taken, and why the others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lrl.generators.settings import OWNED, ServerSettings, speculates

SPELLINGS = (
    "--host api_key no-enable-scale-out disable-scale-out no-disable_scale_out scale-out "
    "weight-transfer-config.backend logprobs-mod logprobs_m max_model_len max-model dtype"
)


@pytest.mark.parametrize("name", [*OWNED, *SPELLINGS.split()])
def test_a_flag_that_lrl_owns_is_refused_in_every_spelling_of_vllm(name: str) -> None:
    with pytest.raises(ValueError, match=r"extra_args: .*(set by lrl, .*|set it there)"):
        ServerSettings(extra_args={name: "x"})


@pytest.mark.parametrize("name", ["--logprobs-mode=raw_logprobs", "seed 3", "", "--", "x\n--host"])
def test_what_is_no_name_of_a_flag_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a flag of vLLM"):
        ServerSettings(extra_args={name: True})


@pytest.mark.parametrize("name", ["enable_expert_parallel", "--compilation-config.mode"])
def test_the_names_of_vllms_other_flags_are_taken(name: str) -> None:
    assert name in ServerSettings(extra_args={name: 1}).extra_args


@pytest.mark.parametrize("sampler", ["synthetic", "fly"])
@pytest.mark.parametrize("text", [False, True])
def test_speculative_decoding_that_changes_what_is_sampled_is_refused(
    sampler: str, text: bool
) -> None:
    config = {"method": "ngram", "rejection_sample_method": sampler}
    with pytest.raises(
        ValueError, match=f"rejection_sample_method '{sampler}'.*Choose from standard, block"
    ):
        ServerSettings(extra_args={"speculative_config": json.dumps(config) if text else config})


@pytest.mark.parametrize(
    "config", [{"method": "ngram"}, {"method": "ngram", "rejection-sample-method": "block"}]
)
def test_exact_speculative_decoding_is_taken(config: dict[str, Any]) -> None:
    assert speculates(ServerSettings(extra_args={"speculative-config": config}).extra_args)
