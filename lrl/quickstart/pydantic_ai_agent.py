"""An agent of pydantic-ai with a calculator, as its authors would write it: it knows the address of a
model, and nothing of training. Needs `pip install "pydantic-ai-slim[openai]"`."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lrl.errors import ConfigError
from lrl.quickstart.calculator import calculate

if TYPE_CHECKING:
    from pydantic_ai import ModelMessage

REMEDY = 'pip install "pydantic-ai-slim[openai]"'
INSTRUCTIONS = "Call the calculator, then answer."


async def solve(*, prompt: str, base_url: str, api_key: str, **columns: Any) -> None:
    """Solves a word problem with the policy at `base_url`, which it takes for a model of OpenAI's
    interface; `data.rewards` judge the last turn."""
    if find_spec("pydantic_ai") is None:
        raise ConfigError(f"the package pydantic-ai-slim is not installed: {REMEDY}.")
    from pydantic_ai import Agent, UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=api_key)
    model = OpenAIChatModel("policy", provider=provider)
    agent = Agent(model, instructions=INSTRUCTIONS, tools=[calculate])
    try:
        await agent.run(prompt, message_history=_example())
    except UnexpectedModelBehavior:
        # The policy's fault, such as a second call without arguments: its last turn is judged.
        return


def _example() -> "list[ModelMessage]":
    """Returns a solved problem, as the agent's past: without it a model this small calls no tool."""
    from pydantic_ai import ModelRequest, ModelResponse, TextPart, ToolCallPart, ToolReturnPart

    problem = "Tom has 12 pens and finds 7 more. How many pens does Tom have now?"
    call = ToolCallPart("calculate", {"expression": "12 + 7"}, tool_call_id="example")
    result = ToolReturnPart("calculate", "19", tool_call_id="example")
    return [
        ModelRequest.user_text_prompt(problem),
        ModelResponse([call]),
        ModelRequest([result]),
        ModelResponse([TextPart("Tom has 19 pens now.")]),
    ]
