"""A Hugging Face model and how it is opened, on one rank and on all.

Trainer and generator must compute the same log-probs, so dropout and router noise are off, and
`lrl.training.trials` refuses what lrl would compute differently.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lrl.errors import ConfigError
from lrl.system import hub, imports
from lrl.system.ranks import Ranks, explain_broken_collective
from lrl.training.sharding import give_memory
from lrl.training.trials import cannot_have_varlen, check_logits, shortened
from lrl.training.varlen import VARLEN, is_flash

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]
FLOATS = ("F64", "F32", "F16", "BF16")
"""Numbers that are weights as they are, by their names in a file of safetensors."""
PACKED = ("weight", "qweight", "weight_packed", "weight_quantized", "_blocks", "_proj")
"""The ends of names of weights; a buffer of integers, such as a mask, has another."""
REMEDY = "Take the bfloat16 copy from which it was made."


def is_made(model: str) -> bool:
    """Returns whether the setting `model` names a Python function that makes the model."""
    return imports.is_name(model) and not Path(model).exists()


def find_model(model: str) -> str:
    """Returns the folder or hub name for the setting `model`; runs the function if it names one.
    Raises ConfigError if there is no such folder or function, or it fails."""
    if not is_made(model):
        folder = Path(model).expanduser()
        # Names on the hub are `name` or `owner/name`.
        must_be_folder = model.startswith((".", "/", "~")) or model.count("/") > 1
        if must_be_folder and not folder.exists() and not _get_rank():  # rank 0 alone reads it
            raise ConfigError(
                f"model={model!r}: there is no such folder (looked for {folder.resolve()})."
            )
        return str(folder) if model.startswith("~") else model
    try:
        return str(imports.function(model)())
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"model={model!r}: {type(error).__name__}: {error}") from error


def open_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of a folder or hub name; raises ValueError if there is none."""
    return _from_pretrained(AutoTokenizer, folder)


@dataclass(frozen=True)
class ModelSource:
    """A model's folder or hub name, and the settings with which it is opened."""

    folder: str
    dtype: Dtype = "float32"
    attention: str | None = None
    """Of transformers; None for its default."""
    gradient_checkpointing: bool | int = False
    """A number n recomputes every n-th layer."""
    takes_flash: bool = False
    """Whether the passes are in 16 bits on a CUDA device, as flash kernels need it."""

    def __post_init__(self) -> None:
        if is_flash(self.attention) and not self.takes_flash:
            raise ConfigError(
                f"model.attention is {self.attention!r}, which computes in 16 bits on a GPU (Ampere "
                "or newer): train on one, with trainer.precision bf16-mixed or model.dtype bfloat16, "
                "or leave it out."
            )

    def open(self, device: torch.device | str = "cpu") -> PreTrainedModel:
        """Opens the model in training mode, without noise. Raises ConfigError if it cannot be
        opened, or its log-probs cannot be computed from its last hidden state."""
        network, report = _from_pretrained(
            AutoModelForCausalLM,
            self.folder,
            config=open_config(self.folder),
            dtype=getattr(torch, self.dtype),
            attn_implementation=self.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        mismatched = sorted(name for name, *_ in report["mismatched_keys"])
        if unset := sorted(report["missing_keys"]) + mismatched:
            raise ConfigError(
                f"model={self.folder!r}: {len(unset)} weights are missing or of another shape than "
                f"config.json says, the first {unset[0]}. They would be random: give a complete "
                "folder."
            )
        network = self._prepared(network).to(device)
        check_logits(network)
        return network

    def open_empty(self, config: Any) -> PreTrainedModel:
        """Makes the network of `open`, from its `open_config`, without memory for weights."""
        with init_empty_weights(include_buffers=False):
            network = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, self.dtype),
                attn_implementation=self.attention,
                trust_remote_code=False,
            )
        return self._prepared(network)

    def _prepared(self, network: PreTrainedModel) -> PreTrainedModel:
        if self.gradient_checkpointing:
            every = int(self.gradient_checkpointing)
            network.gradient_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
        return network.train()


def read_config(folder: str) -> Any:
    """Reads a model's config, also of one that lrl cannot train; raises ValueError if it cannot."""
    return _from_pretrained(AutoConfig, folder)


