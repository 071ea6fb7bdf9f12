"""A quantised model's folder written whole: no more of it is in memory than one file of the result.

The numbers follow from the definition of each form:

    mxfp4    OCP Microscaling Formats (MX) 1.0: 32 numbers E2M1 share a scale E8M0, two in a byte, the low half first.
             gpt-oss stores its experts so, the other way round than the whole model has them.
    fp8      E4M3 or E5M2, times the scale of its block (`weight_block_size`), or times one scale (null).

Before anything is written, transformers' own loader is given the names and shapes to come, on the
meta device: every weight of the model must be there, in its shape, and none may be left over.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging

from lrl.errors import ConfigError
from lrl.training.export import with_dtype
from lrl.training.model import Dtype, open_meta_model
from lrl.training.model_files import is_small
from lrl.training.quantisation import FILES, FLOATS, FORMS, KEYS, PACKED, quant_method, remedy
from lrl.training.weight_files import Stored, listed, stored_tensors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number of each half of a byte (MX 1.0, table 5)."""
BLOCKS, SCALES = "_blocks", "_scales"
FP8_SCALES = ("_scale_inv", "_scale")
"""Endings of a scale's name, after its tensor's; both kinds are factors."""
ACTIVATION_SCALES = ("input_scale", "activation_scale", "q_scale", "k_scale", "v_scale", "kv_scale")
"""The ends of names of scales that a model of whole numbers has no use for."""
INDEX = ".safetensors.index.json"
FILE_BYTES = 4 * 2**30
"""Size of one file of the result."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor of the result."""

    name: str
    shape: tuple[int, ...]
    source: Stored
    stored_as: str
    """The source's name."""
    scale: str | None = None
    """The name of its scale; None for a tensor that is not quantised."""


def dequantize(folder: Path, out: Path, dtype: Dtype) -> int:
    """Writes the model of a quantised folder into another one, whole, with its tokenizer and all
    other small files.

    Tensors that are not quantised stay as they are with bfloat16, and become float32 with float32.

    Args:
        folder: The quantised folder.
        out: The new one; it must be new or empty.
        dtype: Dtype of the weights that were quantised. float32 rounds nothing.

    Returns:
        The number of tensors that were quantised.

    Raises:
        ConfigError: The folder is not quantised, or in another form than `FORMS`; a tensor of the
            model would be missing, of another shape, or left over; or there is no room.
        OSError: The result cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} holds something already: give a new folder.")
    settings = _settings(folder)
    try:
        tensors = stored_tensors(folder)
    except ValueError as error:
        raise ConfigError(
            f"{folder}: {error}. Copy or download the folder again, whole."
        ) from error
    planned = sorted(plan(folder, tensors, settings["quant_method"]), key=lambda one: one.name)
    config = _whole_config(folder, dtype)
    _check_all_there(folder, planned, config)
    size = sum(_bytes(one, dtype) for one in planned)
    _check_room(out, size)
    out.mkdir(parents=True, exist_ok=True)
    parts = list(_parts(planned, dtype))
    where: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        of = f"-{number:05}-of-{len(parts):05}" if len(parts) > 1 else ""
        found = {one.name: _read(one, tensors, settings, dtype) for one in part}
        save_file(found, out / f"model{of}.safetensors", {"format": "pt"})
        where |= dict.fromkeys(found, f"model{of}.safetensors")
    if len(parts) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (out / f"model{INDEX}").write_text(json.dumps(index, indent=2, sort_keys=True))
    _copy_small_files(folder, out)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return sum(one.scale is not None for one in planned)


def _copy_small_files(folder: Path, out: Path) -> None:
    for file in folder.iterdir():
        weights = not is_small(file.name) or file.name.endswith(INDEX)
        if file.is_file() and not weights and file.name not in FILES:
            shutil.copyfile(file, out / file.name)


def plan(folder: Path, tensors: Mapping[str, Stored], method: str) -> Iterator[Whole]:
    """Yields the tensors of the result; raises ConfigError for one that is stored in a way that is
    not known."""
    used = set()
    for name, one in tensors.items():
        if method == "mxfp4" and name.endswith(BLOCKS):
            scale = name.removesuffix(BLOCKS) + SCALES
            experts, rows, groups, half = one.shape
            whole = Whole(
                name.removesuffix(BLOCKS),
                (experts, 2 * groups * half, rows),
                source=one,
                stored_as=name,
                scale=scale,
            )
        elif method == "fp8" and one.numbers.startswith(("F8_E4M3", "F8_E5M2")):
            scale = next(
                (name + end for end in FP8_SCALES if name + end in tensors), name + FP8_SCALES[0]
            )
            whole = Whole(name, one.shape, source=one, stored_as=name, scale=scale)
        else:
            continue
        if scale not in tensors:
            raise ConfigError(
                f"{folder}: {name} is stored as {one.numbers}, and there is no {scale} with its "
                "scale."
            )
        used |= {name, scale}
        yield whole
    for name in sorted(tensors.keys() - used):
        one = tensors[name]
        if name.endswith(ACTIVATION_SCALES):
            continue
        if one.numbers not in FLOATS and (one.numbers[0] == "F" or name.endswith(PACKED)):
            raise ConfigError(
                f"{folder}: {name} is stored as {one.numbers}, in a way that lrl does not know of "
                f"{method}. Take the model in bfloat16 from which it was made."
            )
        yield Whole(name, one.shape, one, name)


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the experts' matrices, [experts, inputs, outputs]; bfloat16 holds every number
    exactly.

    Args:
        blocks: uint8 [experts, outputs, inputs / 32, 16], two numbers a byte.
        scales: uint8 [experts, outputs, inputs / 32], exponents of two, 127 above.
        dtype: Of the result.
    """
    experts, rows, groups, half = blocks.shape
    numbers = torch.tensor(E2M1)
    factors = scales.view(torch.float8_e8m0fnu)
    whole = torch.empty(experts, 2 * groups * half, rows, dtype=dtype)
    # One at a time: float32 is large.
    for expert, (block, factor) in enumerate(zip(blocks, factors, strict=True)):
        pairs = torch.stack((block & 0xF, block >> 4), dim=-1).flatten(-2)
        found = numbers[pairs.int()] * factor.float()[..., None]
        whole[expert] = found.reshape(rows, -1).T
    return whole


