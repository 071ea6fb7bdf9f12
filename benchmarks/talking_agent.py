"""An agent that talks: it keeps its history, or changes it. It knows nothing of lrl, and of vLLM one
field of an answer."""

from __future__ import annotations

from typing import Any

import aiohttp

WORDS = ("higher", "lower", "warm, but not there yet")


async def talk(
    *,
    base_url: str,
    api_key: str,
    turns: int,
    changes: bool = False,
    settings: dict[str, Any] | None = None,
    **columns: Any,
) -> int:
    """Has a conversation, in which every third request says something else of the past if it
    `changes`; returns how many answers were to a prompt that does not begin with the tokens of the
    one before and its answer, if the endpoint tells tokens."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Guess my number."}]
    before: list[int] = []
    changed = 0
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for turn in range(turns):
            body = {"model": "policy", "messages": messages} | (settings or {})
            async with session.post(f"{base_url}/chat/completions", json=body) as answered:
                answer = await answered.json()
                assert answered.status == 200, answer
            choice = answer["choices"][0]
            if (read := answer.get("prompt_token_ids")) is not None:
                changed += read[: len(before)] != before
                before = read + choice["token_ids"]
            said = {"role": "assistant", "content": choice["message"]["content"]}
            messages = [*messages, said, {"role": "user", "content": WORDS[turn % len(WORDS)]}]
            if changes and turn % 3 == 2:
                messages[-3] = {"role": "user", "content": f"I had said {turn}."}
    return changed


async def plays(**columns: Any) -> float:
    await talk(**columns)
    return 1.0
