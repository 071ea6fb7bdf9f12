"""An agent that changes its history: the policy writes two drafts and checks each, and then decides
between them in a conversation of its own. Pictures of its branches: docs/view.md."""

from typing import Any

from openai import AsyncOpenAI

Messages = list[dict[str, str]]


async def solve(*, prompt: str, base_url: str, api_key: str, **columns: Any) -> None:
    """Solves a problem; `data.rewards` judge the last turn.

    Args:
        prompt: The problem.
        base_url: Of the policy.
        api_key: The key there.
        columns: The row's others.
    """
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as policy:
        checked = [await check(policy, await draft(policy, prompt)) for _ in range(2)]
        shown = "\n".join(f"Draft {number}: {text}" for number, text in enumerate(checked, 1))
        await answer(policy, user(f"{prompt}\n{shown}\nWhich is right? End with the number."))


async def draft(policy: AsyncOpenAI, prompt: str) -> Messages:
    """Returns the conversation up to a first answer."""
    asked = user(f"{prompt} Answer briefly and end with the number.")
    return [*asked, {"role": "assistant", "content": await answer(policy, asked)}]


async def check(policy: AsyncOpenAI, conversation: Messages) -> str:
    """Returns the answer after another look."""
    return await answer(policy, [*conversation, *user("Check it. End with the number.")])


async def answer(policy: AsyncOpenAI, messages: Messages) -> str:
    """Returns the text of a turn."""
    said = await policy.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
    return said.choices[0].message.content or ""


def user(text: str) -> Messages:
    """Returns a conversation of one message."""
    return [{"role": "user", "content": text}]
