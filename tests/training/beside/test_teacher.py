"""On-policy distillation: the reward of each token, its gradient, and the teachers that are
refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lrl.advantages import GroupMean
from lrl.errors import ConfigError
from lrl.objectives import AIPO, REINFORCE, TBA
from lrl.preflight.model import check_reference, shape_of
from lrl.preflight.settings import check_objective
from lrl.training.beside.teacher import Teacher
from lrl.types import Group
from tests.policies import SIZES, make_group, opened, pack, save_model
from tests.tiny_policies import byte_tokenizer
from tests.training.beside.test_reference import logprobs_of


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("other"), LlamaConfig(**SIZES, initializer_range=0.2))


def prepared(policy: Any, temperature: float = 1.0) -> list[Group]:
    policy.setup("fit")
    groups = [make_group(index) for index in range(3)]
    for group in groups:
        policy.prepare(group, temperature, 10_000)
    return groups


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("coefficient", "weight"), [(1.0, 0.0), (0.5, 1.0)])
def test_the_gradient_is_that_of_a_plain_computation_in_float64(
    folder: str, teacher: str, coefficient: float, weight: float, temperature: float
) -> None:
    policy = opened(folder, objective=REINFORCE(), reference=Teacher(teacher, coefficient))
    groups = prepared(policy, temperature)
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.reward is not None
            rollout.reward *= weight
    (batch,) = pack(groups, 10_000, temperature)
    policy.compute_loss(batch).backward()

    own = AutoModelForCausalLM.from_pretrained(folder).double()
    theirs = AutoModelForCausalLM.from_pretrained(teacher).double()
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        mean = sum(rollout.reward or 0.0 for rollout in group.rollouts) / len(group.rollouts)
        for rollout in group.rollouts:
            words = group.prompt.token_ids, rollout.token_ids, temperature
            pi, pi_teacher = logprobs_of(own, *words), logprobs_of(theirs, *words)
            advantages = rollout.reward - mean + coefficient * (pi_teacher - pi).detach()
            loss -= (advantages * pi).sum()
    loss.backward()
    expected = dict(own.named_parameters())
    for name, found in policy.network.named_parameters():
        torch.testing.assert_close(
            found.grad.double(), expected[name].grad, rtol=1e-3, atol=1e-4, msg=name
        )


@pytest.mark.parametrize("coefficient", [0.0, -1.0, float("nan")])
def test_a_teacher_that_would_teach_nothing_is_refused(coefficient: float) -> None:
    with pytest.raises(ConfigError, match="model.reference.coefficient is"):
        Teacher("any", coefficient)


def test_an_objective_of_whole_responses_is_refused_beside_a_teacher() -> None:
    data: Any = SimpleNamespace(
        advantages=GroupMean(), stragglers="wait", environment=None, max_skipped_per_step=0
    )

    def check(objective: Any) -> None:
        policy: Any = SimpleNamespace(objective=objective, reference=Teacher("any"), critic=None)
        check_objective(policy, data)

    check(AIPO())
    with pytest.raises(ConfigError, match="model.objective TBA .*rewards each token"):
        check(TBA())


def test_a_teacher_needs_the_policys_tokenizer(tmp_path: Path) -> None:
    teacher = save_model(tmp_path / "teacher", LlamaConfig(**SIZES))
    policy: Any = SimpleNamespace(
        tokenizer=byte_tokenizer(), policy_folder="own", attention=None, reference=Teacher(teacher)
    )
    shape = shape_of(teacher, None)
    byte_tokenizer().save_pretrained(teacher)
    check_reference(teacher, policy, shape)
    other = byte_tokenizer()
    other.add_tokens(["<tool>"])
    other.save_pretrained(teacher)
    with pytest.raises(ConfigError, match="another tokenizer.*same family"):
        check_reference(teacher, policy, shape)
    with pytest.raises(ConfigError, match="model.reference.model="):
        check_reference(str(tmp_path / "none"), policy, shape)


def test_a_teacher_may_have_more_rows_than_the_policy_and_not_fewer(tmp_path: Path) -> None:
    sizes = SIZES | {"vocab_size": SIZES["vocab_size"] + 8}
    larger = save_model(tmp_path / "larger", LlamaConfig(**sizes))
    byte_tokenizer().save_pretrained(larger)
    policy: Any = SimpleNamespace(
        tokenizer=byte_tokenizer(), attention=None, policy_folder="own", reference=Teacher(larger)
    )
    rows = SIZES["vocab_size"]
    check_reference(larger, policy, SimpleNamespace(vocabulary=rows))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"has {rows + 8} tokens"):
        check_reference(larger, policy, SimpleNamespace(vocabulary=rows + 9))  # type: ignore[arg-type]
