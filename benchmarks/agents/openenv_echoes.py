"""An agent in an environment of OpenEnv: what the model says is the action, what the environment
observes the next message, and its rewards are the agent's. Needs `pip install openenv`."""

import json
import os
import sys

from echo_server import echo_server
from openai import OpenAI
from openenv import GenericEnvClient

STEPS = 2

policy = OpenAI(
    base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_retries=0
)
messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
reward = 0.0
with echo_server() as url, GenericEnvClient(base_url=url).sync() as environment:
    messages.append({"role": "user", "content": json.dumps(environment.reset().observation)})
    for _ in range(STEPS):
        answer = policy.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content
        result = environment.step({"message": said})
        reward += result.reward
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": json.dumps(result.observation)})
print(json.dumps({"reward": reward}))
