"""Whole runs on a real vLLM server: lag, versions, log-probs, resume, export, and syncs that go
wrong.

Covers lrl/strategies/generator_devices.py.
"""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

import lrl
from benchmarks.runs import quiet_trainer
from lrl import policy_model
from lrl.callbacks import (
    Evaluation,
    Export,
    RolloutFile,
    RolloutLog,
    Throughput,
    Timeline,
    WeightSync,
)
from lrl.callbacks.base import run_of
from lrl.callbacks.throughput import StepTimes, times_of
from lrl.rollouts.timeline import GroupRecord, MicroBatchRecord, StepRecord, read
from lrl.routing.dispatch import LeastTokens
from lrl.run import Run
from lrl.system.stopwatch import GENERATOR, TRAINER
from lrl.training.pieces import Piece
from lrl.types import Group, Rollout
from lrl.viewer.rollout_file import RolloutIndex
from tests.lent_server import Borrowing, LentServer
from tests.tiny_policies import END, PAD, response_logprobs

STEPS, GROUPS, RESPONSES = 6, 2, 4
TEMPERATURE = 0.8
LEARNING_RATE = 5e-4
"""Neighbouring versions then differ by some 0.3 nats a token."""
SMALL: dict[str, Any] = {"max_num_seqs": 64, "dtype": "float32", "kv_cache_gib": 0.1}
"""Settings of a server of the tests' policy."""
PROMPTS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 14)
]


