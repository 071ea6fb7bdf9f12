"""The safetensors files of a model's folder, by their headers: no weight is loaded. Quantised
weights are refused.

Generators get whole weights at each sync. transformers opens some quantised folders, but quantises
again on its way back to the names of a checkpoint: syncs and exports would have rounded weights, or
leave weights out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that make up the model; none if its weights have another
    format. Raises ValueError if there are no weights, or files are missing; the text continues the
    folder's name."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = sorted(folder / name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index.name} is not an index of weights") from error
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(f"it lacks {listed(missing)}, which its index names")
        return files
    if not any(folder.glob("pytorch_model*.bin*")):
        raise ValueError(f"it has no weights, neither {single.name} nor {index.name}")
    return []


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns every tensor's shape and number format, such as BF16, by name; raises ValueError as
    `weight_files`, or for a damaged file."""
    found = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    one = tensors.get_slice(name)
                    found[name] = tuple(one.get_shape()), one.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file.name} cannot be read ({error})") from error
    return found


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_whole(folder: str, config: Any) -> None:
    """Raises ConfigError if the weights of a folder or hub name are quantised, by transformers'
    config and, on this machine, by its files."""
    if (method := quant_method(config)) is not None:
        raise ConfigError(f"model={folder!r} is quantised (quant_method {method}). {REMEDY}")
    if found := _stored(hub.on_this_machine(folder)):
        name, numbers = found
        raise ConfigError(
            f"model={folder!r} is quantised: {name} is stored as {numbers}, without a "
            f"quantization_config in config.json. {REMEDY}"
        )


def quant_method(config: Any) -> str | None:
    """Returns a config's `quant_method`, `unknown` if unnamed; None for whole weights."""
    for part in (config, config.get_text_config()):
        if (entry := getattr(part, "quantization_config", None)) is not None:
            settings = entry if isinstance(entry, Mapping) else vars(entry)
            method = settings.get("quant_method", "unknown")
            return str(getattr(method, "value", method))
    return None


def _stored(local_folder: Path | None) -> tuple[str, str] | None:
    """Returns the first weight in another number format than `FLOATS`, and that format."""
    try:
        tensors = {} if local_folder is None else stored_tensors(local_folder)
    except ValueError:
        return None  # the checks of the folder, or transformers, say what is wrong with the files
    for name, (_, numbers) in tensors.items():
        if numbers not in FLOATS and (numbers[0] == "F" or name.endswith(PACKED)):
            return name, numbers
    return None
