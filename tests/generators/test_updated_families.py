"""An update reaches every layer of every family of models, on vLLM's own engine; so do adapters.

    python -m tests.generators.test_updated_families FOLDER

is the program that the test runs. One process has all families: an engine without a server takes a
second or two. It prints a line of JSON for each: the mean difference between vLLM's log-probs and
transformers' in nats a token as it was loaded, after two updates, and after an update by adapters,
and by how much the second one and the adapters changed what transformers computes.

Covers lrl/vllm_plugin/engines.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from lrl.generators.settings import ServerSettings, cpu_environment
from lrl.training.lora import LoRA, adapter_tensors
from lrl.training.pieces import checkpoint_weights
from lrl.weights.shared_memory import SharedMemory
from tests.tiny_policies import SERVED, adapted, response_logprobs, save_tiny
from tests.weights.whole_weights import WholeWeights

SAME = 1e-5
"""Nats a token between two programs that compute the same in float32; most were off by 2e-7."""
MERGED = 1e-4
"""The same for adapters, whose product is large here: Gemma2 was off by 4e-5."""
SAME_IN_EIGHT_BITS = 0.03
"""The same when one of them has its matrices in float8; it was off by 0.006 as loaded, and by 0.012
after an update."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 72},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "phi3": {},
    "qwen2-bf16": {"tie_word_embeddings": True},
    "qwen3-fp8": {"tie_word_embeddings": True},
}
"""Settings of each family beside `SERVED`. The files of one with `-bf16` are in bfloat16, and all
compute in float32; with `-fp8` the engine quantises what it gets."""
TOKENS = [5 + (7 * place) % 250 for place in range(48)]


def test_after_an_update_every_family_computes_what_the_policy_computes(tmp_path: Path) -> None:
    own = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_PLUGINS": "lrl",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "tests.generators.test_updated_families", str(tmp_path)]
    environment = own | cpu_environment(ServerSettings(), dict(own))
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [line["family"] for line in lines] == list(FAMILIES)
    for line in lines:
        most = SAME_IN_EIGHT_BITS if line["family"].endswith("-fp8") else SAME
        assert line["loaded"] <= most and line["updated"] <= most, line
        assert line["changed"] > 0.1, "so a layer that no update reached would be seen"
        assert line["adapted"] <= max(most, MERGED), line
        assert line["changed_by_adapters"] > 2 * most, "so unmerged ones would be seen"


class Version(NamedTuple):
    """Weights by their names in a checkpoint, or adapters; and the log-probs of all tokens but the
    first."""

    weights: dict[str, torch.Tensor]
    logprobs: list[float]


@torch.no_grad()
def versions(folder: str) -> Iterator[Version]:
    """The model as it is; two that a step could have made, but with more change, in every weight,
    head and experts included; and the first one with adapters of all linear layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    for _ in range(3):
        weights = {name: weight.clone() for name, weight in checkpoint_weights(model)}
        yield Version(weights, logprobs_of(model))
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    LoRA(rank=4).add_to(model)
    adapted(model)
    yield Version(dict(adapter_tensors(model)), logprobs_of(model))


def logprobs_of(model: Any) -> list[float]:
    found: list[float] = response_logprobs(model, TOKENS[:1], TOKENS[1:]).tolist()
    return found


def found(engine: Any, salt: str) -> list[float]:
    """Returns the same from vLLM."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": TOKENS, "cache_salt": salt}
    (response,) = engine.generate(
        prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
    )
    return [
        entry[token].logprob
        for entry, token in zip(response.prompt_logprobs[1:], TOKENS[1:], strict=True)
    ]


def update(engine: Any, weights: dict[str, torch.Tensor], name: str) -> None:
    """Does a sync, from the stage to the finish, by the worker calls of a server."""
    transport = SharedMemory(WholeWeights(lambda: iter(weights.items())), name)
    calls: Any = Calls(engine)
    try:
        transport.connect(calls)
        transport.stage()
        transport.send(calls)
    finally:
        transport.close()


class Calls:
    """A control plane whose one generator is an engine in this process."""

    def __init__(self, engine: Any) -> None:
        self.call = engine.collective_rpc

    def init(self, info: Any) -> None:
        self.call("init_weight_transfer_engine", args=(info,))

    def update(self, info: Callable[[Any], Any]) -> None:
        self.call("start_weight_update")
        self.call("update_weights", args=(info(None),))
        self.call("finish_weight_update")


def off(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def measure(family: str, folder: str) -> dict[str, Any]:
    """Returns one family's line."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # vLLM looks at a class that is new to the machine in a process of its own, which takes nine
    # seconds to start.
    registry._run_in_subprocess = lambda look: look()
    quantised = family.endswith("-fp8")
    save_tiny(family.partition("-")[0], Path(folder), **SERVED | FAMILIES[family])
    if family.endswith("-bf16"):
        AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    # Before vLLM, which changes some of transformers' classes.
    loaded, first, second, adapters = versions(folder)
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16" if quantised else "float32",
        quantization="fp8_per_channel" if quantised else None,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=2**25,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": "shared_memory"},
    )
    line = {"family": family, "loaded": off(found(engine, "loaded"), loaded.logprobs)}
    for name, version in (("first", first), ("updated", second), ("adapted", adapters)):
        update(engine, version.weights, f"{os.getpid()}-{family}-{name}")
        line[name] = off(found(engine, name), version.logprobs)
    # Left to the garbage collector, a dense family's groups of processes now and then stood for the
    # next one's experts.
    del engine
    cleanup_dist_env_and_memory()
    line["changed"] = off(first.logprobs, second.logprobs)
    line["changed_by_adapters"] = off(adapters.logprobs, loaded.logprobs)
    return line


if __name__ == "__main__":
    for family in FAMILIES:
        print(json.dumps(measure(family, f"{sys.argv[1]}/{family}")), flush=True)