@dataclass
class Witness(L.Callback):
    """Remembers what each step of a run trained, under which weights, and its numbers; stands behind
    the callbacks that log these."""

    groups: list[tuple[int, Group]] = field(default_factory=list)
    replayed: list[Sequence[Group]] = field(default_factory=list)
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    times: list[StepTimes] = field(default_factory=list)
    written_meanwhile: list[int] = field(default_factory=list)
    """Of each micro-batch, the responses that were being written when it was trained."""
    file: Path = Path()
    data: Any = None
    resumed: Any = None
    """What the run has of a checkpoint's half-written responses."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module)
        self.data = trainer.datamodule  # type: ignore[attr-defined]
        self.resumed = run_of(trainer).calls.controller.resumed

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        generators = run_of(trainer).fleet.rollouts.generators
        self.written_meanwhile.append(sum(one.in_flight for one in generators))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self._keep(trainer, pl_module)
        stream: Any = run_of(trainer).step_stream
        self.groups += [(stream.step, group) for group in stream.groups]
        self.replayed.append(stream.replayed)
        self.metrics.append({tag: float(value) for tag, value in trainer.callback_metrics.items()})
        self.times.append(times_of(trainer))

    def _keep(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.weights[trainer.global_step] = copy.deepcopy(pl_module.network.state_dict())

    @property
    def lrs(self) -> list[float]:
        return [of_step["policy/lr"] for of_step in self.metrics]

    @property
    def rollouts(self) -> list[tuple[int, Rollout]]:
        return [(step, rollout) for step, group in self.groups for rollout in group.rollouts]


@dataclass
class Before(L.Callback):
    """Does something before some steps, by their numbers."""

    actions: dict[int, Callable[[Run], object]]

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if action := self.actions.get(trainer.global_step):
            action(run_of(trainer))


def data_module(**settings: Any) -> lrl.RolloutDataModule:
    defaults: dict[str, Any] = {
        "prompts": PROMPTS,
        "rewards": ["tests.odd_lengths:brevity"],
        "groups_per_step": GROUPS,
        "rollouts_per_group": RESPONSES,
        "max_prompt_tokens": 64,
        "max_response_tokens": 96,
        "temperature": TEMPERATURE,
        "micro_batch_tokens": 1024,
    }
    return lrl.RolloutDataModule(**defaults | settings)


def train(
    strategy: Any,
    policy: Path,
    folder: Path,
    *callbacks: L.Callback,
    devices: int,
    steps: int,
    ckpt_path: str | None = None,
    learning: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[L.Trainer, Witness]:
    """A whole run with these callbacks and a witness; syncs behind every step, if none of them
    does."""
    witness = Witness()
    kinds = {kind for callback in callbacks for kind in type(callback).__mro__}
    trainer = quiet_trainer(
        steps,
        folder,
        devices=devices,
        strategy=strategy,
        callbacks=[
            *([] if WeightSync in kinds else [WeightSync()]),
            *(Throughput(), *callbacks, witness),
        ],
        enable_checkpointing=ModelCheckpoint in kinds,
    )
    module = lrl.PolicyModule(str(policy), **{"lr": LEARNING_RATE} | (learning or {}))
    trainer.fit(module, datamodule=data_module(**settings), ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    return trainer, witness


def fit(
    server: LentServer,
    policy: Path,
    folder: Path,
    *,
    steps: int = STEPS,
    callbacks: Sequence[L.Callback] = (),
    for_evaluation: tuple[LentServer, ...] = (),
    learning: dict[str, Any] | None = None,
    placement: str = "split",
    capacity: int = lrl.ServerSettings.max_num_seqs,
    **settings: Any,
) -> Witness:
    """A run with the lent server."""
    of_server = lrl.ServerSettings(max_num_seqs=capacity)
    strategy = Borrowing(server, *for_evaluation, placement=placement, server=of_server)
    settings |= {"devices": 2 + len(for_evaluation), "steps": steps}
    settings["learning"] = {"warmup_steps": 2, "schedule": "linear"} | (learning or {})
    return train(strategy, policy, folder, *callbacks, **settings)[1]


@pytest.fixture(scope="module")
def far_off_policy(
    lent_server: LentServer, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Witness:
    """A run whose responses are written over several versions, with all of them in its file."""
    long = lrl.rewards.Function("tests.odd_lengths:brevity", weight=-1.0)
    folder = tmp_path_factory.mktemp("run")
    witness = fit(
        lent_server,
        policy_folder,
        folder,
        steps=14,
        callbacks=[RolloutFile(groups=GROUPS)],
        max_lag=4,
        rewards=[long],
    )
    witness.file = folder / "rollouts.jsonl"
    return witness


def train_every_prompt_once(
    strategy: Any,
    policy: Path,
    folder: Path,
    *callbacks: L.Callback,
    steps: int,
    groups: int,
    max_lag: int,
    sync_deadline_s: float = 300.0,
    **settings: Any,
) -> tuple[L.Trainer, Witness]:
    """A run with generators of its own; checks that every prompt was trained once, whole, and within
    the bound on lag."""
    every = WeightSync(deadline_s=sync_deadline_s), RolloutLog(), *callbacks
    settings |= {"groups_per_step": groups, "prompts": PROMPTS[: steps * groups]}
    settings |= {"steps": steps, "max_lag": max_lag}
    trainer, witness = train(strategy, policy, folder, *every, **settings)
    assert sorted(group.prompt.id for _, group in witness.groups) == list(range(steps * groups))
    for step, rollout in witness.rollouts:
        assert rollout.finished and rollout.reward is not None
        assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.versions)
        assert all(0 <= step - version <= max_lag for version in rollout.versions)
    return trainer, witness


def test_no_trained_token_lags_more_than_max_lag(far_off_policy: Witness) -> None:
    lags = [step - version for step, one in far_off_policy.rollouts for version in one.versions]
    assert min(lags) >= 0 and max(lags) <= 4
    indices = {group.index for _, group in far_off_policy.groups}
    assert len(indices) == len(far_off_policy.groups) == 14 * GROUPS


def test_sides_that_take_turns_are_never_both_at_work_and_others_are(
    far_off_policy: Witness, lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "timeline.jsonl").write_text('{"kind": "step", "step": 0,')  # an older run's
    settings: dict[str, Any] = {
        "max_lag": 0,
        "dispatch": LeastTokens(),
        "micro_batch_tokens": 64,
        "placement": "shared",
        "share_prefixes": False,  # short responses would read a prompt once, now and then
    }
    witness = fit(lent_server, policy_folder, tmp_path, steps=3, callbacks=[Timeline()], **settings)
    assert not any(witness.written_meanwhile) and any(far_off_policy.written_meanwhile)
    assert {step - one for step, of in witness.rollouts for one in of.versions} == {0}
    check_timeline(tmp_path / "timeline.jsonl", witness, witness.times)
    for step in (*witness.times, *far_off_policy.times):
        assert set(step.trainer) <= set(TRAINER) and set(step.generators) <= set(GENERATOR)
        assert step.wait > 0 and step.train > 0 and step.sync > 0
    # What is beside a step is in the next one.
    for state in ("writing", "paused"):
        assert any(state in step.generators for step in witness.times)


def check_timeline(path: Path, witness: Witness, times: list[StepTimes]) -> None:
    """It tells all that was trained, once, and all of every step's time."""
    records = read(path)
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [step.step for step in steps] == list(range(len(times)))
    for step, known in zip(steps, times, strict=True):
        waits = step.wait_first_s + step.wait_more_s + step.wait_last_s + step.wait_reward_s
        assert waits == pytest.approx(known.wait) and step.seconds == pytest.approx(known.step)
        assert waits + step.train_s + step.update_s + step.sync_s == pytest.approx(step.seconds)
        assert min(step.train_s, step.update_s, step.sync_s, step.pause_s) > 0
        assert 0 < step.generation_s < steps[-1].started_s + steps[-1].seconds
    trained = [(step, group) for step, group in witness.groups]
    tokens = sum(
        len(group.prompt.token_ids) + len(one.token_ids)
        for _, group in trained
        for one in group.rollouts
    )
    batches = [record for record in records if isinstance(record, MicroBatchRecord)]
    assert sum(record.tokens for record in batches) == tokens
    assert sum(step.tokens for step in steps) == sum(sum(step.lags.values()) for step in steps)
    groups = [record for record in records if isinstance(record, GroupRecord)]
    assert [group.index for group in groups] == [group.index for _, group in trained]
    assert [len(one.token_ids) for _, group in trained for one in group.rollouts] == [
        n for g in groups for n in g.lengths
    ]


