"""Quantised weights are refused, by a model's config and by the headers of its files: no weight is
loaded.

Generators get whole weights at each sync. transformers opens some quantised folders, but quantises
again on its way back to the names of a checkpoint: syncs and exports would have rounded weights, or
leave weights out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lrl.errors import ConfigError
from lrl.system import hub

REMEDY = "Take the bfloat16 copy from which it was made."
FLOATS = ("F64", "F32", "F16", "BF16")
"""Numbers that are weights as they are, by their names in a file of safetensors."""
PACKED = ("weight", "qweight", "weight_packed", "weight_quantized", "_blocks", "_proj")
"""The ends of names of weights; a buffer of integers, such as a mask, has another."""


def check_whole(folder: str, config: Any) -> None:
    """Raises ConfigError if the weights of a folder or hub name are quantised, by transformers'
    config and, on this machine, by its files."""
    for part in (config, config.get_text_config()):
        if (entry := getattr(part, "quantization_config", None)) is not None:
            settings = entry if isinstance(entry, Mapping) else vars(entry)
            method = f"quant_method {settings.get('quant_method', 'unknown')}"
            raise ConfigError(f"model={folder!r} is quantised ({method}). {REMEDY}")
    here = hub.on_this_machine(folder)
    if here is not None and (found := _quantised(here)):
        name, numbers = found
        raise ConfigError(
            f"model={folder!r} is quantised: {name} is stored as {numbers}, without a "
            f"quantization_config in config.json. {REMEDY}"
        )


def _quantised(folder: Path) -> tuple[str, str] | None:
    """Returns the first weight in another number format than `FLOATS`, and that format."""
    try:
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    numbers = tensors.get_slice(name).get_dtype()
                    if numbers not in FLOATS and (numbers[0] == "F" or name.endswith(PACKED)):
                        return name, numbers
    except (OSError, SafetensorError):
        return None  # transformers says what is wrong with the files
    return None
