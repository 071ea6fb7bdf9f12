"""The functions of `torch.cuda` as the stand-in device answers them."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

GIB = 2**30
PROPERTIES = SimpleNamespace(
    **{"name": "stand-in", "major": 9, "minor": 0, "total_memory": 80 * GIB},
    **{"multi_processor_count": 132, "uuid": "GPU-stand-in"},
)


def _answers(value: Any) -> Any:
    return lambda *_, **__: value


CALLS: dict[str, Any] = {
    "is_available": _answers(True),
    "is_initialized": _answers(True),
    "_is_compiled": _answers(True),
    "_lazy_init": _answers(None),
    "device_count": _answers(1),
    "current_device": _answers(0),
    "set_device": _answers(None),
    "empty_cache": _answers(None),
    "get_device_properties": _answers(PROPERTIES),
    "get_device_capability": _answers((PROPERTIES.major, PROPERTIES.minor)),
    "get_device_name": _answers(PROPERTIES.name),
    "is_bf16_supported": _answers(True),
    "is_current_stream_capturing": _answers(False),
    "mem_get_info": _answers((79 * GIB, 80 * GIB)),
    "memory_allocated": _answers(0),
    "max_memory_allocated": _answers(0),
    "memory_reserved": _answers(0),
    "memory_stats": _answers(defaultdict(int)),
    "reset_peak_memory_stats": _answers(None),
    "manual_seed": _answers(None),
    "manual_seed_all": _answers(None),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": _answers([]),
    "set_rng_state": _answers(None),
    "set_rng_state_all": _answers(None),
}
"""By name. What draws without a generator of its own uses the CPU's, so its numbers are the
CPU's."""
