"""An environment of verifiers, with its own harness and its own score: the one that plays OpenEnv's
environments. Needs `pip install "verifiers[openenv]" uv`."""

import asyncio
import json
import os

import verifiers.v1 as vf
from echo_server import echo_server
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

TURNS = 2


async def play(url: str) -> vf.Episode:
    """Plays one episode of the environment at `url` with the policy."""
    settings = {
        "taskset": {"id": "openenv", "base_url": url},
        "player": {
            "harness": {"id": "null"},
            "runtime": {"type": "subprocess"},
            "max_turns": TURNS,
        },
    }
    environment = load_environment(resolve_env_config(settings))
    client = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    async with environment.serving():
        slot = environment.slots(next(iter(environment.taskset)))[0]
        return await environment.run_slot(slot, context)


with echo_server() as url:
    episode = asyncio.run(play(url))
if not episode.ok:
    raise SystemExit(f"{episode.errors} {[trace.errors for trace in episode.traces]}")
print(json.dumps({"reward": episode.traces[0].reward}))
