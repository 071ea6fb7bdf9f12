"""Settings of a generator, and the flags of vLLM that lrl fixes.

Flags that other parts of lrl rely on (exact log-probs, no hidden top-p, authentication) are set by
the server's command and rejected here: a run with other values would train on wrong numbers.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from lrl.errors import ConfigError, one_of
from lrl.system.endpoint import Endpoint, TlsTrust
from lrl.system.machine import half_of_the_cores

ServerDtype = Literal["auto", "float32", "bfloat16", "float16"]
OWNED = (
    *("model", "config", "host", "port", "uds", "root-path", "api-key", "middleware"),
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "api-server-count"),
    *("logprobs-mode", "generation-config", "override-generation-config", "seed"),
    *("logits-processors", "logits-processor-pattern", "logit-bias", "temperature", "top-p"),
    *("top-k", "min-p", "typical-p", "presence-penalty", "frequency-penalty"),
    *("repetition-penalty", "hf-overrides", "hf-config-path", "tokenizer", "revision"),
    *("tokenizer-revision", "skip-tokenizer-init", "trust-remote-code"),
    *("weight-transfer-config", "scheduling-policy", "stream-interval", "tool-call-parser"),
    *("enable-auto-tool-choice", "enable-scale-out"),
)
"""vLLM flags that lrl sets itself."""
FLAG = re.compile(r"-{0,2}[A-Za-z0-9][\w-]*(\.[\w.+-]+)?")
"""A flag's name, and perhaps a key of its mapping."""
SPECULATION = ("speculative-config", "spec-method", "spec-model", "spec-tokens")
"""Flags of speculative decoding."""
SPARE_SLOTS = 32
"""Requests that a generator serves beyond its rollouts (evaluations, probes)."""
EXACT_SAMPLERS = ("standard", "block")
"""Its rejection samplers that keep the policy's distribution, by reading vLLM 0.32 and 0.33."""
QUANTIZATIONS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8")
"""The number formats to which vLLM quantises a model of another format as it loads it, and again at
each update."""

NICE = ["nice", "-n", "10"]
"""A generator sometimes needs more than its half of the cores: engine and API server, besides the
trainer's thread that reads their streams. On two cores a trainer with the other half then waited 8
to 15 % of its time for a core, and 2 to 3 % when generators had a lower priority."""


