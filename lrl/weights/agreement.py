"""How far the log-probs of two programs may differ that have the same weights.

That depends on the less exact of their number formats, and on the model: bfloat16 moved the
log-probs of a tiny random model by 0.0006 nats a token, and those of SmolLM2-135M by 0.045. A limit
for all models would pass 0.18 nats that vLLM and transformers make of Phi-3's positions. So the
limit is a few times what the format's rounding does to this model (`lrl.training.rounding`), within
fixed bounds. The mean counts and not the largest difference, which is that of a token that the
model takes for all but impossible. `benchmarks/agreement.py` measures both.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from lrl.training.rounding import UNIT, Rounded

LARGEST = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25, "quantised": 0.5}
"""Largest mean difference in nats per token, for any model; from the most exact format to the
least. A tensor that is missing made 0.75 or more."""
LEAST = {"float32": 3e-4, "float16": 5e-4, "bfloat16": 2e-3, "quantised": 5e-3}
"""A difference that is never held against a generator, however little its model rounds."""
TIMES = 4.0
"""How many times the rounding of its model a program may be off: real ones were off by 0.8 to 1.2
times."""
PART = 64
"""Tokens in the first part of a long text, and the least in any; each further part is three times
as long as all before it."""
QUANTISED = ("fp8", "int", "nvfp4", "turboquant")
"""Words in the value of `kv-cache-dtype` that stand for eight bits and less."""


def less_exact(*formats: str) -> str:
    """Returns the least exact of number formats; `quantised` stands for all of eight bits and
    less."""
    return max(formats, key=list(LARGEST).index)


def format_of(settings: Any) -> str:
    """Returns the number format in which a generator computes, from its settings
    (`ServerSettings`)."""
    options = {
        name.strip("-").replace("_", "-"): str(value) for name, value in settings.extra_args.items()
    }
    if settings.quantization or any(
        word in options.get("kv-cache-dtype", "") for word in QUANTISED
    ):
        return "quantised"
    return str(settings.dtype)


def rounds_as(dtype: str) -> Rounded | None:
    """Returns the format whose rounding is measured on the model; None for one that has a fixed
    limit alone."""
    return next((known for known in UNIT if known == dtype), None)


def tolerance(dtype: str, spread: float | None) -> float:
    """Returns the largest mean difference in nats per token.

    Args:
        dtype: The less exact format of the two programs.
        spread: Mean difference that the format's rounding makes of the model's log-probs, in nats
            per token; None if it is not known.
    """
    return (
        LARGEST[dtype] if spread is None else min(LARGEST[dtype], max(LEAST[dtype], TIMES * spread))
    )


def parts(count: int) -> Iterator[slice]:
    """Yields the parts of a text in which the mean is compared: what differs far behind would be
    lost in the whole."""
    start, end = 0, PART
    while end + PART <= count:
        yield slice(start, end)
        start, end = end, 4 * end
    yield slice(start, count)


def mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the mean absolute difference of two equally long lists."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
