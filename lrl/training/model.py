"""The policy as a Hugging Face model: opening it, its log-probs over packed rows, its weights by
checkpoint names.

Trainer and generator must compute the same log-probs. So dropout and router noise are off, and a
model that changes its logits in a way `LogitTransform` does not know is refused.
`lrl.training.trials` tests that responses do not see each other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from lightning.fabric.utilities.rank_zero import _get_rank
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion

from lrl.errors import ConfigError
from lrl.system import hub, import_by_name
from lrl.training import lora, varlen
from lrl.training.collate import fill_rows
from lrl.training.logprobs import LogitTransform, token_logprobs
from lrl.training.merging import merge
from lrl.training.prefix_tree import PrefixTree, text_sequence
from lrl.training.sharding import parameters_without_memory, whole_on
from lrl.types import MicroBatch

Dtype = Literal["float32", "bfloat16"]
REMEDY = "Take the bfloat16 copy from which it was made."
FLOATS = ("F64", "F32", "F16", "BF16")
"""Numbers that are weights as they are, by their names in a file of safetensors."""
PACKED = ("weight", "qweight", "weight_packed", "weight_quantized", "_blocks", "_proj")
"""The ends of names of weights; a buffer of integers, such as a mask, has another."""
LIBRARIES_OF_A_GPU = ("cuDNN", "cuBLAS", "CUDA error")
"""Words in errors of an installation that does not fit, never of a model."""
FUSED_HEAD = "lrl_fused_head"
"""The attribute of a network whose head is compiled (`lrl.training.kernels`)."""


def is_made(model: str) -> bool:
    """Returns whether the setting `model` names a Python function that makes the model."""
    return import_by_name.is_name(model) and not Path(model).exists()


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
        return str(import_by_name.function(model)())
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
        if varlen.is_flash(self.attention) and not self.takes_flash:
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
        if not Path(self.folder).exists():  # its files are on this machine only now
            _check_whole(self.folder, network.config)
        mismatched = sorted(name for name, *_ in report["mismatched_keys"])
        if unset := sorted(report["missing_keys"]) + mismatched:
            raise ConfigError(
                f"model={self.folder!r}: {len(unset)} weights are missing or of another shape than "
                f"config.json says, the first {unset[0]}. They would be random: give a complete "
                "folder."
            )
        network = self._prepared(network).to(device)
        _check_logits(network)
        return network

    def open_empty(self, config: Any) -> PreTrainedModel:
        """Makes the network of `open`, from its `open_config`, without memory for weights."""
        with parameters_without_memory():
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
    """Opens a model's config, without the noise of training, which a generator has not; raises
    ValueError if it cannot, or the weights are quantised."""
    config = read_config(folder)
    _check_whole(folder, config)
    text_config = config.get_text_config()
    for name, value in vars(text_config).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(text_config, name, 0.0)
    return config


def _check_whole(folder: str, config: Any) -> None:
    """Refuses quantised weights, by their config and, on this machine, by the headers of their files.

    Generators get whole weights at each sync. transformers opens some quantised folders, but
    quantises again on its way back to the names of a checkpoint: syncs and exports would have
    rounded weights, or leave weights out.
    """
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


def last_hidden(decoder: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Returns the last hidden state of a micro-batch: [R, L, H]."""
    hidden: Tensor = decoder(
        input_ids=micro.input_ids,
        position_ids=micro.position_ids,
        use_cache=False,
        **varlen.arguments(decoder, micro),
    ).last_hidden_state
    return hidden


def label_logprobs(network: PreTrainedModel, micro: MicroBatch, chunk_tokens: int) -> Tensor:
    """Returns the log-probs of a micro-batch's labels at its temperature: float32 [R, L], nats, 0
    where the mask is false. `chunk_tokens` is as for `token_logprobs`."""
    return head_logprobs(network, last_hidden(decoder_of(network), micro), micro, chunk_tokens)


def head_logprobs(
    network: PreTrainedModel, hidden: Tensor, micro: MicroBatch, chunk_tokens: int
) -> Tensor:
    """Returns the log-probs of `label_logprobs` from the last hidden state."""
    head = network.get_output_embeddings()
    # Mamba's residual stream is float32 whatever the weights are.
    logprobs = token_logprobs(
        micro.of_labels(hidden).to(head.weight.dtype),
        head.weight,
        micro.of_labels(micro.labels),
        bias=getattr(head, "bias", None),
        temperature=micro.temperature,
        transform=LogitTransform.from_config(network.config.get_text_config()),
        chunk_tokens=chunk_tokens,
        fused=getattr(network, FUSED_HEAD, False),
    )
    return micro.at_labels(logprobs)


