"""The policy: its log-probs, its gradient, its step. Real training in a real Trainer, on models of
two tiny layers.

Covers lrl/policy_model.py.
"""

import csv
import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from lrl.objectives import (
    AIPO,
    CISPO,
    GSPO,
    PPO,
    REINFORCE,
    TBA,
    TIS,
    TOPR,
    DecoupledPPO,
    IcePop,
    Objective,
)
from lrl.objectives.base import denominator, sum_by, token_weights
from lrl.policy import PolicyModule
from lrl.training.beside.reference import Reference
from lrl.training.lora import LoRA
from lrl.training.optimizers import lr_factor
from lrl.types import MicroBatch
from tests.policies import (
    GROUPS,
    FakeStep,
    fit,
    flat_gradient,
    gradient,
    make_group,
    opened,
    pack,
    prepared,
)
from tests.tiny_policies import adapted, response_logprobs, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    # A large spread of weights, or all log-probs would be alike and nothing could go wrong.
    spread = {"initializer_range": 0.3, "attention_dropout": 0.5}
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), **spread)


# ---- log-probs


def test_a_model_with_unknown_logit_changes_is_refused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = LlamaForCausalLM.forward

    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = honest(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ValueError, match="LlamaForCausalLM changes its logits"):
        opened(folder)


# ---- the gradient


OBJECTIVES = [
    *((AIPO(2.0), by) for by in ("token", "sequence", 12)),
    *((one, "token") for one in (REINFORCE(), PPO(), DecoupledPPO(), IcePop(), CISPO(), TIS(2.0))),
    *((one, "sequence") for one in (GSPO(0.2, 0.2), TBA(0.3), TIS(2.0, "sequence"))),
    (TOPR(), 12),
]


def name_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Objective) else str(value)


@pytest.mark.parametrize(("objective", "normalise_by"), OBJECTIVES, ids=name_of)
def test_the_gradient_does_not_depend_on_micro_batches_or_order(
    folder: str, objective: Objective, normalise_by: Any
) -> None:
    reference = Reference(0.1, "k2")
    policy = opened(folder, objective=objective, normalise_by=normalise_by, reference=reference)
    groups = prepared(policy, [make_group(i, version=-i) for i in range(4)])
    how = {"whole_groups": objective.whole_groups}
    whole = gradient(policy, pack(groups, 10_000, **how))
    assert whole.norm() > 0
    counts, trees = set(), 0
    for budget, order, attention_tokens in (
        (10_000, [3, 1, 0, 2], 0),
        (10_000, [3, 1, 0, 2], 10_000),
        (80, [0, 1, 2, 3], 0),
        (80, [0, 1, 2, 3], 10_000),
        (32, [2, 3, 1, 0], 0),
        (1, [1, 0, 3, 2], 0),
    ):
        ordered = [groups[i] for i in order]
        batches = pack(ordered, budget, attention_tokens=attention_tokens, **how)
        counts.add(len(batches))
        trees += sum(batch.readers_end is not None for batch in batches)
        assert (gradient(policy, batches) - whole).norm() / whole.norm() < 1e-5
    assert trees >= 2
    assert len(counts) >= 3 and max(counts) >= (4 if objective.whole_groups else 7)
    # Of two ranks.
    parts = [pack(part, 48, **how) for part in (groups[:1], groups[1:])]
    divisors = [denominator(policy.normalise_by, FakeStep(part)) for part in parts]
    summed = sum(
        gradient(policy, part) * divisor for part, divisor in zip(parts, divisors, strict=True)
    )
    assert (summed / sum(divisors) - whole).norm() / whole.norm() < 1e-5


@pytest.mark.parametrize(
    ("normalise_by", "weight"),
    [
        ("token", lambda length, lengths: 1 / sum(lengths)),
        ("sequence", lambda length, lengths: 1 / (length * len(lengths))),
        (12, lambda length, lengths: 1 / (12 * len(lengths))),
    ],
)
def test_losses_are_divided_as_configured(folder: str, normalise_by: Any, weight: Any) -> None:
    """Against a loop over single responses."""
    policy = opened(folder, objective=REINFORCE(), normalise_by=normalise_by)
    responses = [(group, rollout) for group in GROUPS for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for _, rollout in responses]
    policy.zero_grad()
    loss = torch.zeros(())
    for group, rollout in responses:
        mean = sum(mate.reward for mate in group.rollouts) / len(group.rollouts)
        words = group.prompt.token_ids, rollout.token_ids
        logprob = response_logprobs(policy.network, *words).sum()
        loss = loss - weight(len(rollout.token_ids), lengths) * (rollout.reward - mean) * logprob
    loss.backward()
    expected = flat_gradient(policy)
    torch.testing.assert_close(gradient(policy, pack(GROUPS)), expected, atol=1e-6, rtol=1e-4)


