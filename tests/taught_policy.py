"""A policy that calls a tool: the tiny Llama of the lent server, taught one conversation."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from lrl.environments.tools import schema_of
from tests.environments.tool_functions import add
from tests.tiny_policies import byte_tokenizer, tiny_llama

TEMPLATE = (
    "{% if tools %}<|start|>system\n{{ tools | map(attribute='function.name') | list | tojson }}"
    "<|end|>{% endif %}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% for call in "
    "m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|end|>'
RESULT = "<|start|>tool\n5<|end|><|start|>assistant\n"
ANSWER = "It is 5<|end|>"
QUESTION = "2+3="
MOST_STEPS = 1000
TAUGHT_LOSS = 1e-3
"""Nats a token; a sampled conversation of about 80 tokens is then the taught one nine times of ten."""


def teach(folder: Path) -> Path:
    """Writes a policy that answers `QUESTION` with `CALL`, and `RESULT` with `ANSWER`."""
    tiny_llama(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        tools=[schema_of(add)],
        add_generation_prompt=True,
        return_dict=False,
    )
    parts = [prompt, *(tokenizer.encode(text) for text in (CALL, RESULT, ANSWER))]
    ids = torch.tensor([[token for part in parts for token in part]])
    labels = torch.tensor(
        [[token if n in (1, 3) else -100 for n, part in enumerate(parts) for token in part]]
    )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(MOST_STEPS):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        if loss.item() < TAUGHT_LOSS:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise AssertionError(f"it has not learnt the conversation: loss {loss.item()}")
    model.save_pretrained(folder)
    return folder
