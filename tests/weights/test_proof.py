"""What a proof sees of two programs that differ and of weights that did not arrive, and what is
rounding to it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lrl.errors import GeneratorError
from lrl.generators.generator import Generator, State
from lrl.policy import PolicyModule
from lrl.training.collate import text_as_micro_batch
from lrl.weights.proof import MAX_TOLERANCE_NATS, Proof, format_of, mean_difference
from lrl.weights.shared_memory import SharedMemory
from tests.lent_server import LentServer
from tests.policies import opened
from tests.tiny_policies import save_tiny
from tests.weights.model_sync import make_generators
from tests.weights.scene import Scene, step
from tests.weights.whole_weights import WholeWeights

TEXT = [3 + (7 * place + place // 9) % 59 for place in range(320)]
SHORT = TEXT[:64]


def generator_of(policy: PolicyModule, dtype: str) -> tuple[Generator, mock.AsyncMock]:
    """A generator that computes with this policy, and how it was asked."""
    generator: Any = make_generators()[0]
    generator.server.settings.dtype = dtype
    answers = mock.AsyncMock(side_effect=lambda tokens, **_: policy.prompt_logprobs(tokens))
    generator.client.prompt_logprobs = answers
    return generator, answers


def asked(answers: mock.AsyncMock) -> list[int]:
    """The length of each text."""
    return [len(call.args[0]) for call in answers.call_args_list]


def prove(
    policy: PolicyModule, generator: Generator, version: int = 0, tolerance: float | None = None
) -> Proof:
    proof = Proof(
        policy.prompt_logprobs,
        policy.compute_dtype,
        format_of(generator.server.settings),
        TEXT,
        version=version,
        tolerance=tolerance,
        deadline_s=60.0,
    )
    asyncio.run(proof(generator))
    assert not generator.serving, "only its pool opens a generator that passed"
    return proof


def family(name: str, folder: Path, dtype: Any = "float32", **settings: Any) -> PolicyModule:
    """A policy of that family; another one with the same weights differs in `settings`."""
    return opened(save_tiny(name, folder, 4.0, **settings), dtype=dtype, attention="eager")


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("llama", ("float32", "bfloat16")),
        ("llama", ("bfloat16", "float32")),
        ("gemma2", ("bfloat16", "bfloat16")),
        ("qwen3_moe", ("float32", "bfloat16")),
    ],
)
def test_rounding_is_no_difference_of_two_programs(
    name: str, dtypes: tuple[Any, Any], tmp_path: Path
) -> None:
    policy, other = (family(name, tmp_path, one, max_position_embeddings=1024) for one in dtypes)
    generator, answers = generator_of(other, dtypes[1])
    prove(policy, generator)
    assert asked(answers) == [320]


DIFFERENCES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a window of the attention": ("mistral", {"sliding_window": None}, {"sliding_window": 128}),
    "a cap on the scores": (
        "gemma2",
        {"query_pre_attn_scalar": 1, "attn_logit_softcapping": 1.0},
        {"query_pre_attn_scalar": 1, "attn_logit_softcapping": None},
    ),
    "positions that are stretched": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.2}},
    ),
    "a scale of the logits": ("granite", {"logits_scaling": 1.0}, {"logits_scaling": 1.05}),
}
"""What one of two programs leaves out, by the family and its settings."""


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_systematic_difference_is_found_in_bfloat16(what: str, tmp_path: Path) -> None:
    name, one, other = DIFFERENCES[what]
    policy = family(name, tmp_path / "one", max_position_embeddings=1024, **one)
    held = family(name, tmp_path / "other", "bfloat16", max_position_embeddings=1024, **other)
    generator, _ = generator_of(held, "bfloat16")
    difference = mean_difference(policy.prompt_logprobs(SHORT), held.prompt_logprobs(SHORT))
    assert difference < MAX_TOLERANCE_NATS["bfloat16"], "a limit for any model would pass it"
    with pytest.raises(
        GeneratorError, match=r"does not compute what the policy computes.* is allowed"
    ):
        prove(policy, generator)


def test_steps_that_a_generators_format_rounds_away_are_no_fault_of_it(tmp_path: Path) -> None:
    """The weights are numbers of bfloat16 at first, as those of pretrained models are."""
    policy = family("llama", tmp_path, max_position_embeddings=1024)
    held = family("llama", tmp_path, "bfloat16", max_position_embeddings=1024)
    policy.network.load_state_dict(held.network.state_dict())
    step = {name: 1e-5 * sign for name, sign in uphill(policy).items()}
    (generator, _), (late, _) = (generator_of(held, "bfloat16") for _ in range(2))
    before = policy.prompt_logprobs(SHORT)
    for version in range(20):
        prove(policy, generator, version=version)
        for name, weight in policy.network.named_parameters():
            weight.data += step[name]
        held.network.load_state_dict(policy.network.state_dict())
    limit = prove(policy, late).limit(slice(0, 63))
    assert mean_difference(policy.prompt_logprobs(SHORT), before) > limit, (
        "the policy has moved further than a generator may be off"
    )


def uphill(policy: PolicyModule) -> dict[str, torch.Tensor]:
    """The sign of each weight's gradient of the text's log-prob: all weights go one way."""
    loss = policy(text_as_micro_batch(SHORT, torch.device("cpu"))).sum()
    loss.backward()
    return {name: weight.grad.sign() for name, weight in policy.network.named_parameters()}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_is_missing_is_seen_at_any_proof(
    dtype: Any, is_new: bool, tmp_path: Path
) -> None:
    policy, other = family("llama", tmp_path), family("llama", tmp_path, dtype)
    generator, answers = generator_of(other, dtype)
    prove(policy, generator)
    for missing in ("0.0", "nan"):
        other.network.get_output_embeddings().weight.data.fill_(float(missing))
        generator.state = State.NEW if is_new else State.SERVING
        with pytest.raises(GeneratorError, match=r"are off by .* is allowed"):
            prove(policy, generator)
    assert asked(answers)[1:] == [320 if is_new else 64] * 2


def test_a_tolerance_that_is_set_is_the_only_limit(tmp_path: Path) -> None:
    name, one, other = DIFFERENCES["a window of the attention"]
    policy = family(name, tmp_path / "one", max_position_embeddings=1024, **one)
    other_program = family(name, tmp_path / "other", max_position_embeddings=1024, **other)
    generator, _ = generator_of(other_program, "float32")
    prove(policy, generator, tolerance=50.0)
    with pytest.raises(GeneratorError, match="tokens 65 to 319 of a text of 320"):
        prove(policy, generator, tolerance=1e-4)


def test_the_limit_is_of_the_least_exact_format_and_grows_with_what_rounding_does() -> None:
    settings: Any = make_generators()[0].server.settings
    assert format_of(settings) == "float32"
    settings.extra_args = {"--kv_cache_dtype": "fp8_e4m3"}
    assert format_of(settings) == "quantised"
    settings.extra_args = {"kv-cache-dtype": "bfloat16"}
    settings.quantization = "fp8_per_channel"
    assert format_of(settings) == "quantised"

    def limit(policy: str, held: str, spread: float) -> float:
        def logprobs(tokens: list[int], errors: Any, weights: Any) -> list[float]:
            return [-1.0 - (0.0 if errors is None else spread)]

        proof = Proof(logprobs, policy, held, [1, 2], version=0, tolerance=None, deadline_s=60.0)
        return proof.limit(slice(None))

    most = MAX_TOLERANCE_NATS["bfloat16"]
    assert limit("bfloat16", "float32", 9.0) == limit("float32", "bfloat16", 9.0) == most
    assert limit("bfloat16", "quantised", 0.01) == MAX_TOLERANCE_NATS["quantised"]
    assert limit("float32", "bfloat16", 0.01) < most


def test_a_real_generator_whose_weights_are_a_hundred_steps_old_is_found_when_it_is_due(
    lent_server: LentServer, policy_folder: Path
) -> None:
    policy = opened(str(policy_folder), dtype="float32")
    stale = opened(str(policy_folder), dtype="float32")
    scene = Scene(
        [Generator(lent_server, 8)],
        WholeWeights(policy.network.named_parameters),
        SharedMemory,
        policy,
        name="stale",
        prove_every_n_syncs=2,
    )
    with closing(scene):
        for version, finds in enumerate([False, False, True]):
            scene.version = version
            assert scene.syncs.sync_now(version) == {}
            failed = "".join(scene.syncs.wait().values())
            assert ("nats a token, and" in failed) == finds, failed
            if version == 0:
                scene.syncs.transport.policy = stale
                step(policy, 1e-3)  # a hundred steps of 1e-5 in one direction
