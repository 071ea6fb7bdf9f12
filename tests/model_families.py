"""How lrl trains each family of causal language models that transformers has, tried on tiny ones.

    python -m tests.model_families

A tiny model of the family, with random weights four times those of a new one, is opened as a run
opens it, in float32 on the CPU. The outcomes replace the table of docs/models.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import transformers
from transformers import PreTrainedModel

from lrl.errors import ConfigError
from lrl.training.lora import LoRA
from lrl.training.model import ModelSource
from lrl.training.trials import check_adapters, shared_by_responses
from tests.tiny_families import FAMILIES, save_tiny

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = "| responses | adapters | families | why |\n|---|---|---|---|\n"
SCALE = 4.0
TREES = "share prompts"
PACKED = "share rows"
ALONE = "one a row"
REFUSED, NOT_TRIED = "refused", "not tried"
KINDS = (TREES, PACKED, ALONE, REFUSED, NOT_TRIED)
ALL, NONE = "all", "none"
ROW = re.compile(rf"^\| ({'|'.join(KINDS)}) \| ([^|]*) \| (`[^|]+`) \| ([^|]*) \|$", re.MULTILINE)


class Outcome(NamedTuple):
    """The outcome for a family."""

    responses: str
    """`TREES` (and rows), `PACKED`, `ALONE`, `REFUSED` or `NOT_TRIED`."""
    lora: str = ""
    """Of those that can be trained: `ALL` linear layers can have an adapter, all but some, or
    `NONE`."""
    why: str = ""
    """Of `REFUSED` and `NOT_TRIED`."""


def try_family(
    family: str, folder: Path, scale: float = SCALE
) -> tuple[Outcome, PreTrainedModel | None]:
    """Returns the outcome of a tiny model of the family, and the model if it can be trained.

    Args:
        family: A `model_type`.
        folder: Of the model.
        scale: See `save_tiny`.
    """
    try:
        save_tiny(family, folder, scale)
    except Exception as error:
        return Outcome(NOT_TRIED, why=f"cannot be built tiny: {_short(error)}"), None
    try:
        network = ModelSource(str(folder)).open()
        responses = layout_of(network)
    except ValueError as error:
        return Outcome(REFUSED, why=_reason(str(error))), None
    return Outcome(responses, adapted_layers_of(folder)), network


def layout_of(network: PreTrainedModel) -> str:
    """Returns what the responses of a model may share, for `Outcome.responses`."""
    shared = shared_by_responses(network)
    if shared.prefixes:
        return TREES
    return PACKED if shared.rows else ALONE


def adapted_layers_of(folder: Path) -> str:
    """Returns which linear layers of a model may have adapters, for `Outcome.lora`."""
    try:
        open_with_adapters(folder)
    except ConfigError as error:
        named = re.search(r"Set model\.lora\.target_modules to \[(.*)\]", str(error))
        if named is None:
            return NONE
        right = named[1].split(", ")
        open_with_adapters(folder, right)
        layers = LoRA().layers(ModelSource(str(folder)).open())
        wrong = {name.rpartition(".")[2] for name in layers} - set(right)
        return "all but " + ", ".join(f"`{end}`" for end in sorted(wrong))
    return ALL


def open_with_adapters(
    folder: Path, target_modules: str | list[str] = "all-linear"
) -> PreTrainedModel:
    """Opens a model as a run with `model.lora` opens it; raises ConfigError if a layer cannot have
    an adapter."""
    network = ModelSource(str(folder)).open()
    LoRA(rank=4, target_modules=target_modules).add_to(network)
    check_adapters(network)
    return network


def _reason(refusal: str) -> str:
    """Returns the reason of a refusal, without the model's folder, its class, figures and the
    remedy."""
    said = refusal.partition(": ")[2]
    if "changes its logits" in said:
        return (
            "its head is more than a matrix, or changes its logits in a way that `LogitTransform` "
            "does not know"
        )
    if "other log-probs than alone" in said:
        return "a token sees what comes after it: padding changes the log-probs"
    cause = re.search(r"positions alone \((.*)\)\. Take", said)
    without_sizes = re.sub(r" \([^)]*\)$", "", cause[1] if cause else said)
    return f"wants more than tokens and positions: {_cell(without_sizes)}"


def _short(error: Exception) -> str:
    return _cell(f"{type(error).__name__}: {error}")


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= 120 else f"{line[:120]}..."


def read_table() -> dict[str, Outcome]:
    """Returns the outcomes in the docs, by family."""
    return {
        family: Outcome(responses, lora, why)
        for responses, lora, families, why in ROW.findall(PAGE.read_text())
        for family in families.strip("`").split("`, `")
    }


def write_table(outcomes: dict[str, Outcome]) -> None:
    """Writes the outcomes into the docs: the table is the last part of its page, after a line that
    counts them."""
    families: dict[Outcome, list[str]] = {}
    for family, found in sorted(outcomes.items()):
        families.setdefault(found, []).append(f"`{family}`")
    rows = "".join(
        f"| {found.responses} | {found.lora} | {', '.join(families[found])} | {found.why} |\n"
        for found in sorted(families, key=lambda found: (KINDS.index(found.responses), *found))
    )
    kinds = [found.responses for found in outcomes.values()]
    summary = (
        f"transformers {transformers.__version__} has {len(outcomes)} families: "
        + ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS)
        + ".\n\n"
    )
    text = PAGE.read_text()
    PAGE.write_text(
        text[: text.index("transformers ", text.index("## The table"))] + summary + HEAD + rows
    )


def main() -> None:
    """Tries every family."""
    outcomes = {}
    for family in FAMILIES:
        with TemporaryDirectory() as folder:
            outcomes[family], _ = try_family(family, Path(folder))
        responses, lora, why = outcomes[family]
        print(f"{family:28} {responses:14} {lora:12} {why}", flush=True)
    write_table(outcomes)


if __name__ == "__main__":
    main()