def test_a_response_written_over_a_sync_has_several_versions_in_their_order(
    far_off_policy: Witness,
) -> None:
    versions = [rollout.versions for _, rollout in far_off_policy.rollouts]
    assert any(len(set(of_one)) > 1 for of_one in versions)
    assert all(of_one == sorted(of_one) for of_one in versions)


def test_behaviour_logprobs_are_the_samplers_own_under_the_version_that_wrote_each_token(
    far_off_policy: Witness, policy_folder: Path
) -> None:
    mixed = [
        (group.prompt.token_ids, rollout)
        for _, group in far_off_policy.groups
        for rollout in group.rollouts
        if len(set(rollout.versions)) > 1
    ]
    plain = [(group.prompt.token_ids, group.rollouts[0]) for _, group in far_off_policy.groups][-4:]
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    assert mixed
    for prompt, rollout in [*mixed[:8], *plain]:
        for version in set(rollout.versions):
            model.load_state_dict(far_off_policy.weights[version])
            expected = recomputed(model, prompt, rollout)
            pairs = zip(expected, rollout.logprobs, rollout.versions, strict=True)
            assert (
                max(abs(ours - theirs) for ours, theirs, wrote in pairs if wrote == version) < 0.01
            )


@torch.no_grad()
def recomputed(
    model: Any, prompt: list[int], rollout: Rollout, temperature: float = TEMPERATURE
) -> list[float]:
    """Log-probs of the whole response in one forward pass."""
    return response_logprobs(model, prompt, rollout.token_ids, temperature).tolist()


def test_the_file_of_rollouts_has_what_was_trained_with_the_ratio_of_the_version_that_trained(
    far_off_policy: Witness, policy_folder: Path
) -> None:
    index = RolloutIndex(far_off_policy.file)
    index.refresh()
    assert len(index.groups) == len(far_off_policy.groups) and not index.cut_short
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    for number, (step, group) in enumerate(far_off_policy.groups):
        found = index.read(step, group.index)
        assert found is not None and found["prompt"]["token_ids"] == group.prompt.token_ids
        for written, rollout in zip(found["responses"], group.rollouts, strict=True):
            assert written["token_ids"] == rollout.token_ids
            assert spelled(written["versions"]) == rollout.versions
            assert written["logprobs"] == [round(logp, 4) for logp in rollout.logprobs]
            assert spelled(written["trained"]) == [True] * len(rollout.token_ids)
            assert written["reward"] == pytest.approx(rollout.reward, abs=1e-4)
        if number % 4 == 0:
            model.load_state_dict(far_off_policy.weights[step])
            written, rollout = found["responses"][0], group.rollouts[0]
            logprobs = recomputed(model, group.prompt.token_ids, rollout)
            pairs = zip(logprobs, rollout.logprobs, strict=True)
            expected = [ours - theirs for ours, theirs in pairs]
            assert written["log_ratios"] == pytest.approx(expected, abs=2e-3)


