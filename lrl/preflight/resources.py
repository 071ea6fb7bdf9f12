"""Checks of memory and disk, estimated from the model's shapes before a weight is loaded.

A fault surely cannot work: only the parts that every run has are counted; activations, the Python
processes and CUDA's own share come on top. A warning is merely tight; it counts activations, too.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import psutil
import torch

from lrl.errors import ConfigError
from lrl.generators import cpu_backend
from lrl.preflight.folders import check_disk
from lrl.preflight.model_folder import Shape
from lrl.system.byte_counts import GIB, in_gib
from lrl.system.config_errors import EXPECTED, fault
from lrl.training.activation_bytes import activation_bytes
from lrl.training.model import open_meta_model
from lrl.weights.staged_file import SHARED_MEMORY

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.policy import Policy

log = logging.getLogger(__name__)

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_REMEDY = (
    "lower data.micro_batch_tokens, on which no result depends, or set model.gradient_checkpointing"
)
STATES_PER_WEIGHT = 3
"""Numbers besides each trained one: its gradient and AdamW's two moments."""


def check_resources(
    trainer: L.Trainer,
    policy: Policy,
    data: RolloutDataModule,
    shape: Shape,
    ranker: int,
    critic: int,
) -> None:
    """Checks memory and disk; `ranker` and `critic` are the numbers of parameters of models that
    predict lengths and values, or 0."""
    strategy: Any = trainer.strategy
    weights = shape.parameters * BYTES[policy.dtype_name]
    share = weights // strategy.shards
    dtype = strategy.server_settings.dtype
    narrow = BYTES[policy.dtype_name if dtype == "auto" else dtype]
    copy = shape.parameters * narrow
    critic_weights = critic * BYTES[policy.dtype_name]
    critic_copies = 1 if policy.critic is None else 1 + policy.critic.frozen_copies
    fits = trainer.state.fn == "fit"
    adapters = 4 * shape.adapters  # in float32
    trained = share if policy.lora is None else adapters // strategy.shards
    of_a_rank = (
        share
        + (STATES_PER_WEIGHT * trained if fits else 0)
        + (_reference_bytes(policy, shape) // strategy.shards if fits else 0)
        + ((critic_copies + STATES_PER_WEIGHT) * critic_weights // strategy.shards if fits else 0)
    )
    rankers: dict[torch.device, int] = {}
    if fits and ranker:
        from lrl.routing.rankers.finetuning import BYTES_A_PARAMETER  # most runs have none

        predictor: Any = data.length_predictor
        rankers[predictor.ranker.device] = ranker * BYTES_A_PARAMETER
    activations = micro_batch_bytes(trainer, policy, data) if fits else 0
    on_cuda = strategy.root_device.type == "cuda"
    if on_cuda:
        largest = (
            max(map(math.prod, shape.tensors.values())) * min(weights, copy) // shape.parameters
        )
        check_gpus(
            strategy,
            of_a_rank,
            copy=copy,
            rankers=rankers,
            buffers=_buffers(strategy, largest),
            activations=activations,
        )
    else:
        ranks = len(strategy.parallel_devices or ()) or 1
        generators = strategy.generators_here
        kv_cache = int(strategy.server_settings.kv_cache_gib * GIB)
        in_memory = rankers.get(torch.device("cpu"), 0)
        if generators:
            _check_library()
        _check_memory(
            ranks * of_a_rank,
            generators * copy,
            kv_cache=generators * kv_cache,
            ranker=in_memory,
            activations=ranks * activations,
        )
        _check_kv_cache(
            strategy.server_settings, shape, data.max_model_tokens, copy // shape.parameters
        )
    with suppress(ConfigError):  # `check_settings` has noted a transport that cannot work
        transport, servers = strategy.plan()
        if policy.lora is None:
            travels = min(weights, copy) if transport.narrows else weights
        else:
            travels = narrow * shape.adapters if transport.narrows else adapters
        pools = 1 + bool(strategy.num_evaluation_generators)
        stored = transport.stored_bytes(travels, pools, len(servers))
        _check_shared_memory(transport.backend, stored)
    if fits:
        saved = weights if policy.lora is None else adapters
        check_disk(trainer, saved + critic_copies * critic_weights)


def micro_batch_bytes(trainer: L.Trainer, policy: Policy, data: RolloutDataModule) -> int:
    """Returns the bytes of activations and logits of a rank's largest micro-batch; 0 if they are
    not known: for a mixture of experts, and for layers that ranks divide."""
    if getattr(trainer.strategy, "tensor_parallel_size", 1) > 1:
        return 0
    network = open_meta_model(policy.policy_folder, policy.attention).train()
    if policy.lora is not None:
        policy.lora.add_to(network)
    network = network.to(getattr(torch, policy.training_dtype))
    of_a_token = activation_bytes(network, policy.gradient_checkpointing)
    if of_a_token is None:
        return 0
    responses = data.groups_per_step * data.sampling.n
    longest = responses * data.max_model_tokens
    tokens = min(data.micro_batch_tokens, longest)
    rows = network.get_output_embeddings().weight.shape[0]
    logits = min(policy.head_chunk_tokens, tokens) * rows * network.dtype.itemsize
    return int(tokens * of_a_token) + logits


def has_own_reference(policy: Policy) -> bool:
    """Returns whether the reference needs weights of its own here: it is on no server, and not the
    policy without its adapters."""
    if policy.reference is None or policy.reference.url is not None:
        return False
    return policy.lora is None or policy.reference.model is not None


def _reference_bytes(policy: Policy, shape: Shape) -> int:
    """Returns the bytes of the reference's own weights. For a reference with a noted fault the
    policy's stand in."""
    if not has_own_reference(policy):
        return 0
    model = None if policy.reference is None else policy.reference.model
    parameters = shape.parameters
    if model is not None:
        with suppress(*EXPECTED):
            parameters = open_meta_model(model, policy.attention).num_parameters()
    return parameters * BYTES[policy.dtype_name]


def memory_here() -> int:
    """Returns the bytes of memory and swap that this process may use: the machine's, or its
    container's if less."""
    machine = psutil.virtual_memory().total + psutil.swap_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(machine, int(text)) if text.isdecimal() else machine


def _check_shared_memory(transport: str, needed: int) -> None:
    free = shutil.disk_usage(SHARED_MEMORY).free
    if needed > free:
        takes, has = in_gib(needed, free)
        fault(
            f"{SHARED_MEMORY} has {has} GiB free, and strategy.weight_transfer {transport} takes "
            f"{takes}. Enlarge it: `mount -o remount,size={needed // GIB + 1}G {SHARED_MEMORY}`, "
            "or `docker run --shm-size` for a container."
        )


def _check_library() -> None:
    if cpu_backend.lacks_library():
        fault(
            f"vLLM's CPU build needs {cpu_backend.LIBRARY}, which is not here. Type: "
            f"{cpu_backend.INSTALL_LIBRARY}"
        )


def _check_memory(
    trainer: int, generators: int, *, kv_cache: int, ranker: int, activations: int
) -> None:
    needed = trainer + generators + kv_cache + ranker
    here, free = memory_here(), psutil.virtual_memory().available
    sizes = (needed, here, free, trainer, generators, kv_cache)
    needs, has, left, *parts = in_gib(*sizes)
    breakdown = (
        f"trainer {parts[0]}, generators' weights {parts[1]}, their keys and values "
        f"{parts[2]}{_and_ranker(ranker)}"
    )
    if needed > here:
        fault(
            f"Memory: at least {needs} GiB are needed ({breakdown}), and there are {has}. Take a "
            "smaller model.model, model.dtype bfloat16, fewer strategy.generator_devices or a "
            "smaller strategy.server.kv_cache_gib."
        )
    elif needed > free:
        log.warning(
            "Memory: at least %s GiB are needed (%s), and %s are free.", needs, breakdown, left
        )
    elif needed + activations > free:
        log.warning(
            "Memory: a full micro-batch takes about %s GiB besides the %s that are needed at least "
            "(%s), and %s are free. A process that is out of memory is killed: %s.",
            *(in_gib(activations)[0], needs, breakdown, left, _REMEDY),
        )


def _check_kv_cache(server: Any, shape: Shape, tokens: int, size: int) -> None:
    """Checks that one response at full length fits: otherwise vLLM does not start."""
    config = shape.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    names = ("num_hidden_layers", "num_key_value_heads", "hidden_size", "num_attention_heads")
    known = all(isinstance(getattr(config, name, None), int) for name in names)
    if getattr(config, "sliding_window", None) or getattr(config, "kv_lora_rank", None):
        return  # such models do not keep every key
    if kinds != {"full_attention"} or not known:
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    needed = (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * head
        * size
        * (server.max_model_len or tokens)
    )
    if needed > server.kv_cache_gib * GIB > 0:
        fault(
            f"strategy.server.kv_cache_gib is {server.kv_cache_gib:g}, and one response at full "
            f"length takes {needed / GIB:.3g} GiB: raise it, or lower data.max_prompt_tokens and "
            "data.max_response_tokens."
        )


def _buffers(strategy: Any, largest: int) -> int:
    """Returns the bytes of the transport's buffers on each GPU of a transfer; 0 for one that
    `check_settings` noted."""
    with suppress(ConfigError):
        return int(strategy.choose_transport().buffer_bytes(largest))
    return 0


def check_gpus(
    strategy: Any,
    trainer: int,
    copy: int,
    rankers: Mapping[torch.device, int],
    buffers: int = 0,
    activations: int = 0,
) -> None:
    """Checks each GPU, in bytes: `trainer` of a rank, `copy` of a generator's weights, `rankers` of
    a ranker, `buffers` of the transport, which vLLM's share does not include, and `activations` of
    a rank's micro-batch."""
    root: torch.device = strategy.root_device
    total = torch.cuda.get_device_properties(root).total_memory
    server = strategy.server_settings
    generator = int(server.gpu_memory_utilization * total)
    for device in strategy.parallel_devices:
        shared = strategy.shares_device and device == root
        ranker = rankers.get(device, 0)
        sends = buffers * (device == root)
        needed = trainer + ranker + shared * generator + sends
        if total >= needed > total - activations:
            log.warning(
                "GPU memory: a full micro-batch takes about %s GiB besides the %s that are needed "
                "at least, and %s has %s: %s.",
                *(*in_gib(activations, needed), device, in_gib(total)[0], _REMEDY),
            )
        if needed > total:
            takes, has, share = in_gib(trainer, total, generator)
            beside_it = f" beside the generator's {share} (strategy.server.gpu_memory_utilization)"
            parts = (
                f"{takes} "
                f"GiB{_and_ranker(ranker)}{_and_buffers(sends)}{beside_it if shared else ''}"
            )
            fault(
                f"GPU memory: weights, gradients and moments take {parts}, and the GPU has {has}. "
                "Take a smaller model.model, model.dtype bfloat16 or a lower share."
            )
    for device in strategy.generator_devices:
        ranker = rankers.get(device, 0)
        if ranker + generator + buffers > total:
            share, has = in_gib(generator, total)
            parts = (
                f"data.length_predictor.ranker takes {in_gib(ranker)[0]} GiB of {device}"
                if ranker
                else ""
            )
            needs = (
                f"buffers of strategy.weight_transfer take {in_gib(buffers)[0]} GiB of {device}"
                if buffers
                else ""
            )
            fault(
                f"GPU memory: {' and '.join(filter(None, (parts, needs)))}, where a generator has "
                f"{share} of {has} (strategy.server.gpu_memory_utilization): lower that"
                f"{', or set data.length_predictor.ranker.device' if ranker else ''}."
            )
    of_each = copy // server.tensor_parallel_size
    if of_each > generator:
        takes, share = in_gib(of_each, generator)
        fault(
            f"GPU memory: a generator's weights take {takes} GiB on each GPU, of {share}. Raise "
            "strategy.server.gpu_memory_utilization or tensor_parallel_size."
        )


def _and_buffers(buffers: int) -> str:
    return f", buffers of strategy.weight_transfer {in_gib(buffers)[0]}" if buffers else ""


def _and_ranker(ranker: int) -> str:
    return f", data.length_predictor.ranker {in_gib(ranker)[0]}" if ranker else ""