def test_tokens_that_a_loss_takes_out_of_the_mask_are_no_labels_and_have_no_weight() -> None:
    (batch,) = pack(GROUPS, 10_000)
    emptied, shortened = (replace(batch, mask=batch.mask.clone()).to("cpu") for _ in range(2))
    emptied.mask = torch.zeros_like(emptied.mask)
    assert not len(emptied.index.places)
    shortened.mask[:, shortened.mask[0].nonzero()[0]] = False
    weights = token_weights("sequence", shortened)
    responses = shortened.index.responses
    summed = sum_by(responses, weights, shortened.index.num_responses)
    torch.testing.assert_close(summed[responses], torch.ones(len(responses)))


@pytest.mark.parametrize(("every", "recomputed"), [(True, 2), (1, 2), (2, 1), (0, 0)])
def test_gradient_checkpointing_recomputes_every_nth_layer_and_gives_the_same_gradient(
    every: int, recomputed: int, folder: str
) -> None:
    plain, checkpointed = opened(folder), opened(folder, gradient_checkpointing=every)
    passes: list[int] = []
    for number, layer in enumerate(checkpointed.network.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: passes.append(number))
    batches = pack(GROUPS)
    found = gradient(checkpointed, batches)
    assert len(passes) == (2 + recomputed) * len(batches)
    assert torch.allclose(gradient(plain, batches), found, atol=1e-7)


# ---- a step


def test_a_step_is_one_update_with_the_mean_gradient(folder: str) -> None:
    reference = gradient(opened(folder), pack(GROUPS))
    policy = PolicyModule(folder, max_grad_norm=None)
    kept: list[torch.Tensor] = []
    keeping = LambdaCallback(on_before_optimizer_step=lambda *_: kept.append(flat_gradient(policy)))
    (metrics,) = fit(policy, [FakeStep(pack(GROUPS))], callbacks=[keeping])
    assert policy.trainer.global_step == 1 and len(kept) == 1
    torch.testing.assert_close(kept[0], reference, atol=1e-7, rtol=1e-4)
    with torch.no_grad():
        mean = (
            opened(folder).compute_loss(pack(GROUPS, 10_000)[0]).item()
            / FakeStep(pack(GROUPS)).num_tokens
        )
    assert metrics["policy/loss"] == pytest.approx(mean, rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(reference.norm().item(), rel=1e-4)
    spread = "ratio_mean ratio_max clip_fraction ess kl_behaviour"
    names = (
        f"loss grad_norm lr lag_mean lag_max mismatch_kl mismatch_mean mismatch_max {spread}"
    ).split()
    names += [f"by_lag/0/{name}" for name in f"{spread} share".split()]
    assert set(metrics) == {f"policy/{name}" for name in names}


def test_the_version_grows_by_one_a_step_even_without_tokens(folder: str) -> None:
    policy = PolicyModule(folder, lr=1e-2, warmup_steps=3)
    rows = fit(policy, [FakeStep(pack(GROUPS)), FakeStep([]), FakeStep(pack(GROUPS))])
    assert policy.trainer.global_step == len(rows) == 3
    assert rows[-1]["policy/lr"] == pytest.approx(1e-2)
    assert rows[-1]["policy/lag_mean"] == 2


@pytest.mark.parametrize(
    ("written", "settings", "said"),
    [
        (math.nan, {}, "step 0: the gradient norm is nan"),
        (
            None,  # made up
            {"abort_on_mismatch": 0.5},
            r"step 0: policy/mismatch_kl is .* model.abort_on_mismatch is 0.5",
        ),
    ],
    ids=["a gradient that is not a number", "a mismatch above the limit"],
)
def test_the_run_stops_before_the_update_at(
    folder: str, written: float | None, settings: dict[str, Any], said: str
) -> None:
    (batch,) = pack(GROUPS, 10_000)
    if written is not None:
        batch.behaviour_logprobs[batch.mask] = written
    policy = PolicyModule(folder, **settings)
    before = [weight.clone() for _, weight in opened(folder).whole_weights()]
    with pytest.raises(RuntimeError, match=said):
        fit(policy, [FakeStep([batch])])
    assert all(
        torch.equal(old, new) for old, (_, new) in zip(before, policy.whole_weights(), strict=True)
    )


def test_a_policy_opens_where_another_device_is_the_default(folder: str) -> None:
    """Lightning makes the GPU the default device for `configure_model`; the meta device stands for
    it here."""
    policy = PolicyModule(folder, lora=LoRA(rank=2))
    with torch.device("meta"):
        policy.configure_model()
    assert policy.responses_share.rows
    assert {tensor.device.type for tensor in policy.state_dict().values()} == {"cpu"}
    assert len(policy.prompt_logprobs([1, 2, 3])) == 2


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["weights", "adapters"])
def test_a_probe_within_a_step_of_mixed_precision_is_that_of_a_hook(
    folder: str, lora: LoRA | None
) -> None:
    policy = adapted(opened(folder, lr=0.0, lora=lora))
    text, found = list(range(1, 30)), {}

    def read() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.tensor(policy.prompt_logprobs(text)), dict(policy.whole_weights())

    class Reading(FakeStep):
        def __iter__(self) -> Iterator[MicroBatch]:
            yield from self.batches
            found["within"] = read()
            assert torch.is_autocast_enabled("cpu")
            with torch.no_grad():
                found["trained"] = policy(self.batches[0]), {}

    def hook(*_: Any) -> None:
        found["hook"] = read()
        with torch.no_grad():
            found["alone"] = policy(pack(GROUPS)[0]), {}

    how = {"precision": "bf16-mixed", "callbacks": [LambdaCallback(on_train_batch_end=hook)]}
    fit(policy, [Reading(pack(GROUPS))], **how)
    assert (found["trained"][0] - found["alone"][0]).abs().max() > 1e-3, (
        "the step itself is in bfloat16"
    )
    torch.testing.assert_close(found["within"], found["hook"], rtol=0, atol=0)


