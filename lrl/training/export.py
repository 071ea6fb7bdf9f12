"""The folder of a policy in Hugging Face format, with everything but its trained weights as it was
in the first version's.

transformers loads more than it saves (a generation_config.json that it refuses to write, settings
of older forms), so each file that training has not changed is copied byte for byte.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lrl.training.lora import LoRA
from lrl.training.model import on_this_machine, open_config, open_tokenizer

log = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
UNTRAINED_FILES = (GENERATION, "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Files that no training changes; the licences ask for their copies."""
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tekken.json", "chat_template.*", "additional_chat_templates/*"),
)
"""Files of a tokenizer, besides those that its class names."""
NO_SAMPLING = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Settings of generation that belong into config.json."""
DTYPE = re.compile(r'("(?:torch_)?dtype": ?)(?:"\w+"|null)')
"""A dtype in a config.json."""


def save_policy(
    network: PreTrainedModel,
    weights: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    base: str,
    folder: Path,
    lora: LoRA | None,
    adapters: Mapping[str, Tensor],
) -> None:
    """Writes a policy for transformers and vLLM. Raises OSError if the folder cannot be written, or
    is that of `base`, the first version.

    `network` may be without weights. `weights` are on the CPU, by their names in memory, adapters
    merged; those of `lora` are also written alone, in `adapter`.
    """
    first_folder = on_this_machine(base)
    if first_folder is not None and folder.resolve() == first_folder.resolve():
        raise FileExistsError(f"{folder} is the folder of the policy's first version")
    with _savable(network):
        network.save_pretrained(folder, state_dict=dict(weights))
    (folder / GENERATION).unlink(missing_ok=True)
    if first_folder is None or not (first_folder / CONFIG).exists():
        log.warning(
            "%s is gone: the policy in %s is without its generation_config.json.", base, folder
        )
        tokenizer.save_pretrained(folder)
    else:
        _keep_config(network, first_folder, folder)
        _keep_files(first_folder, folder, UNTRAINED_FILES)
        if _contents(open_tokenizer(base)) == _contents(tokenizer):  # no script has changed it
            _keep_files(first_folder, folder, (*TOKENIZER, *tokenizer.vocab_files_names.values()))
        else:
            tokenizer.save_pretrained(folder)
    if lora is not None:
        lora.save(adapters, base, folder / "adapter")


@contextmanager
def _savable(network: PreTrainedModel) -> Iterator[None]:
    """Removes what transformers reads and refuses to write from the network's configs."""
    config, generation = network.config, network.generation_config
    network.config = copy.deepcopy(config)
    network.generation_config = GenerationConfig()
    for name in network.config._get_generation_parameters():
        setattr(network.config, name, None)
    try:
        yield
    finally:
        network.config = config
        network.generation_config = generation


def _keep_config(network: PreTrainedModel, first_folder: Path, folder: Path) -> None:
    """Writes the first version's config.json with the new dtype, unless more has changed: by a
    script, or because the policy is the text part of a larger model."""
    first = (first_folder / CONFIG).read_text(encoding="utf-8")
    saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    same_class = json.loads(first).get("architectures") == saved["architectures"]
    if same_class and _settings(open_config(str(first_folder))) == _settings(network.config):
        text = DTYPE.sub(rf'\1"{saved["dtype"]}"', first)
        (folder / CONFIG).write_text(text, encoding="utf-8")


def _settings(config: PreTrainedConfig) -> str:
    """Returns a model's settings but its dtype."""
    of_sampling = GenerationConfig().to_dict().keys() - set(NO_SAMPLING)
    settings = {
        name: value
        for name, value in config.to_dict().items()
        if name[0] != "_" and name not in of_sampling
    }
    return DTYPE.sub("", json.dumps(settings, default=str, sort_keys=True))


def _contents(tokenizer: PreTrainedTokenizerBase) -> dict[Path, bytes]:
    # Saved, it also says whether it came from a folder: it is compared with one that did.
    with TemporaryDirectory(prefix="lrl-tokenizer-") as folder:
        tokenizer.save_pretrained(folder)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return {file.relative_to(folder): file.read_bytes() for file in files}


def _keep_files(first_folder: Path, folder: Path, names: Iterable[str]) -> None:
    """Copies the files of these names that there are."""
    for file in (found for name in names for found in first_folder.glob(name)):
        target = folder / file.relative_to(first_folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
