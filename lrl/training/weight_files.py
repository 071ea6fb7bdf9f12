"""The safetensors files of a model's folder, and their headers' entry of each tensor. No weight is
loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    numbers: str
    """The dtype by its name in safetensors, such as BF16."""


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that make up the model; none if its weights have another
    format.

    Raises:
        ValueError: There are no weights, or files are missing; the text continues the folder's
            name.
    """
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            files = sorted(
                folder / name for name in set(json.loads(index.read_text())["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index.name} is not an index of weights") from error
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(f"it lacks {listed(missing)}, which its index names")
        return files
    if not any(folder.glob("pytorch_model*.bin*")):
        raise ValueError(f"it has no weights, neither {single.name} nor {index.name}")
    return []


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns every tensor of the model by its name; raises ValueError as `weight_files`, and for a
    damaged file."""
    found: dict[str, Stored] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    one = tensors.get_slice(name)
                    found[name] = Stored(file, tuple(one.get_shape()), one.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file.name} cannot be read ({error})") from error
    return found


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
