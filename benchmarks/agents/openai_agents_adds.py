"""An agent of openai-agents with one tool. Needs `pip install openai-agents`."""

import json
import os
import sys

from addition import add
from openai import AsyncOpenAI

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


client = AsyncOpenAI(
    base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_retries=0
)
agent = Agent(
    name="adds",
    instructions="Be brief.",
    tools=[function_tool(add)],
    model=OpenAIChatCompletionsModel("policy", client),
)
print(Runner.run_sync(agent, json.load(sys.stdin)["prompt"], max_turns=4).final_output)
