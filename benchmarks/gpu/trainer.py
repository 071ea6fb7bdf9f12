"""The trainer alone on one GPU: tokens a second, and the share of the card's bfloat16 peak. vLLM is
not needed.

    python -m benchmarks.gpu.trainer --size 1.5b
    python -m benchmarks.gpu.trainer --size 8b --dtype bfloat16 --checkpointing 1
    python -m benchmarks.gpu.trainer --size tiny --device cpu --steps 3 --groups 2 --tokens 32     a rehearsal

Real optimizer steps of lrl's `PolicyModule` under Lightning, on responses that are there already.
The weights are random. The peak is measured in the same run: a product of two bfloat16 matrices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any, get_args

import lightning as L
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig

import lrl
from benchmarks import arguments
from benchmarks.forced_lengths import equal
from benchmarks.gpu import rows, step_profile
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.gpu.memory_plan import GIB
from benchmarks.gpu.step_profile import StepProfile
from benchmarks.random_policy import SHAPES, llama, made, made_up_rows, num_parameters
from benchmarks.ready_responses import ReadyResponses
from benchmarks.records import append, origin
from benchmarks.runs import EveryStep, quiet_trainer
from lrl.planning.model_shape import read_shape
from lrl.planning.roofline import Held, training_memory
from lrl.training.kernels import Kernels
from lrl.training.logprobs import FUSED_HEAD
from lrl.training.model import Dtype, open_tokenizer

MAX_PROMPT_TOKENS = 512
WARM_UP_STEPS = 2
"""The first step makes AdamW's state, and both compile or choose kernels."""
LEAST_STEPS = WARM_UP_STEPS + 1


class Tried(lrl.PolicyModule):
    """The policy with what no setting of lrl chooses."""

    unfused_adamw = False
    fused_head = False

    def configure_model(self) -> None:
        super().configure_model()
        if self.fused_head:
            setattr(self.network, FUSED_HEAD, True)

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        for group in found["optimizer"].param_groups:
            group["fused"] = None if self.unfused_adamw else group["fused"]
        return found