def open_config(folder: str) -> Any:
    """Opens a model's config, without the noise of training; raises ValueError if it cannot, or the
    weights are quantised."""
    config = read_config(folder)
    _check_whole(folder, config)
    text_config = config.get_text_config()
    for name, value in vars(text_config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(text_config, name, 0.0)
    return config


def _check_whole(folder: str, config: Any) -> None:
    """Refuses quantised weights: transformers quantises again on its way back to the names of a
    checkpoint, so syncs and exports would have rounded weights, or leave weights out."""
    for part in (config, config.get_text_config()):
        if (entry := getattr(part, "quantization_config", None)) is not None:
            settings = entry if isinstance(entry, Mapping) else vars(entry)
            method = f"quant_method {settings.get('quant_method', 'unknown')}"
            raise ConfigError(f"model={folder!r} is quantised ({method}). {REMEDY}")
    for name, numbers in _formats(on_this_machine(folder)):
        if numbers not in FLOATS and (numbers[0] == "F" or name.endswith(PACKED)):
            raise ConfigError(
                f"model={folder!r} is quantised: {name} is stored as {numbers}, without a "
                f"quantization_config in config.json. {REMEDY}"
            )


def _formats(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yields each weight in a folder, as far as it can be read, and the format of its numbers."""
    # transformers says what is wrong with the files.
    with suppress(OSError, SafetensorError):
        for file in sorted(folder.glob("model*.safetensors") if folder else ()):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    yield name, tensors.get_slice(name).get_dtype()


def on_this_machine(model: str) -> Path | None:
    """Returns the local folder of a model: itself, or a hub name's in the hub's cache."""
    if (folder := Path(model)).is_dir():
        return folder
    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def open_meta_model(folder: str, attention: str | None) -> PreTrainedModel:
    """Opens a model on the meta device: shapes only. Raises ValueError if it cannot."""
    config = open_config(folder)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, trust_remote_code=False
            )
    except (ImportError, ValueError) as error:
        raise ValueError(f"model={folder!r}: {shortened(error)}") from error


def _from_pretrained(kind: Any, folder: str, **settings: Any) -> Any:
    if not Path(folder).exists():
        hub.reach()
    try:
        return kind.from_pretrained(folder, trust_remote_code=False, **settings)
    except (OSError, ValueError, ImportError, StrictDataclassError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        if "custom code" in reason:
            reason = "It brings code of its own, which is never run."
        raise ConfigError(
            f"model={folder!r}: {kind.__name__} cannot open it. {reason:.300}\nGive a folder in "
            "Hugging Face format, a name on the hub (and a way to reach it), or module:function."
        ) from None


# ---- on all ranks


def open_on_ranks(
    source: ModelSource, device: torch.device | str, ranks: Ranks, in_parts: bool
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Opens a model on all ranks; rank 0 alone reads its files, which others need not have.

    Returns the model on `device`, twice. With `in_parts`, for `Sharding.divide`: the model without
    memory for its weights, and on rank 0 the whole one, on the CPU.
    """
    named = None if source.attention == VARLEN else source.attention
    opened = replace(source, attention=named)
    whole = config = None
    if ranks.rank == 0:
        masked = None if is_flash(named) else named  # the CPU has no flash kernel
        on_cpu = replace(source, attention=masked, takes_flash=False)
        whole = on_cpu.open() if in_parts else opened.open(device)
        config = open_config(source.folder)
    config = ranks.share(config)
    network = opened.open_empty(config) if in_parts or whole is None else whole
    if not in_parts and ranks.size > 1:
        # transformers keeps some weights of some families in float32 when it opens files.
        own = {} if whole is None else {k: one.dtype for k, one in whole.state_dict().items()}
        dtypes = ranks.share(own)
        if whole is None:
            for name, tensor in network.state_dict(keep_vars=True).items():
                tensor.data = tensor.data.to(dtypes[name])
            give_memory(network, device, device)
        with explain_broken_collective():
            for tensor in network.state_dict().values():
                dist.broadcast(tensor, 0)
        whole = network
    if source.takes_flash and named is None:
        _choose_attention(network, whole, source, ranks)
    return network, whole


def _choose_attention(
    network: PreTrainedModel, whole: PreTrainedModel | None, source: ModelSource, ranks: Ranks
) -> None:
    """Gives a model lrl's own attention if rank 0, which has it whole, finds that it can have it."""
    why = ranks.share("" if whole is None else cannot_have_varlen(whole))
    if why and source.attention is not None:
        raise ConfigError(
            f"model.attention is {source.attention!r}, and {source.folder!r} cannot have it: {why}. "
            "Leave it out."
        )
    if not why:
        network.set_attn_implementation(VARLEN)
    chosen = network.config._attn_implementation
    reason = why and f", because {why}"
    rank_zero_only(log.info)("model=%r: attention %s%s", source.folder, chosen, reason)