def from_fp8(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    """Returns a weight times its scales, of the weight's shape.

    Args:
        weight: float8 [..., outputs, inputs].
        scale: One for each block, [..., blocks of outputs, blocks of inputs], the last of which may
            be cut; or one for all, [] or [..., 1, 1]. uint8 and float8 are exponents of two (E8M0).
        block: Rows and columns of a block; None if there is one scale.
        dtype: Of the result.

    Raises:
        ValueError: The scales do not fit to the weight.
    """
    factor = (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
    if factor.numel() > 1 and tuple(factor.shape[-2:]) != (1, 1):
        rows, columns = weight.shape[-2:]
        wanted = (
            None if block is None else (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
        )
        if block is None or tuple(factor.shape[-2:]) != wanted:
            raise ValueError(
                f"the scales are {list(factor.shape)} for a weight of {list(weight.shape)}, and "
                f"weight_block_size is {block}"
            )
        factor = factor.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(
            block[1], -1
        )[..., :columns]
    return (weight.float() * factor).to(dtype)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the `quantization_config` of a folder in one of `FORMS`."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds no model (there is no {folder / 'config.json'}): give a quantised "
            "folder."
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: config.json cannot be read: {' '.join(str(error).split()):.300}"
        ) from error
    method = quant_method(config)
    if method is None:
        raise ConfigError(f"{folder} is not quantised by its config.json: give it to lrl as it is.")
    if method not in FORMS:
        raise ConfigError(
            f"{folder} is quantised (quant_method {method}). {remedy(str(folder), method)}"
        )
    if method == "mxfp4" and config.model_type != "gpt_oss":
        raise ConfigError(
            f"{folder}: lrl knows mxfp4 in the layout of gpt_oss alone, and this is "
            f"{config.model_type}."
        )
    entry = getattr(config, KEYS[0], None) or getattr(config.get_text_config(), KEYS[0])
    return {**(entry if isinstance(entry, dict) else vars(entry)), "quant_method": method}


def _whole_config(folder: Path, dtype: Dtype) -> dict[str, Any]:
    """Returns config.json without a word on quantisation."""
    return with_dtype(
        json.loads((folder / "config.json").read_text(encoding="utf-8")), dtype, without=KEYS
    )


def _check_all_there(folder: Path, planned: list[Whole], config: dict[str, Any]) -> None:
    """Raises ConfigError unless transformers would open the model with these tensors, each of its
    own and no other."""
    with TemporaryDirectory(prefix="lrl-config-") as scratch:
        Path(scratch, "config.json").write_text(json.dumps(config))
        network: Any = open_meta_model(scratch, None)
    found = {one.name: torch.empty(one.shape, device="meta") for one in planned}
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong is said below
    try:
        _, report = type(network).from_pretrained(
            None,
            config=network.config,
            state_dict=found,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except RuntimeError as error:  # weights that transformers puts together do not fit together
        raise ConfigError(
            f"{folder} does not hold the model of its config.json: {error}"
        ) from error
    finally:
        logging.set_verbosity(level)
    wrong = {
        "lacks": sorted(report["missing_keys"]),
        "has in another shape than its config.json says": sorted(
            name for name, *_ in report["mismatched_keys"]
        ),
        "has, and its model does not": sorted(report["unexpected_keys"]),
    }
    if faults := "; ".join(f"{fault}: {listed(names)}" for fault, names in wrong.items() if names):
        raise ConfigError(f"{folder} does not hold the model of its config.json. It {faults}.")


def _read(
    one: Whole, tensors: Mapping[str, Stored], settings: Mapping[str, Any], dtype: Dtype
) -> Tensor:
    weight = _tensor(one.source.file, one.stored_as)
    wanted = getattr(torch, dtype)
    if one.scale is None:
        return weight.float() if dtype == "float32" and one.source.numbers in FLOATS else weight
    scale = _tensor(tensors[one.scale].file, one.scale)
    if settings["quant_method"] == "mxfp4":
        return from_mxfp4(weight, scale, wanted)
    block = settings.get("weight_block_size")
    try:
        return from_fp8(weight, scale, None if block is None else tuple(block), wanted)
    except ValueError as error:
        raise ConfigError(f"{one.source.file}: {one.stored_as}: {error}.") from error


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
    return found


def _parts(planned: list[Whole], dtype: Dtype) -> Iterator[list[Whole]]:
    """Yields the tensors of each file."""
    part: list[Whole] = []
    for one in planned:
        if part and sum(_bytes(each, dtype) for each in part) + _bytes(one, dtype) > FILE_BYTES:
            yield part
            part = []
        part.append(one)
    yield part


def _bytes(one: Whole, dtype: Dtype) -> int:
    return math.prod(one.shape) * (
        4 if dtype == "float32" or one.source.numbers in ("F32", "F64") else 2
    )


def _check_room(out: Path, needed: int) -> None:
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        raise ConfigError(
            f"{out}: the model takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free: "
            "take another folder."
        )