class StepSeconds(EveryStep):
    """Keeps the seconds of every step, to the end of its last kernel."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self.machine.wait()
        self._started = time.perf_counter()

    def step_done(self, trainer: Any) -> None:
        self.machine.wait()
        self.seconds.append(time.perf_counter() - self._started)


def flops(config: LlamaConfig, tokens: int, response_tokens: int) -> float:
    """Returns the floating-point operations of a step's matrices: forward once, backward twice
    that.

    Attention's products and what gradient checkpointing computes again are not counted, so a share
    of the peak that is made of them is a lower bound.

    Args:
        config: Shape of the policy.
        tokens: Tokens of all sequences, each with its prompt. A prompt that is read once counts as
            often: the share of the peak is that of the work that is wanted.
        response_tokens: Tokens that go through the head.
    """
    head = config.vocab_size * config.hidden_size
    embeddings = head if config.tie_word_embeddings else 2 * head
    layers = num_parameters(config) - embeddings
    return 6.0 * (layers * tokens + head * response_tokens)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = llama(args.size)
    machine = MACHINES[args.device]()
    problems = list(made_up_rows())
    folder = made(args.size, args.folder, machine.device)
    prompts = lrl.Prompts(problems, prompt_column="question", shuffle=False)
    prompts.load(open_tokenizer(str(folder)), MAX_PROMPT_TOKENS)
    data = ReadyResponses(
        prompts,
        config.vocab_size,
        equal(args.tokens),
        groups=args.groups,
        responses=args.responses,
        micro_batch_tokens=args.micro_batch_tokens,
        share_prefixes=not args.copies,
    )
    policy = Tried(
        str(folder),
        dtype=args.dtype,
        attention="sdpa" if args.sdpa else args.attention,
        kernels=args.kernels,
        gradient_checkpointing=args.checkpointing,
        lora=lrl.LoRA(rank=args.lora_rank) if args.lora_rank else None,
    )
    policy.unfused_adamw, policy.fused_head = args.unfused_adamw, args.fused_head
    steps = StepSeconds(machine)
    callbacks: list[L.Callback] = [steps]
    if args.profile:
        callbacks.append(StepProfile(args.steps - 1))
    peak = machine.matrix_flops_per_s()
    machine.begin()
    trainer = quiet_trainer(
        args.steps,
        args.folder,
        accelerator=machine.accelerator,
        devices=1,
        precision="bf16-mixed" if args.dtype == "float32" else "32-true",
        callbacks=callbacks,
    )
    backend = sdpa_kernel(getattr(SDPBackend, args.sdpa)) if args.sdpa else nullcontext()
    with backend:
        trainer.fit(policy, data)
    profiled = callbacks[-1].found if isinstance(callbacks[-1], StepProfile) else {}
    measured = steps.seconds[WARM_UP_STEPS : -1 if profiled else None]
    step_s = statistics.median(measured)
    response_tokens = args.groups * args.responses * args.tokens
    last = range((args.steps - 1) * args.groups, args.steps * args.groups)
    prompt_tokens = args.responses * sum(len(prompts[index].token_ids) for index in last)
    tokens = prompt_tokens + response_tokens
    achieved = flops(config, tokens, response_tokens) / step_s
    return {
        **origin(),
        "command": args.command,
        "machine": machine.name,
        "size": args.size,
        "dtype": args.dtype,
        "attention": args.sdpa or policy.network.config._attn_implementation,
        "kernels": policy.kernels_in_use,
        "fused_head": args.fused_head or policy.kernels_in_use != "eager",
        "fused_adamw": bool(trainer.optimizers[0].param_groups[0]["fused"]),
        "checkpointing": args.checkpointing,
        "lora_rank": args.lora_rank,
        "micro_batch_tokens": args.micro_batch_tokens,
        "responses": args.groups * args.responses,
        "response_tokens": args.tokens,
        "measured_steps": len(measured),
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "response_tokens_per_s": response_tokens / step_s,
        "tflops": achieved / 1e12,
        "peak_tflops": peak / 1e12,
        "share_of_peak": achieved / peak,
        "peak_gib": machine.peak / GIB,
        "forecast_gib": forecast(config, args) / GIB,
        "responses_share_rows": policy.responses_share.rows,
        "responses_share_prompts": policy.responses_share.prefixes and not args.copies,
        **({"profile": profiled} if profiled else {}),
    }


def checkpointed(every: int) -> str:
    return {0: "no", 1: "yes"}.get(every, f"every {every}th layer")


def forecast(config: LlamaConfig, args: argparse.Namespace) -> float:
    """Returns the bytes by `lrl.planning`."""
    held = Held(dtype=args.dtype, recompute_every=args.checkpointing, lora_rank=args.lora_rank)
    memory = training_memory(read_shape(config.to_dict()), shards=1, tp=1, held=held)
    return memory.bytes_for(args.micro_batch_tokens)


def table(result: dict[str, Any]) -> str:
    columns = {
        "policy": result["size"],
        "weights": result["dtype"],
        "attention": result["attention"],
        "kernels": result["kernels"],
        "prompts": "read once" if result["responses_share_prompts"] else "copies",
        "checkpointing": checkpointed(int(result["checkpointing"])),
        "tokens a micro-batch": f"{result['micro_batch_tokens']:,}",
        "step s": f"{result['step_s']:.2f}",
        "tokens/s": f"{result['tokens_per_s']:,.0f}",
        "TFLOP/s": f"{result['tflops']:.3g}",
        "of the peak": f"{result['share_of_peak']:.0%}",
        "peak GiB": f"{result['peak_gib']:.1f}",
        "forecast GiB": f"{result['forecast_gib']:.1f}",
    }
    step = rows.table(columns, result)
    profiled = result.get("profile")
    return step if profiled is None else f"{step}\n\n{step_profile.table(profiled)}"


def main() -> None:
    parser = rows.make_parser("trainer", __doc__)
    backends = ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    arguments.add(
        parser,
        size=("1.5b", "of the policy", SHAPES),
        dtype=("float32", "of the weights; float32 is trained in bf16-mixed", get_args(Dtype)),
        attention=(None, "as model.attention"),
        sdpa=(None, "sdpa's backend", backends),
        kernels=("eager", "as model.kernels", get_args(Kernels)),
        fused_head=(False, "compile the head's log-probs beside eager kernels"),
        unfused_adamw=(False, "AdamW by torch's own choice of kernels"),
        profile=(False, "also the kernels of the last step, by time"),
        checkpointing=(0, "every n-th layer, as model.gradient_checkpointing; 0 for none"),
        lora_rank=(0, "of adapters; 0 trains all weights"),
        copies=(False, "a copy of the prompt for each of its responses"),
        micro_batch_tokens=(16384, "of one forward pass"),
        groups=(16, "prompts a step"),
        responses=(8, "to each"),
        tokens=(512, "of each response"),
        steps=(5, "the first two do not count"),
    )
    args = rows.parse(parser, LEAST_STEPS)
    result = measure(args)
    append(args.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
