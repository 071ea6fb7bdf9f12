"""Whether a folder holds quantised weights, which are refused.

A policy is trained in float32 or bfloat16, and its generators get whole weights at each sync.
transformers opens some quantised folders, but its way back to the names of a checkpoint quantises
again: syncs and exports would have rounded weights, or leave weights out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lrl.errors import ConfigError
from lrl.system import hub
from lrl.training.weight_files import stored_tensors

REMEDY = "Take the bfloat16 copy from which it was made."
KEYS = ("quantization_config", "compression_config")
"""Entries of config.json that say how weights are quantised; the second is an older one of
compressed-tensors."""
FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of older tools next to config.json, and their `quant_method`."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Numbers that are weights as they are, by their names in a file of safetensors."""
PACKED = ("weight", "qweight", "weight_packed", "weight_quantized", "_blocks", "_proj")
"""The ends of names of weights; a buffer of integers, such as a mask, has another."""


def check_whole(folder: str, config: Any) -> None:
    """Checks that a model's weights are not quantised, by its config and, on this machine, by its
    files.

    Args:
        folder: Folder or hub name.
        config: Its config, of transformers.

    Raises:
        ConfigError: They are.
    """
    local_folder = hub.on_this_machine(folder)
    method = quant_method(config) or _by_files(local_folder)
    if method is None and (found := _stored(local_folder)):
        name, numbers = found
        raise ConfigError(
            f"model={folder!r} is quantised: {name} is stored as {numbers}, and config.json has no "
            f"quantization_config that says how. {REMEDY}"
        )
    if method is not None:
        raise ConfigError(
            f"model={folder!r} is quantised (quant_method {method}), and cannot be trained so. "
            f"{REMEDY}"
        )


def quant_method(config: Any) -> str | None:
    """Returns the `quant_method` that a config names, `unknown` if it names none; None for whole
    weights."""
    for part in (config, config.get_text_config()):
        for key in KEYS:
            if (entry := getattr(part, key, None)) is not None:
                settings = entry if isinstance(entry, Mapping) else vars(entry)
                method = settings.get(
                    "quant_method", "compressed-tensors" if key == KEYS[1] else "unknown"
                )
                return str(getattr(method, "value", method))
    return None


def _by_files(local_folder: Path | None) -> str | None:
    found = [
        method
        for file, method in FILES.items()
        if local_folder is not None and (local_folder / file).exists()
    ]
    return found[0] if found else None


def _stored(local_folder: Path | None) -> tuple[str, str] | None:
    """Returns the first weight in another number format than `FLOATS`, and that format."""
    try:
        tensors = {} if local_folder is None else stored_tensors(local_folder)
    except ValueError:
        return None  # the checks of the folder, or transformers, say what is wrong with the files
    for name, tensor in tensors.items():
        if tensor.numbers not in FLOATS and (tensor.numbers[0] == "F" or name.endswith(PACKED)):
            return name, tensor.numbers
    return None
