"""An agent that asks twice, doubts both answers, and continues with the first: an episode with
branches, for a picture of `lrl view`."""

from __future__ import annotations

from typing import Any

import aiohttp

DOUBT = "Are you sure?"
LAST = "Then write the number alone."


async def solve(*, prompt: str, base_url: str, api_key: str, **columns: Any) -> None:
    """Has the conversations; the run's rewards judge the last answer.

    Args:
        prompt: The problem.
        base_url: Of the endpoint, with `/v1`.
        api_key: Its key.
        columns: The row's others.
    """
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask(history: list[dict[str, str]], question: str) -> list[dict[str, str]]:
            messages = [*history, {"role": "user", "content": question}]
            body = {"model": "policy", "messages": messages}
            async with session.post(f"{base_url}/chat/completions", json=body) as answered:
                answered.raise_for_status()
                answer = (await answered.json())["choices"][0]["message"]["content"]
            return [*messages, {"role": "assistant", "content": answer}]

        first = await ask([], prompt)
        second = await ask([], prompt)
        first = await ask(first, DOUBT)
        await ask(second, DOUBT)
        await ask(first, LAST)
