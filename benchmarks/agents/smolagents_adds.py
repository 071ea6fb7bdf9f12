"""An agent of smolagents with one tool. Needs `pip install "smolagents[openai]"`."""

import json
import os
import sys

from addition import add
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(
    "policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    client_kwargs={"max_retries": 0},
)
agent = ToolCallingAgent([tool(add)], model, max_steps=3, verbosity_level=0)
print(agent.run(json.load(sys.stdin)["prompt"]))
