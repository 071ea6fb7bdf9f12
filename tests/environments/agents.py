"""Agents for tests, written as their authors write them: they know nothing of lrl."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp
import openai

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    key: str | None,
    body: Any = None,
    method: str = "POST",
    **headers: str,
) -> tuple[int, Any]:
    """Sends a request of an agent; returns the status, and the JSON of the answer."""
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = body if isinstance(body, str) else json.dumps(body)
    async with session.request(method, url, data=data, headers=headers) as answer:
        has_json = answer.content_type == "application/json"
        return answer.status, await answer.json() if has_json else None


def results(message: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": str(sum(json.loads(call.function.arguments).values())),
        }
        for call in message.tool_calls or []
    ]


async def adds(*, prompt: str, base_url: str, api_key: str, **columns: Any) -> float | None:
    """Has the model add by a tool; the reward is 0.5 if the column says so."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(
                model="any", messages=messages, tools=[ADD]
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += results(message)
    return columns.get("reward")


def streams(*, prompt: str, base_url: str, api_key: str, **columns: Any) -> None:
    """A plain function that reads a stream, and says what it has read in a second request."""
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": prompt}]},
        ]
        stream = client.chat.completions.create(
            model="any", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        text, used = "", 0
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            if chunk.usage is not None:
                used = chunk.usage.completion_tokens
        messages += [{"role": "assistant", "content": f" {text}\n"}]
        messages += [{"role": "user", "content": f"{text}, {used} tokens"}]
        client.chat.completions.create(model="any", messages=messages)


async def adds_or_changes_history(
    *, how: str, prompt: str, base_url: str, api_key: str, **columns: Any
) -> None:
    """Adds if the column says so; else it makes two requests that have nothing in common."""
    if how == "adds":
        await adds(prompt=prompt, base_url=base_url, api_key=api_key)
        return
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for text in (prompt, "another conversation"):
            await client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": text}]
            )


async def gives_up(*, base_url: str, api_key: str, **columns: Any) -> float:
    """Ends before its first turn has come."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        asking = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "go"}]
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asking, 1.5)
    return 0.5


async def runs(program: str, **told: Any) -> None:
    """Runs a program here, and waits."""
    exec(program, {})
    await asyncio.sleep(600)
