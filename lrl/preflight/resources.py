"""Checks of what a run reads and needs: data sets, the checkpoint that it resumes, and memory.

Of memory only what every run has is counted: activations, the Python processes and CUDA's own share
come on top. So a fault surely cannot work, and a run that passes may still be too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from lrl.checkpoints.checkpoint_file import READ_ERRORS
from lrl.errors import EXPECTED, ConfigError
from lrl.preflight.model import Shape
from lrl.rewards import Reward
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.prompts import Prompts
from lrl.system.machine import GIB, in_gib

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.run import Run
    from lrl.strategies.generator_devices import GeneratorDevices

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES_PER_WEIGHT = 3
"""Numbers besides each trained one: its gradient and AdamW's two moments."""


def check_data(run: Run) -> list[Prompts]:
    data, read = run.data, []
    if run.trains:
        _check_columns(data.prompts, "data.prompts", data.reward_pool.rewards)
        check_prompts_per_step(data, len(data.prompts.rows))
        read.append(data.prompts)
    for evaluation in run.evaluations:
        prompts = evaluation.prompts
        rewards = evaluation.rewards_for_evaluation(data)
        _check_columns(prompts, "Evaluation.prompts", data.reward_pool.like(rewards, 1).rewards)
        if unknown := [column for column in evaluation.by if column not in prompts.columns]:
            raise ConfigError(
                f"Evaluation.by names {', '.join(unknown)}, and {prompts.name} has the columns "
                f"{', '.join(prompts.columns)}."
            )
        read.append(prompts)
    return read


def check_prompts_per_step(data: RolloutDataModule, count: int) -> None:
    """Checks that a step finds its groups among `count` prompts: all rows, or those that are not
    skipped."""
    if count < data.groups_per_step:
        raise ConfigError(
            f"data.groups_per_step is {data.groups_per_step}, and {data.prompts.name} has {count} "
            f"prompts of at most data.max_prompt_tokens={data.max_prompt_tokens} tokens. Set it to "
            f"at most {count}."
        )


def _check_columns(prompts: Prompts, setting: str, rewards: Sequence[Reward]) -> None:
    """Reads a data set, and checks that each reward can judge a response to every row."""
    try:
        prompts.read()
    except EXPECTED as error:
        raise ConfigError(f"{setting}: {error}") from error
    for reward in rewards:
        for number, row in enumerate(prompts.rows):
            columns = {name: value for name, value in row.items() if name != prompts.prompt_column}
            try:
                reward.check_row(columns)
            except ValueError as error:
                raise ConfigError(
                    f"{setting}: the reward {reward.name!r} can judge no response to row {number} of "
                    f"{prompts.name}: {error}"
                ) from error


def check_checkpoint(run: Run, ckpt_path: str, trained: dict[str, tuple[int, ...]]) -> None:
    """Checks that the checkpoint can be read, and is one of this run: of its `trained` weights and
    its groups. Does not look at one at an address."""
    # Here: most runs begin anew.
    from lrl.checkpoints.checkpoint_folder import META, is_checkpoint_folder, shapes

    # Lightning resolves the words itself.
    words = ("last", "best", "hpc")
    if "://" in ckpt_path or ckpt_path in words or ckpt_path.startswith("registry"):
        return
    named, path = f"--ckpt_path {ckpt_path!r}", Path(ckpt_path)
    in_parts = is_checkpoint_folder(path)
    if not path.exists() or (path.is_dir() and not in_parts):
        raise ConfigError(f"{named}: there is no checkpoint.")
    if in_parts and not run.strategy.resumes_parts:
        raise ConfigError(
            f"{named} is a folder of parts, which only lrl.AsyncFSDP resumes. Train with that, or "
            "begin anew with the policy in it (`lrl export`)."
        )
    try:
        file = path / META if in_parts else path
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        weights = {} if in_parts else state["state_dict"]
        sizes = shapes(path) if in_parts else {name: one.shape for name, one in weights.items()}
    except READ_ERRORS as error:
        raise ConfigError(f"{named} is no checkpoint that can be read: {error!r:.200}") from error
    for name, size in trained.items():
        if (found := sizes.get(f"network.{name}")) != size:
            raise ConfigError(
                f"{named} is of another model than model.model={run.policy.model!r}: {name} is "
                f"{list(found or ())} in it and {list(size)} here. Resume with the model, and the "
                "model.lora, it was made with."
            )
    data, module = run.data, type(run.data).__qualname__
    if not run.trains:
        return
    if module not in state:
        raise ConfigError(
            f"{named} has no state of {module}: it is not of a run with this data module."
        )
    ledger = state[module]["ledger"]
    if data.prompts and ledger is not None:
        Ledger(data.pacing).load_state_dict(ledger, data.prompts.__getitem__)
        data.check_prompts(ledger)


def check_resources(run: Run, shape: Shape) -> None:
    strategy, policy = run.strategy, run.policy
    weights = trained = shape.parameters * BYTES[policy.dtype_name]
    if policy.lora is not None:
        trained = BYTES["float32"] * sum(map(math.prod, shape.trained.values()))
    states = STATES_PER_WEIGHT * trained + weights * policy.reference_has_model
    of_a_rank = (weights + (states if run.trains else 0)) // strategy.shards
    dtype = strategy.server_settings.dtype
    copy = shape.parameters * BYTES[policy.dtype_name if dtype == "auto" else dtype]
    copies = strategy.choose_transport().copies
    pools = 1 + bool(strategy.num_evaluation_generators)
    # A new version is staged beside the older one of its pool.
    staged = (pools + 1) * min(trained, copy) // run.trainer.num_nodes if copies else 0
    if strategy.root_device.type == "cuda":
        check_gpu(strategy, of_a_rank)
        check_memory({"staged weights": staged})
        return
    number = len(strategy.placements())
    parts = {
        "trainer": of_a_rank * (len(strategy.parallel_devices or ()) or 1),
        "staged weights": staged,
        "generators' weights": number * copy,
        "their keys and values": int(number * strategy.server_settings.kv_cache_gib * GIB),
    }
    check_memory(parts)


def memory_here() -> int:
    """Returns the bytes of memory and swap that this process may use: the machine's, or its
    container's if less."""
    machine = psutil.virtual_memory().total + psutil.swap_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(machine, int(text)) if text.isdecimal() else machine


def check_memory(parts: dict[str, int]) -> None:
    """Checks that `parts`, in bytes, fit: a process that is out of memory is killed."""
    needed, here = sum(parts.values()), memory_here()
    if needed > here:
        needs, has, *sizes = in_gib(needed, here, *parts.values())
        listed = ", ".join(f"{name} {size}" for name, size in zip(parts, sizes, strict=True))
        raise ConfigError(
            f"Memory: at least {needs} GiB are needed ({listed}), and there are {has}. Take a "
            "smaller model.model, model.dtype bfloat16, or a smaller strategy.server.kv_cache_gib."
        )


def check_gpu(strategy: GeneratorDevices, of_a_rank: int) -> None:
    """Checks the trainer's GPU; vLLM checks its own."""
    total = torch.cuda.get_device_properties(strategy.root_device).total_memory
    share = strategy.server_settings.gpu_memory_utilization
    beside = int(share * total) if strategy.shares_device else 0
    if of_a_rank + beside > total:
        takes, has, other = in_gib(of_a_rank, total, beside)
        raise ConfigError(
            f"GPU memory: weights, gradients and moments take {takes} GiB, beside a generator's "
            f"{other} (strategy.server.gpu_memory_utilization), and the GPU has {has}. Take a "
            "smaller model.model, model.dtype bfloat16 or a lower share."
        )
