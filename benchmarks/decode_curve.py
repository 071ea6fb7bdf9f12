"""Milliseconds a token by batch: the planner's roofline beside StreamRL's figure 6 (7B, H800,
vLLM).

    python -m benchmarks.decode_curve

Nothing is measured. The figure's context is not stated, so three are shown; the curve is read off
the plot. Shape: table 2 of the paper (8 key-value heads, as printed), with the feed-forward width
and vocabulary of Qwen2.5-7B.
"""

from __future__ import annotations

from lrl.planning.planner.devices import parse_cluster
from lrl.planning.planner.model_shape import read_shape
from lrl.planning.planner.roofline import RooflineGenerator

FIGURE_6 = {
    1: 8.4,
    2: 8.7,
    4: 8.9,
    8: 9.0,
    16: 9.4,
    32: 10.2,
    64: 11.7,
    128: 15.2,
    256: 22.0,
    512: 37.0,
}
MODEL = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 8,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}
CONTEXTS = (500, 1000, 2000)


def curve(context: int) -> dict[int, float]:
    """Returns the roofline's milliseconds for each batch of the figure, every response with
    `context` tokens."""
    costs = RooflineGenerator(shape=read_shape(MODEL), cluster=parse_cluster("8xH800"))
    return {batch: 1e3 * costs.decode_s(batch, batch * context) for batch in FIGURE_6}


def table() -> str:
    """Returns the table in Markdown."""
    rows = {"StreamRL, ms": FIGURE_6}
    rows |= {f"roofline, {context:,} tokens, ms": curve(context) for context in CONTEXTS}
    lines = [f"| batch | {' | '.join(map(str, FIGURE_6))} |", "|---" * (1 + len(FIGURE_6)) + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{ms:.1f}' for ms in row.values())} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