@dataclass(kw_only=True)
class ServerSettings(Endpoint):
    """Settings of every generator of the fleet, with its address but for the port.

    Args:
        max_model_len: Longest prompt and response together, in tokens; null is the sum of the data
            module's limits.
        max_num_seqs: Rollouts that one generator writes at the same time; evaluations and probes
            have `SPARE_SLOTS` more.
        dtype: Number format of weights and activations; `auto` is the policy's.
        quantization: Number format of the matrices in a generator, which quantises them as they
            arrive, at each sync: `fp8_per_tensor`, `fp8_per_channel`, `fp8_per_block` or `mxfp8`;
            null keeps `dtype`.
        tensor_parallel_size: GPUs of one generator.
        gpu_memory_utilization: Share of a GPU's memory that one generator takes. Not on CPU.
        kv_cache_gib: Memory for keys and values in GiB. Only on CPU.
        threads: CPU threads of one generator; null is `OMP_NUM_THREADS`, and without that variable
            half of the machine's cores, or all of them with `strategy.placement: shared`. Only on
            CPU.
        enforce_eager: Disables compilation and CUDA graphs: a faster start, slower writing. Always
            so on CPU.
        start_timeout_s: Seconds from the start until the generator must answer.
        stop_timeout_s: Seconds a generator may take to stop before it is killed.
        host: Address of this machine that generators listen on; 0.0.0.0 is all. Any address but
            loopback needs TLS or `insecure`.
        tls_cert: Certificate of the generators, a PEM file; turns HTTPS on.
        tls_key: Private key of the certificate, a PEM file that is not encrypted.
        tls_trust: Certificates that the trainer accepts: `certificate` is exactly `tls_cert`;
            `system` is any of this machine's authorities, and the certificate must name `host`.
        insecure: Allows plain HTTP on an address that other machines can read.
        tool_parser: vLLM's parser of the policy's tool calls (`--tool-call-parser`), such as
            `hermes` or `pythonic`; null for an environment without tools.
        extra_args: Further vLLM flags by name. `true` gives a bare flag, `false` its `--no-` form.

    Raises:
        ValueError: A value is out of range, `extra_args` has a flag that lrl sets itself, others
            could read the run's token on its way, or the certificate would not be trusted.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    dtype: ServerDtype = "auto"
    quantization: str | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 1.0
    threads: int | None = None
    enforce_eager: bool = False
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 15.0
    tool_parser: str | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigError(f"strategy.server.{name} is {value}; it must be above 0.")
        one_of(
            "strategy.server",
            dtype=(get_args(ServerDtype), self.dtype),
            quantization=((None, *QUANTIZATIONS), self.quantization),
            tls_trust=(get_args(TlsTrust), self.tls_trust),
        )
        if (share := self.gpu_memory_utilization) > 1:
            raise ConfigError(
                f"strategy.server.gpu_memory_utilization is {share}, a share: give at most 1."
            )
        setting_names = {dashed(name) for name in vars(self)}
        for name in self.extra_args:
            _check_flag(name, setting_names)
        _check_speculation(self.extra_args)
        self.check()


def speculates(extra_args: dict[str, Any]) -> bool:
    """Whether flags of vLLM turn speculative decoding on."""
    return any(_switch(name) in SPECULATION for name in extra_args)


def _check_flag(name: str, setting_names: set[str]) -> None:
    """Refuses a flag that lrl sets, in each spelling that vLLM reads as that flag."""
    where = f"strategy.server.extra_args: {name!r}"
    if not FLAG.fullmatch(name):
        raise ConfigError(
            f"{where} is no name of a flag of vLLM: give the name alone, and its value."
        )
    flag = _switch(name)
    # argparse takes the beginning of a flag's name for the flag.
    if taken := sorted(one for one in setting_names if one.startswith(flag)):
        setting = f"strategy.server.{taken[0].replace('-', '_')}"
        raise ConfigError(f"{where} is a setting besides extra_args, {setting}; set it there.")
    if any(_switch(one).startswith(flag) for one in OWNED):
        raise ConfigError(
            f"{where} is set by lrl, which needs the model's own log-probs, weights that it can "
            "replace, and no way around the run's token. Leave it out."
        )


def _check_speculation(extra_args: dict[str, Any]) -> None:
    """Refuses speculative decoding that changes the distribution of the tokens."""
    where = "strategy.server.extra_args: speculative-config"
    for name, value in extra_args.items():
        if _switch(name) not in SPECULATION:
            continue
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = json.loads(value)
        if dashed(name) != "speculative-config" or not isinstance(value, dict):
            raise ConfigError(
                f"{where} is given as {name!r}: give it as one mapping, {{method: ..., ...}}."
            )
        sampler = {dashed(key): found for key, found in value.items()}.get(
            "rejection-sample-method", "standard"
        )
        if sampler not in EXACT_SAMPLERS:
            raise ConfigError(
                f"{where} has rejection_sample_method {sampler!r}, which accepts tokens that the "
                f"policy would not have drawn so often. Choose from {', '.join(EXACT_SAMPLERS)}."
            )


def _switch(name: str) -> str:
    """Returns the name of a flag without its on or off switch, and without a key of its mapping."""
    flag = dashed(name).partition(".")[0].removeprefix("no-")
    return flag.removeprefix("enable-").removeprefix("disable-")


def dashed(name: str) -> str:
    """Returns a flag's name in vLLM's spelling, without the leading dashes."""
    return name.strip("-").replace("_", "-")


def as_flags(values: dict[str, Any]) -> Iterator[str]:
    """Yields command-line words; a list is several words, a mapping is JSON, None leaves vLLM's
    default."""
    for name, value in values.items():
        if value is not None:
            yield f"--no-{name}" if value is False else f"--{name}"
        if isinstance(value, dict):
            yield json.dumps(value)
        elif isinstance(value, list):
            yield from map(str, value)
        elif value is not None and not isinstance(value, bool):
            yield str(value)


def cpu_flags(settings: ServerSettings) -> dict[str, Any]:
    """Returns vLLM's flags on a machine without a GPU."""
    return {
        "enforce-eager": True,
        # An engine spins while a separate worker computes: on two cores the quickstart took 1.1
        # times as long.
        "distributed-executor-backend": "uni" if settings.tensor_parallel_size == 1 else "mp",
        # vLLM has 128, and its attention reads whole blocks: responses of 64 tokens took 1.25 times
        # as long.
        "block-size": 32,
        "kv-cache-memory-bytes": int(settings.kv_cache_gib * 2**30),
    }


def cpu_environment(settings: ServerSettings, overrides: dict[str, str]) -> dict[str, str]:
    """Returns environment variables on a machine without a GPU; the user's own in `overrides` go
    before the defaults, and behind the settings."""
    defaults = {
        # vLLM's own choice pins a worker to all cores but the last: on a small machine all
        # generators to one core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(half_of_the_cores()),
        # Keys and values in pages of 2 MiB, on systems that give them on request. With them, on
        # both sides, the engine took 2.9 s of CPU for a step of `benchmarks.overlap`'s long
        # responses next to a busy trainer, without 3.2.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        # vLLM compiles a helper of log-probs at the first request, in eager mode, too. It took 12 s
        # of every start, and without a C++ compiler every request failed.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # see `lrl.vllm_plugin.plugin`
    }
    found = {name: overrides.get(name, value) for name, value in defaults.items()}
    if settings.threads is not None:
        found["OMP_NUM_THREADS"] = str(settings.threads)
    # Without it vLLM insists on a separate worker, so that it can set the worker's threads.
    return found | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
