"""What is trained on the stand-in device: a tiny policy with every objective, kind of critic and
reference, and way of opening it."""

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from safetensors.torch import load_file
from torch import Tensor

import lrl
from benchmarks.forced_lengths import equal
from benchmarks.random_policy import llama, made_up_rows, make_policy
from benchmarks.ready_responses import ReadyResponses
from lrl import objectives
from lrl.training.model import open_tokenizer
from lrl.training.pieces import checkpoint_pieces
from lrl.types import ENVIRONMENT, Fork, Group, MicroBatch, Rollout
from lrl.weights import staging
from lrl.weights.buckets import buckets_of, damaged, plan_of, raise_if_damaged
from lrl.weights.staging import StageOrder
from lrl.weights.version_file import check_file, held_rows

STEPS, GROUPS, RESPONSES, TOKENS, MICRO_BATCH_TOKENS = 2, 2, 4, 24, 128
SHAPE = llama("tiny")
WITH_WINDOWS, WINDOW = "-with-windows", 16
"""End of the folder of a policy whose layers read so many tokens."""
READ_TOKENS = range(1, 40)
"""The text whose log-probs are read after the steps."""
OBSERVED = range(8, 12)
"""Tokens of a response that an environment wrote, between two turns."""
FORGOTTEN = 4
"""Last tokens of the first turn and its observation that every second response does not have in
its second turn, so that it has two branches."""

Settings = Mapping[str, Any]


def of(**settings: Any) -> Settings:
    return settings


def cases(folder: str) -> dict[str, Callable[[], Settings]]:
    """Returns the settings of each case: arguments of `lrl.PolicyModule`, and those of `train`.

    Args:
        folder: Of the policy; beside it are the others of `make_folders`.
    """
    mixed = {"precision": "bf16-mixed"}
    return {
        "AIPO": lambda: of(objective=objectives.AIPO()),
        "bf16-mixed, copies, checkpointing": lambda: of(
            **mixed, share_prefixes=False, gradient_checkpointing=True
        ),
        "bf16-mixed, sliding windows": lambda: of(**mixed, model=folder + WITH_WINDOWS),
        "bf16-mixed, flash_attention_2": lambda: of(**mixed, attention="flash_attention_2"),
        "bf16-mixed, lora, critic with a model, reference": lambda: of(
            **mixed,
            lora=lrl.LoRA(rank=4),
            critic=lrl.Critic(model=folder),
            reference=lrl.Reference(model=folder, coefficient=0.1),
        ),
        "PPO, checkpointing, head in chunks, not clipped": lambda: of(
            objective=objectives.PPO(),
            gradient_checkpointing=True,
            head_chunk_tokens=16,
            max_grad_norm=None,
        ),
        "CISPO, turns, turn critic, bfloat16, eager, by a number, abort on mismatch": lambda: of(
            objective=objectives.CISPO(),
            data=Turns,
            critic=lrl.TurnCritic(),
            dtype="bfloat16",
            attention="eager",
            normalise_by=64,
            abort_on_mismatch=100.0,
        ),
        "GSPO, copies, by sequence": lambda: of(
            objective=objectives.GSPO(), share_prefixes=False, normalise_by="sequence"
        ),
        "TIS, lora on bfloat16": lambda: of(
            objective=objectives.TIS(), lora=lrl.LoRA(rank=4), dtype="bfloat16"
        ),
        "DecoupledPPO, lora, its base as reference": lambda: of(
            objective=objectives.DecoupledPPO(),
            lora=lrl.LoRA(rank=4),
            reference=lrl.Reference(coefficient=0.1),
        ),
        "REINFORCE, reference in the reward, refreshed": lambda: of(
            objective=objectives.REINFORCE(),
            reference=lrl.Reference(
                coefficient=0.1, estimator="k1", penalty_in="reward", refresh_every_n_steps=1
            ),
        ),
        "TBA, reference": lambda: of(objective=objectives.TBA(), reference=lrl.Reference()),
        "IcePop, turns, turn critic with a model, teacher": lambda: of(
            objective=objectives.IcePop(),
            data=Turns,
            critic=lrl.TurnCritic(model=folder),
            reference=lrl.Teacher(model=folder),
        ),
        "TOPR, resumed, lora, critic": lambda: of(
            objective=objectives.TOPR(),
            resumes=True,
            lora=lrl.LoRA(rank=4),
            critic=lrl.Critic(),
        ),
    }


class Turns(ReadyResponses):
    """The same responses as episodes of two turns; see `OBSERVED` and `FORGOTTEN`."""

    def _groups(self, step: int) -> Iterator[Group]:
        for group in super()._groups(step):
            for number, rollout in enumerate(group.rollouts):
                _let_observe(rollout)
                if number % 2:
                    rollout.forks = [Fork(OBSERVED.stop, OBSERVED.start - FORGOTTEN)]
            yield group


def _let_observe(rollout: Rollout) -> None:
    for place in OBSERVED:
        rollout.versions[place] = ENVIRONMENT
        rollout.logprobs[place] = 0.0
    assert rollout.reward is not None, "made with one"
    rollout.turn_ends = [OBSERVED.start, len(rollout.token_ids)]
    rollout.turn_rewards = [rollout.reward / 2, rollout.reward / 2]