def spelled(runs: list[list[Any]]) -> list[Any]:
    """Of pairs of a value and a count the value of each token."""
    return [value for value, count in runs for _ in range(count)]


def test_the_exported_policy_writes_the_responses_that_were_evaluated_in_every_order_of_callbacks(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = lrl.Prompts(PROMPTS[:12], name="held_out", shuffle=False)
    evaluation = Evaluation(held_out, every_n_steps=3, timeout_s=600.0)
    saving = ModelCheckpoint(
        tmp_path / "best",
        monitor="eval/held_out/reward",
        mode="max",
        save_top_k=-1,
        filename="{step}",
    )
    weighed = lrl.rewards.Function("tests.odd_lengths:brevity", weight=0.5)
    export = Export(str(tmp_path / "policy"))
    callbacks = [saving, evaluation, WeightSync(every_n_steps=4), export]
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(lent_server, policy_folder, tmp_path, callbacks=callbacks, rewards=[weighed], max_lag=3)
    # The one at step 3 is of the newest version that was synced.
    assert [step for step, _ in evaluation.reports] == [0, 0, STEPS]
    for step, report in evaluation.reports:
        assert f"step {step}: {report.as_line()}" in caplog.messages, (
            "each prints a line when it ends"
        )
    begun = [one for one in caplog.messages if one.startswith("evaluating held_out: 0 of 12, ")]
    assert len(begun) == 2, "the user waits for the first and the last"
    first, last = evaluation.reports[0][1], evaluation.reports[-1][1]
    assert first.versions == [0] and last.versions == [STEPS]
    assert (tmp_path / "best" / f"step={STEPS}.ckpt").exists()
    assert_nowhere(lent_server.token, [*tmp_path.rglob("*"), lent_server.log_path])
    card = (tmp_path / "policy" / "README.md").read_text()
    assert f"- After {STEPS} steps: mean reward on held_out {last.reward:.3f} (" in card
    file = tmp_path / "evaluation" / f"held_out-step{STEPS:06d}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    plain = [row["reward_parts"]["brevity"] for row in rows]
    assert last.reward == pytest.approx(sum(plain) / len(plain)), "the weight is for training"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    same = 0
    for row in rows:
        chat = [{"role": "user", "content": row["prompt"]}]
        form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": False}
        prompt = tokenizer.apply_chat_template(chat, **form)
        answer = model.generate(prompt, max_new_tokens=96, do_sample=False)[0, prompt.shape[1] :]
        same += tokenizer.decode(answer).replace(END, "").replace(PAD, "") == row["response"]
    assert same >= 0.9 * len(rows)  # a near tie may fall to the other side in another kernel


def assert_nowhere(token: str, paths: list[Path]) -> None:
    """Checks that a run's token is in none of its files and in no command line."""
    assert not any(token.encode() in path.read_bytes() for path in paths if path.is_file())
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(token in word for words in lines for word in words)


def test_a_sync_that_loses_a_tensor_ends_the_run_and_says_which_generator(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = policy_model.checkpoint_pieces

    def corrupted(*words: Any) -> Iterator[Piece]:
        for piece in intact(*words):
            lost = piece.name.endswith("layers.1.mlp.down_proj.weight")
            yield piece._replace(rows=torch.zeros_like(piece.rows)) if lost else piece

    def staged() -> list[str]:
        open_files = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        return [one for one in open_files if "memfd:" in one]

    monkeypatch.setattr(policy_model, "checkpoint_pieces", corrupted)
    before = staged()
    with pytest.raises(RuntimeError, match=r"generator 0 does not compute .* version 0.*nats"):
        fit(lent_server, policy_folder, tmp_path)
    assert staged() == before, "the weights are freed, too"
