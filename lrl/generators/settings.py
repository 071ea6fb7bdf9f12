"""The settings of a generator, and the flags of vLLM that are not a user's to set.

Flags that other parts of lrl rely on (exact log-probs, no hidden top-p, who may call) are fixed by the server's command
and refused here: a run with other values would train on wrong numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

LISTENS = "a generator listens on loopback, in plain HTTP, at a free port"
GUARDED = "vLLM's own key leaves the RL routes open to everybody; who may call is lrl's to decide"
SAMPLED = "the trainer needs the log-probs of the very distribution that was sampled from"
OWNED: dict[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "ssl-keyfile", "ssl-certfile", "root-path"), LISTENS),
    **dict.fromkeys(("api-key", "middleware"), GUARDED),
    **dict.fromkeys(("logprobs-mode", "generation-config", "override-generation-config"), SAMPLED),
    "model": "the generator holds the policy's model",
    "config": "a file of flags would get round this list",
    "weight-transfer-config": "the sender of the weights chooses the way",
    "scheduling-policy": "lrl sends a priority with every request",
    "enable-scale-out": "it opens the route that lrl generates by",
}
"""vLLM flags that lrl sets itself, each with the reason."""


@dataclass(kw_only=True)
class ServerSettings:
    """How every generator of the fleet is run.

    Args:
        max_model_len: Longest prompt and answer together, in tokens; null takes what the data module's limits add up
            to.
        max_num_seqs: Answers written at the same time by one generator.
        dtype: Number format of weights and activations; `auto` is the policy's.
        tensor_parallel_size: GPUs one generator is spread over.
        gpu_memory_utilization: Share of a GPU's memory one generator takes. Not on CPU.
        kv_cache_gib: Memory for keys and values in GiB. Only on CPU.
        enforce_eager: Run without compiling and CUDA graphs: starts sooner, writes slower. Always so on CPU.
        start_timeout_s: Seconds from the start until the generator must answer.
        stop_timeout_s: Seconds a generator may take to stop before it is killed.
        extra_args: Further vLLM flags by name. `true` gives a bare flag, `false` its `--no-` form.

    Raises:
        ValueError: If a value is out of range, or `extra_args` has a flag that lrl sets itself.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 1.0
    enforce_eager: bool = False
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 15.0
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{name}={value} must be greater than 0.")
        if self.gpu_memory_utilization > 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization} is a share: give at most 1.")
        for name in self.extra_args:
            flag = dashed(name).removeprefix("no-")
            if flag in map(dashed, vars(self)):
                raise ValueError(f"extra_args: {name!r} is a setting beside extra_args; set it there.")
            if flag in OWNED:
                raise ValueError(f"extra_args: {name!r} is lrl's to set: {OWNED[flag]}. Leave it out.")


def dashed(name: str) -> str:
    """A flag's name as vLLM spells it, without the leading dashes."""
    return name.strip("-").replace("_", "-")


def as_flags(values: dict[str, Any]) -> Iterator[str]:
    """Command-line words; a list is several words, a mapping is JSON, None is vLLM's own default."""
    for name, value in values.items():
        if value is None:
            continue
        yield f"--no-{name}" if value is False else f"--{name}"
        if isinstance(value, dict):
            yield json.dumps(value)
        elif isinstance(value, list):
            yield from map(str, value)
        elif not isinstance(value, bool):
            yield str(value)
