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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers

from lrl.generators.settings import ServerSettings, cpu_environment
from lrl.training.lora import LoRA, adapter_tensors
from lrl.training.pieces import checkpoint_weights
from lrl.weights.shared_memory import SharedMemory
from tests.weights.whole_weights import WholeWeights

SAME = 1e-5
"""Nats a token between two programs that compute the same in float32; most were off by 2e-7."""
MERGED = 1e-4
"""The same for adapters, whose product is large here: Gemma2 was off by 4e-5."""
SAME_IN_EIGHT_BITS = 0.03
"""The same when one of them has its matrices in float8; it was off by 0.006 as loaded, and by 0.012
after an update."""
TINY = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 1}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 72,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": GROUPED | EXPERTS | {"head_dim": 32},
    "Gemma2": GROUPED | GEMMA,
    "Phi3": GROUPED,
    "Qwen2-bf16": GROUPED | {"tie_word_embeddings": True},
    "Qwen3-fp8": GROUPED | {"tie_word_embeddings": True, "head_dim": 32},
}
"""Settings of each family beside `TINY`; one that is new to vLLM takes ten seconds."""
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
        most = limit(line)
        assert line["loaded"] <= most and line["updated"] <= most, line
        assert line["changed"] > 0.1, "so a layer that no update reached would be seen"
        assert line["adapted"] <= max(most, MERGED), line
        assert line["changed_by_adapters"] > 2 * most, "so unmerged ones would be seen"


def limit(line: dict[str, Any]) -> float:
    return SAME_IN_EIGHT_BITS if line["family"].endswith("-fp8") else SAME


def make(family: str) -> Any:
    """Makes a model with random weights in float32; of a family whose name has `-bf16`, numbers of
    bfloat16."""
    torch.manual_seed(0)
    kind, _, files = family.partition("-")
    config = getattr(transformers, f"{kind}Config")(**TINY | FAMILIES[family])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    return model.bfloat16().float() if files == "bf16" else model


@dataclass
class Version:
    """Returns weights by their names in a checkpoint, and their log-probs of all tokens but the
    first."""

    weights: dict[str, torch.Tensor]
    logprobs: list[float]


@torch.no_grad()
def versions(model: Any) -> Iterator[Version]:
    """Those as they are, and two that a step could have made, but with more change: in every
    weight, head and experts included."""
    while True:
        yield Version(
            {name: weight.clone() for name, weight in checkpoint_weights(model)}, logprobs_of(model)
        )
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)


@torch.no_grad()
def adapted(model: Any) -> Version:
    """The adapters of all linear layers, and what the model computes with them."""
    LoRA(rank=4).add_to(model)
    for name, weight in model.named_parameters():
        if ".lora_B." in name:
            weight += 0.1 * torch.randn_like(weight)
    return Version(dict(adapter_tensors(model)), logprobs_of(model))


def logprobs_of(model: Any) -> list[float]:
    logits = model(torch.tensor([TOKENS])).logits[0, :-1].log_softmax(-1)
    found: list[float] = logits.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()
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


def update(engine: Any, version: Version, name: str) -> None:
    """Does a sync, from the stage to the finish, by the worker calls of a server."""
    weights = WholeWeights(lambda: iter(version.weights.items()))
    transport, calls = SharedMemory(weights, name), Calls(engine)
    try:
        transport.connect(calls)  # type: ignore[arg-type]
        transport.stage()
        transport.send(calls)  # type: ignore[arg-type]
    finally:
        transport.close()


class Calls:
    """A control plane whose one generator is an engine in this process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init(self, info: Any) -> None:
        self._engine.collective_rpc("init_weight_transfer_engine", args=(info,))

    def update(self, info: Callable[[Any], Any]) -> None:
        for call, *arguments in (
            ["start_weight_update"],
            ["update_weights", info(None)],
            ["finish_weight_update"],
        ):
            self._engine.collective_rpc(call, args=tuple(arguments))


def off(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def measure(family: str, folder: Path) -> dict[str, Any]:
    """Returns one family's line.

    In a family whose name ends in `-fp8` the engine quantises what it gets. In one that ends in
    `-bf16` the files are in bfloat16, and all compute in float32.
    """
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # vLLM looks at a class that is new to the machine in a process of its own, which takes nine
    # seconds to start.
    registry._run_in_subprocess = lambda look: look()
    quantised = family.endswith("-fp8")
    model = make(family)
    (make(family).bfloat16() if family.endswith("-bf16") else model).save_pretrained(
        folder / family
    )
    # Before vLLM, which changes some of transformers' classes.
    loaded, *updates = islice(versions(model), 3)
    adapters = adapted(make(family))
    engine = LLM(
        str(folder / family),
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
    for number, version in enumerate(updates):
        update(engine, version, f"{os.getpid()}-{family}-{number}")
    found_last, expected = found(engine, "updated"), updates[-1].logprobs
    update(engine, adapters, f"{os.getpid()}-{family}-adapters")
    found_adapted = found(engine, "adapted")
    # Left to the garbage collector, a dense family's groups of processes now and then stood for the
    # next one's experts.
    del engine
    cleanup_dist_env_and_memory()
    line |= {"updated": off(found_last, expected), "changed": off(updates[0].logprobs, expected)}
    changed_by_adapters = off(adapters.logprobs, loaded.logprobs)
    return line | {
        "adapted": off(found_adapted, adapters.logprobs),
        "changed_by_adapters": changed_by_adapters,
    }


def main() -> None:
    for family in FAMILIES:
        print(json.dumps(measure(family, Path(sys.argv[1]))), flush=True)


if __name__ == "__main__":
    main()