class LabelLogprobs(nn.Module):
    """`label_logprobs` of a network as a module, which can be sharded as the root."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, micro: MicroBatch, chunk_tokens: int) -> Tensor:
        """See `label_logprobs`."""
        return label_logprobs(self.network, micro, chunk_tokens)


def decoder_of(network: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a causal language model that computes the last hidden state."""
    decoder = network.get_decoder()
    # Llama 4 and the text side of Mllama name another part as their base, so get_decoder returns
    # the whole.
    return network.model if decoder is network else decoder


def text_as_micro_batch(token_ids: list[int], device: torch.device) -> MicroBatch:
    """Returns one row in which every token but the first is a label, at temperature 1."""
    return fill_rows([[PrefixTree([text_sequence(token_ids)])]], temperature=1.0).to(device)


def unique_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of the network once, as this rank has it, with its name in memory.

    Tied weights are one tensor with several names: only the first name comes.
    """
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def base_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields `unique_tensors` but the adapters, by the names that they have without adapters."""
    found = unique_tensors(network)
    return ((lora.plain(name), tensor) for name, tensor in found if not lora.is_adapter(name))


def whole_tensors(
    network: nn.Module, merged_in: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields `base_tensors` whole on rank 0 (`lrl.training.sharding.whole_on`), with their adapters
    merged in, in the format `merged_in` or their own."""
    adapted = lora.adapted_weights(network)
    for name, tensor in base_tensors(network):
        whole = whole_on(tensor)
        if name in adapted:
            down, up = map(whole_on, lora.factors_of(adapted[name]))
            if not whole.is_meta:
                whole = merge(name, whole, down=down, up=up, dtype=merged_in or whole.dtype)
        yield name, whole


def checkpoint_weights(
    network: PreTrainedModel, merged_in: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields `whole_tensors` by their names in a Hugging Face checkpoint, a layer at a time."""
    # transformers keeps some weights, such as experts, in another layout, and only whole layers
    # convert back.
    tensors = whole_tensors(network, merged_in)
    for _, layer in groupby(tensors, key=lambda item: layer_of(item[0])):
        yield from revert_weight_conversion(network, dict(layer)).items()


def layer_of(name: str) -> str:
    """Returns `model.layers.3` for all weights of layer 3; outside of layers the name itself."""
    head, dot, tail = name.partition(".layers.")
    return head + dot + tail.partition(".")[0] if dot else name


def _check_logits(network: PreTrainedModel) -> None:
    """Compares lrl's log-probs with the model's own, to find unknown changes of the logits."""
    ids = torch.arange(1, 9) % network.get_input_embeddings().num_embeddings
    micro = text_as_micro_batch(ids.tolist(), network.device)
    with torch.no_grad(), trial_pass(network):
        ours = label_logprobs(network, micro, chunk_tokens=len(ids))[0, :-1]
        given = varlen.arguments(decoder_of(network), micro)
        logits = network(input_ids=micro.input_ids, use_cache=False, **given).logits[0, :-1].float()
    theirs = logits.log_softmax(-1).gather(-1, micro.labels[0, :-1, None]).squeeze(-1)
    gap = (ours - theirs).abs().max().item()
    if not gap < (1e-3 if varlen.computes_in(network) == torch.float32 else 0.25):
        raise ConfigError(
            f"model={network.name_or_path!r}: {type(network).__name__} changes its logits after "
            f"the head in a way lrl does not know (log-probs differ by {gap:.3g} nats). Add it to "
            "lrl.training.logprobs.LogitTransform."
        )


@contextmanager
def trial_pass(network: PreTrainedModel) -> Iterator[None]:
    """For passes that try a model: in the dtype that its attention knows, and what it raises becomes
    a ConfigError that names it."""
    try:
        with varlen.in_its_dtype(network):
            yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # RuntimeErrors, not the model's
        raise
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        if any(library in str(error) for library in LIBRARIES_OF_A_GPU):
            raise
        raise ConfigError(
            f"model={network.name_or_path!r}: {type(network).__name__} does not give log-probs for "
            f"tokens and their positions alone ({shortened(error)}). Take another model, or another "
            "attention."
        ) from error


def shortened(error: Exception) -> str:
    """Returns the class and the message of a library's exception, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


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
