"""The settings of a generator, and the flags of vLLM that are not a user's to set.

Flags that other parts of lrl rely on (exact log-probs, no hidden top-p, who may call) are fixed by the server's command
and refused here: a run with other values would train on wrong numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from lrl.generators.endpoint import LOOPBACK, Listening
from lrl.runtime.config_errors import fault, noting

LISTENS = "a generator listens at a free port of `host`; TLS is set by tls_cert and tls_key"
GUARDED = "vLLM's own key leaves the RL routes open to everybody; who may call is lrl's to decide"
SAMPLED = "the trainer needs the log-probs of the very distribution that was sampled from"
OWNED: dict[str, str] = {
    **dict.fromkeys(("host", "port", "uds", "root-path"), LISTENS),
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs"), LISTENS),
    **dict.fromkeys(("api-key", "middleware"), GUARDED),
    **dict.fromkeys(("logprobs-mode", "generation-config", "override-generation-config"), SAMPLED),
    **dict.fromkeys(("logits-processors", "logits-processor-pattern"), SAMPLED),
    **dict.fromkeys(("temperature", "top-p", "top-k", "min-p", "typical-p"), SAMPLED),
    **dict.fromkeys(("presence-penalty", "frequency-penalty", "repetition-penalty", "logit-bias"), SAMPLED),
    **dict.fromkeys(("hf-overrides", "hf-config-path", "tokenizer"), "the generator must compute what the policy does"),
    "trust-remote-code": "code that comes with a model is never run",
    "model": "the generator holds the policy's model",
    "config": "a file of flags would get round this list",
    "weight-transfer-config": "the sender of the weights chooses the way",
    "scheduling-policy": "lrl sends a priority with every request",
    "stream-interval": "the versions of a half-written response are counted by it",
    "enable-scale-out": "it opens the route that lrl generates by",
}
"""vLLM flags that lrl sets itself, each with the reason."""


@dataclass(kw_only=True)
class ServerSettings:
    """How every generator of the fleet is run.

    Args:
        max_model_len: Longest prompt and answer together, in tokens; null takes what the data module's limits add up
            to.
        max_num_seqs: Responses written at the same time by one generator.
        dtype: Number format of weights and activations; `auto` is the policy's.
        tensor_parallel_size: GPUs one generator is spread over.
        gpu_memory_utilization: Share of a GPU's memory one generator takes. Not on CPU.
        kv_cache_gib: Memory for keys and values in GiB. Only on CPU.
        threads: CPU threads of one generator; null is half of the machine's cores, or all of them with
            `strategy.placement: shared`. Only on CPU; `OMP_NUM_THREADS` overrules it.
        enforce_eager: Run without compiling and CUDA graphs: starts sooner, writes slower. Always so on CPU.
        start_timeout_s: Seconds from the start until the generator must answer.
        stop_timeout_s: Seconds a generator may take to stop before it is killed.
        host: Address of this machine that generators listen on; 0.0.0.0 is all. Any but loopback needs TLS or
            `insecure`; see docs/security.md.
        tls_cert: Certificate of the generators, a PEM file; they speak HTTPS then.
        tls_key: Its private key, a PEM file that is not encrypted.
        tls_trust: Whom the trainer believes: `certificate` is exactly `tls_cert`; `system` are this machine's
            authorities, and the certificate must name `host`.
        insecure: Listen in plain HTTP where other machines can read along.
        extra_args: Further vLLM flags by name. `true` gives a bare flag, `false` its `--no-` form.

    Raises:
        ValueError: If a value is out of range, `extra_args` has a flag that lrl sets itself, others could read the
            run's token on its way, or the certificate would not be trusted.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 1.0
    threads: int | None = None
    enforce_eager: bool = False
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 15.0
    host: str = LOOPBACK
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_trust: Literal["certificate", "system"] = "certificate"
    insecure: bool = False
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                fault(f"strategy.server.{name} is {value}; it must be above 0.")
        if self.gpu_memory_utilization > 1:
            share = self.gpu_memory_utilization
            fault(f"strategy.server.gpu_memory_utilization is {share}, a share: give at most 1.")
        for name in self.extra_args:
            flag = dashed(name).removeprefix("no-")
            if flag in map(dashed, vars(self)):
                fault(f"strategy.server.extra_args: {name!r} is a setting beside extra_args; set it there.")
            if flag in OWNED:
                fault(f"strategy.server.extra_args: {name!r} is lrl's to set: {OWNED[flag]}. Leave it out.")
        with noting():
            self.listening.check()

    @property
    def listening(self) -> Listening:
        """Where every generator listens."""
        return Listening(self.host, self.tls_cert, self.tls_key, self.tls_trust, self.insecure)


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
