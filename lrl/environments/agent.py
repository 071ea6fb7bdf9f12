"""An agent that somebody else wrote, as an environment: it takes the policy for a model behind
OpenAI's interface."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from lrl.environments.agent_server import AgentConversation, address_of, server_of_this_process
from lrl.environments.base import Environment, Policy
from lrl.errors import ConfigError
from lrl.system import processes
from lrl.system.imports import function
from lrl.system.processes import die_with

LONGEST_OUTPUT = 2**20
"""Bytes of a program's output that are read, from its end."""
MOST_THREADS = 256
"""Plain functions that run at once in a process; more wait. Their stacks, of 8 MiB each, count in
data.environment_memory_gib."""
THREAD_END_S = 60.0
"""Seconds that the thread of an episode that has ended gets to end; then its process ends."""
_playing: list[float] = []
"""When the episodes of this process have begun."""
_threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="agent")


class Agent(Environment):
    """Plays an episode by running an agent, which gets the address and the key of an endpoint like
    OpenAI's. Its requests for chat completions are the turns of the policy.

    A request that adds messages to an earlier one continues its conversation; any other begins a
    branch. The agent writes all messages and the tools itself; of the data set it gets a row.
    Rewards get the text of the last turn.

    Args:
        agent: A function, or its name (`module.function`, `file.py:function`), plain or `async`. It
            is called with the keywords `prompt`, `base_url`, `api_key` and the columns of the row,
            and returns a reward, or None. The first three win over columns of their names. A plain
            one runs in a thread. The processes that it starts end with its episode.
        command: A program and its arguments, in the place of `agent`. It finds OPENAI_BASE_URL and
            OPENAI_API_KEY in its environment and the row as JSON on its standard input. A last line
            `{"reward": 0.5}` of its output is the reward.
        port: Where agents that run elsewhere take episodes, in the place of `agent` and `command`:
            a port of `strategy.server.host`; 0 for a free one.
        ignore: Settings of requests that the policy does not follow and that are left out, such as
            temperature and max_tokens; all others are refused with status 400.
        branches: Whether an agent may change its history, or have several conversations in an
            episode. If not, a request that does not continue the last one is refused with status
            400.
    """

    opens = True
    writes_prompt = True
    judges_last_turn = True

    def __init__(
        self,
        agent: str | Callable[..., Any] | None = None,
        command: Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        branches: bool = True,
        port: int | None = None,
    ) -> None:
        if [agent, command, port].count(None) != 2:
            raise ConfigError(
                "Agent needs a function, `agent`, a program, `command`, or a `port` for agents "
                "that run elsewhere: one of them."
            )
        if isinstance(agent, str):
            try:
                agent = function(agent)
            except ValueError as error:
                raise ConfigError(f"Agent.agent is {agent!r}, and {error}") from error
        self.agent = agent
        self.command = command
        self.ignore = tuple(ignore)
        self.branches = branches
        self.port = port

    async def rollout(self, policy: Policy, prompt: str, **columns: Any) -> float:
        conversation = AgentConversation(policy, self.ignore, self.branches)
        server = server_of_this_process()
        address = address_of(server.url, conversation.key)
        row = columns | {"prompt": prompt}
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        _playing.append(began)
        server.playing[conversation.key] = conversation
        try:
            if self.command is not None:
                reward = await run_command(self.command, address, row)
            elif inspect.iscoroutinefunction(self.agent):
                reward = await self.agent(**row | address)
            else:
                assert self.agent is not None, "`ExternalAgents` has those elsewhere"
                reward = await _in_thread(self.agent, row | address)
            return 0.0 if reward is None else reward
        finally:
            server.end(conversation.key)
            _playing.remove(began)
            # A process that began while another episode played may be that one's.
            processes.end_children(since=began, before=min(_playing, default=math.inf))


async def _in_thread(agent: Callable[..., Any], told: dict[str, Any]) -> Any:
    loop = asyncio.get_running_loop()
    running = loop.run_in_executor(_threads, lambda: agent(**told))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # Nothing else ends a thread that outlives its episode.
        late = loop.call_later(THREAD_END_S, os._exit, 1)

        def ended(future: asyncio.Future[Any]) -> None:
            late.cancel()
            if not future.cancelled():
                future.exception()  # nobody waits for it

        running.add_done_callback(ended)
        raise


async def run_command(
    command: Sequence[str], address: dict[str, str], row: dict[str, Any]
) -> float | None:
    """Runs a program to its end, with the `row` as JSON on its standard input; returns the reward
    in the last line of its output, if there is one. Raises RuntimeError if it fails."""
    owner = os.getpid()
    # Files: of pipes, all that a program writes would stay in the worker's memory.
    with TemporaryFile() as output_file, TemporaryFile() as error_file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", processes.__file__, *map(str, command)),
            stdin=asyncio.subprocess.PIPE,
            stdout=output_file,
            stderr=error_file,
            env=os.environ | {f"OPENAI_{name.upper()}": value for name, value in address.items()},
            start_new_session=True,
            preexec_fn=lambda: die_with(owner, signal.SIGTERM),
        )
        try:
            await process.communicate(json.dumps(row, default=str).encode())
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
        output, errors = _end_of(output_file), _end_of(error_file)
    if process.returncode:
        last = (errors or output).splitlines()[-1:]
        raise RuntimeError(f"{command[0]} ended with status {process.returncode}: {' '.join(last)}")
    try:
        found = json.loads(output.rpartition("\n")[2])
    except ValueError:
        return None
    return float(found["reward"]) if isinstance(found, dict) and "reward" in found else None


def _end_of(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - LONGEST_OUTPUT))
    return output.read().decode(errors="replace").strip()
