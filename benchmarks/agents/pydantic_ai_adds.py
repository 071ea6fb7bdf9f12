"""An agent of pydantic-ai with one tool. Needs `pip install "pydantic-ai-slim[openai]"`."""

import json
import os
import sys

from addition import add
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

client = AsyncOpenAI(
    base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_retries=0
)
model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
print(Agent(model, tools=[add]).run_sync(json.load(sys.stdin)["prompt"]).output)