def on_cpu(settings: Settings) -> Settings:
    """Returns the settings of the same case where no flash kernel is."""
    flash = "flash" in (settings.get("attention") or "")
    return {**settings, "attention": None} if flash else settings


def make_folders(folder: Path) -> None:
    """Writes the tiny policy, and one with sliding windows."""
    texts = [row["question"] for row in made_up_rows()]
    make_policy(SHAPE, texts, folder, "cpu")
    other = folder.with_name(folder.name + WITH_WINDOWS)
    make_policy(SHAPE, texts, other, "cpu")
    config = json.loads((other / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config | {"sliding_window": WINDOW}))


class StepEnds(L.Callback):
    """Calls `begin` before each step, and `end` behind it with its number of micro-batches."""

    def __init__(self, begin: Callable[[], None], end: Callable[[int], None]) -> None:
        self.begin = begin
        self.end = end
        self._micro_batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._micro_batches = 0
        self.begin()

    def on_before_backward(self, *_: Any) -> None:
        self._micro_batches += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.end(self._micro_batches)


def train(
    folder: str,
    device: torch.device,
    work: Path,
    *callbacks: L.Callback,
    kind: type[lrl.PolicyModule] = lrl.PolicyModule,
    precision: Any = "32-true",
    share_prefixes: bool = True,
    data: type[ReadyResponses] = ReadyResponses,
    resumes: bool = False,
    model: str | None = None,
    **policy: Any,
) -> tuple[L.Trainer, lrl.PolicyModule]:
    """Trains two steps of made-up responses, the same on every device; the second one, if it
    `resumes`, in another trainer from the first one's checkpoint. `model` is the policy's folder,
    if not that of the tokens."""
    prompts = lrl.Prompts(list(made_up_rows(8)), prompt_column="question", shuffle=False)
    prompts.load(open_tokenizer(folder), 512)
    responses = data(
        prompts,
        SHAPE.vocab_size,
        equal(TOKENS),
        groups=GROUPS,
        responses=RESPONSES,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        share_prefixes=share_prefixes,
    )
    checkpoint = None
    for last in (1, STEPS) if resumes else (STEPS,):
        torch.manual_seed(0)
        trainer = L.Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1,
            precision=precision,
            callbacks=list(callbacks),
            max_steps=last,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=work,
        )
        # Fused kernels are no part of a device that has none.
        module = kind(model or folder, kernels="eager", **policy)
        trainer.fit(module, responses, ckpt_path=checkpoint)
        checkpoint = work / "step.ckpt"
        trainer.save_checkpoint(checkpoint)
    return trainer, module


def sent_in_buckets(policy: lrl.PolicyModule) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights as NCCL's workers get them of one rank, through the policy's device."""
    pieces = list(checkpoint_pieces(policy.network, policy.ranks, torch.bfloat16))
    plan = plan_of([held_rows(pieces, torch.bfloat16)], 2**16)
    left = (piece.rows for piece in pieces)
    for bucket in buckets_of(plan):
        packed = torch.empty(bucket.words(0), dtype=torch.int64, device=policy.device)
        bucket.pack(islice(left, len(bucket.tensors)), packed)
        raise_if_damaged(damaged([packed]))
        yield from bucket.unpack([packed])


def staged(policy: lrl.PolicyModule, work: Path) -> dict[str, Tensor]:
    """Returns the weights as a generator maps them, of a file that is written in several chunks."""
    file = work / "staged.safetensors"
    file.write_bytes(b"")
    order = StageOrder("pool", None, str(file))
    with mock.patch.object(staging, "CHUNK_BYTES", 2**12):
        header = policy.stage_weights(order)
    check_file(file, header.checksum)
    return load_file(file)


def numbers(trainer: L.Trainer, policy: lrl.PolicyModule, work: Path) -> dict[str, float]:
    """Returns the metrics of the last step, and what is read of the trained policy: probes, and
    sums over the weights of two kinds of syncs, an export and a checkpoint."""
    ids = list(READ_TOKENS)
    export = work / "export"
    policy.export(export)
    weights = {
        "sent": [tensor for _, tensor in sent_in_buckets(policy)],
        "staged": staged(policy, work).values(),
        "exported": load_file(export / "model.safetensors").values(),
        "checkpoint": policy.state_dict().values(),
    }
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    sums = {
        name: sum(tensor.float().abs().sum().item() for tensor in tensors)
        for name, tensors in weights.items()
    }
    probes = {
        "probe": sum(policy.prompt_logprobs(ids)),
        "probe with the rounding of bfloat16": sum(policy.prompt_logprobs(ids, "bfloat16")),
        "probe of bfloat16 weights": sum(policy.prompt_logprobs(ids, None, "bfloat16")),
    }
    return metrics | sums | probes


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "loss on the CPU": lambda loss: loss * torch.ones(1),
    "noise from the CPU": lambda loss: (
        loss * torch.rand(1, generator=torch.Generator(), device=loss.device)
    ),
    "GPU to numpy": lambda loss: loss * loss.detach().numpy(),
}
"""What a GPU refuses to make of a loss; so must the stand-in."""


class Faulty(lrl.PolicyModule):
    fault: str

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        return FAULTS[self.fault](super().compute_loss(micro)).sum()