def test_a_step_logs_nothing_of_the_step_before(folder: str, tmp_path: Path) -> None:
    """Lightning would log lag 0 again in every later step."""
    logger = CSVLogger(tmp_path, name=None, version="")
    fit(PolicyModule(folder), [FakeStep(pack(GROUPS))] * 3, logger=logger, log_every_n_steps=1)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for step, row in enumerate(rows):
        assert [lag for lag in range(3) if row.get(f"policy/by_lag/{lag}/share")] == [step]
        assert bool(row["policy/mismatch_kl"]) == (step == 0)


# ---- settings


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_the_learning_rate_rises_in_warm_up_and_falls_to_zero_at_the_end(
    schedule: Any, expected: list[float]
) -> None:
    assert [lr_factor(schedule, 2, 6, step) for step in range(6)] == pytest.approx(expected)


def test_a_function_may_make_the_model_and_runs_once(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"calls = []\ndef make():\n    calls.append(1)\n    return {folder!r}\n"
    (tmp_path / "maker_of_models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    policy = opened("maker_of_models:make")
    assert policy.policy_folder == folder and policy.tokenizer.eos_token
    assert importlib.import_module("maker_of_models").calls == [1]


# ---- the weights


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mixtral", {"router_jitter_noise": 0.1}),
    ],
)
def test_sent_weights_are_the_checkpoints(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    weights = dict(opened(save_tiny(family, tmp_path, **settings)).whole_weights())
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in weights) is not settings.get("tie_word_embeddings", False)
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_a_logged_number_stays_on_the_cpu_and_every_setting_reaches_lightning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(
        L.LightningModule, "log", lambda self, name, value, **how: logged.append((value, how))
    )
    policy = PolicyModule("-")
    policy.log("a", 1.5, prog_bar=True)
    policy.log("b", 2, sync_dist=True)
    (number, how), (shared, together) = logged
    assert number.item() == 1.5 and number.device.type == "cpu" and how == {"prog_bar": True}
    assert shared == 2 and together == {"sync_dist": True}, "a collective needs the rank's device"
