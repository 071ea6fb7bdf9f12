"""Chat templates in the forms of several families, and a tokenizer that merges what it can."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import lrl


class Family(NamedTuple):
    """A chat template, and what it puts behind a turn that the policy has ended."""

    template: str
    ends: tuple[str, ...]
    """Tokens that end a turn; the first is the template's."""
    user: str
    """Behind a turn, with a user message `higher`, up to the next turn."""
    tool: str
    """Behind a turn with one call, with its result `5`."""


CHATML = Family(
    """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    ("<|im_end|>", "<|endoftext|>"),
    "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
)
THINKING = Family(
    """{%- set last = namespace(user=-1) %}{%- for m in messages if m.role == 'user' %}
{%- set last.user = loop.index0 %}{%- endfor %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' and (loop.index0 > last.user)
%}<think>
{{ parts[0] if parts | length > 1 else '' }}
</think>

{% endif %}{{ parts[-1].strip() }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    ("<|im_end|>", "<|endoftext|>"),
    "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n",
)
"""It drops the thinking of earlier messages, by the place of the last user message."""
MISTRAL = Family(
    """<s>{%- for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last
%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}
{%- endif %}[TOOL_RESULTS]{"content": {{ m.content }}, "id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif m.tool_calls is defined %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]</s>
{%- else %} {{ m.content | trim }}</s>{% endif %}{%- endfor %}""",
    ("</s>",),
    "[INST] higher[/INST]",
    '[TOOL_RESULTS]{"content": 5, "id": "t0001c000"}[/TOOL_RESULTS]',
)
"""It has no header, begins with BOS, moves the tools, and shows no text of a message with calls."""
LLAMA = Family(
    """<|bot|>{%- for m in messages %}{% if m.tool_calls is defined and m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{{- '<|head|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/head|>\n\n' }}
{%- if m.tool_calls is defined %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters":
{{- m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|eot|>
{%- endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}""",
    ("<|eot|>", "<|eom|>"),
    "<|head|>user<|/head|>\n\nhigher<|eot|><|head|>assistant<|/head|>\n\n",
    "<|head|>ipython<|/head|>\n\n5<|eot|><|head|>assistant<|/head|>\n\n",
)
"""It takes one call a turn."""
DEEPSEEK = Family(
    """{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|observation|>' + m.content }}
{%- else %}{{ '<|assistant|>' + m.content }}{% for call in m.tool_calls or [] %}
{{- call.function.name + '\n' + call.function.arguments + '\n' }}{% endfor %}</s>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    ("</s>",),
    "<|user|>higher<|assistant|>",
    "<|observation|>5<|assistant|>",
)
"""It adds the arguments of a call to other text."""
GLM = """{%- for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() %}{{ key }}: {{ value }}
{% endfor %}</tool_call>{% endfor %}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
"""It ends no turn: the header of the next message does, and there is one for each role."""
HARMONY = """{%- for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }}<|message|>
{{- m.content }}<|end|>{% elif m.tool_calls %}{% for call in m.tool_calls %}<|start|>assistant to=
{{- call.function.name }}<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}
{{- '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""It writes another token behind a turn than the one at which the policy ends it."""
FAMILIES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
}
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|bot|>", "<|head|>", "<|/head|>"),
    *("<|eot|>", "<|eom|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
)


@cache
def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 700 tokens that merges over words and lines, as `assistant` with the line
    behind it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = ["assistant\n\nuser\nassistant\nHello\nuser\nhigher\n", Path(lrl.__file__).read_text()]
    tokenizer.train_from_iterator(pages * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=template,
    )
