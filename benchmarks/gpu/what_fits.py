"""Which policies fit which GPUs, and with which settings: a table, computed from shapes alone.

    python -m benchmarks.gpu.what_fits
    python -m benchmarks.gpu.what_fits --micro-batch-tokens 16384 --policies Qwen3-4B

Each GPU keeps 4 GB for CUDA's context in both processes (0.5 GB each), NCCL's buffers, CUDA graphs
and the allocator's loss. Nothing of it was measured.
"""

from __future__ import annotations

from typing import Any

from benchmarks import arguments
from benchmarks.records import markdown
from lrl.planning.model_shape import ModelShape, read_shape
from lrl.planning.roofline import (
    GB,
    Device,
    Held,
    RooflineGenerator,
    parse_cluster,
    training_memory,
    usable,
)

CARDS = {"24 GB": "RTX4090", "40 GB": "A100-40GB", "80 GB": "H100"}


def qwen(kind: str, *sizes: int, tied: bool = True, **more: int) -> ModelShape:
    """Returns the shape of a Qwen from its layers, hidden size, heads, heads of keys, and width of
    the feed-forward network."""
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    config: dict[str, Any] = dict(zip((*names, "intermediate_size"), sizes, strict=True))
    of_all = {"model_type": kind, "vocab_size": 151_936, "tie_word_embeddings": tied}
    return read_shape(of_all | config | more)


POLICIES = {
    "Qwen2.5-0.5B": qwen("qwen2", 24, 896, 14, 2, 4864),
    "Qwen2.5-1.5B": qwen("qwen2", 28, 1536, 12, 2, 8960),
    "Qwen3-1.7B": qwen("qwen3", 28, 2048, 16, 8, 6144, head_dim=128),
    "Qwen2.5-3B": qwen("qwen2", 36, 2048, 16, 2, 11_008),
    "Qwen3-4B": qwen("qwen3", 36, 2560, 32, 8, 9728, head_dim=128),
    "Qwen2.5-7B": qwen("qwen2", 28, 3584, 28, 4, 18_944, tied=False, vocab_size=152_064),
    "Qwen3-8B": qwen("qwen3", 36, 4096, 32, 8, 12_288, tied=False, head_dim=128),
}
SETTINGS = {
    "float32": Held(),
    "float32, nothing recomputed": Held(recompute_every=0),
    "bfloat16": Held(dtype="bfloat16"),
    "bfloat16, every second layer": Held(dtype="bfloat16", recompute_every=2),
    "LoRA on bfloat16": Held(dtype="bfloat16", lora_rank=16),
}
GENERATORS_OWN = 2 * GB
"""vLLM's activations and CUDA graphs, within its share: a guess."""
SHARDS = (2, 4)


def generator_bytes(shape: ModelShape, responses: int, tokens: int) -> float:
    """Returns the bytes of a generator that writes `responses` at once, with so many tokens each."""
    memory = RooflineGenerator(shape=shape, cluster=parse_cluster("1xH100")).memory
    return memory.bytes_for(responses * tokens) + GENERATORS_OWN


def largest_share(device: Device, trainer: float) -> float:
    """Returns the largest `gpu_memory_utilization` beside a trainer, in steps of 0.05."""
    return int(20 * (usable(device) - trainer) / device.memory) / 20


def cell(shape: ModelShape, held: Held, device: Device, args: Any) -> str:
    def trainer(shards: int) -> float:
        return training_memory(shape, shards, 1, held).bytes_for(args.micro_batch_tokens)

    share = largest_share(device, trainer(1))
    if share * device.memory >= generator_bytes(shape, args.responses, args.tokens):
        return f"shared, {share:.2f}"
    if share >= 0:
        return "trainer alone"
    fits = (shards for shards in SHARDS if trainer(shards) <= usable(device))
    return next((f"{shards} train" for shards in fits), "no")


def table(args: Any) -> str:
    devices = {name: parse_cluster(f"1x{card}").device for name, card in CARDS.items()}
    rows = []
    for name in args.policies or POLICIES:
        for settings, held in SETTINGS.items():
            memory = training_memory(POLICIES[name], 1, 1, held)
            trainer = f"{memory.bytes_for(args.micro_batch_tokens) / GB:.0f}"
            cells = [cell(POLICIES[name], held, device, args) for device in devices.values()]
            rows.append([name, settings, trainer, *cells])
    return markdown(["policy", "weights", "trainer GB", *devices], rows)


def main() -> None:
    parser = arguments.make_parser("gpu.what_fits", __doc__)
    arguments.add(
        parser,
        micro_batch_tokens=(8192, "as data.micro_batch_tokens"),
        responses=(64, "at once, of a generator that shares the GPU"),
        tokens=(2048, "of each"),
    )
    parser.add_argument("--policies", nargs="+", choices=POLICIES, help="(all)")
    print(table(parser.parse_args()))


if __name__ == "__main__":
    main()
