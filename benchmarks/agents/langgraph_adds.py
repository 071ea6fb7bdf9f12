"""An agent of LangChain, on LangGraph, with one tool. Needs `pip install langchain
langchain-openai`."""

import json
import os
import sys

from addition import add
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model="policy",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_retries=0,
)
asked = {"messages": [("user", json.load(sys.stdin)["prompt"])]}
answer = create_agent(model, [add]).invoke(asked, {"recursion_limit": 8})
print(answer["messages"][-1].content)
