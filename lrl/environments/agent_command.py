"""An agent that is a program: all that it starts ends with it, and it with the episode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lrl.environments.agent_server import AgentAddress
from lrl.system import processes
from lrl.system.processes import die_with

LONGEST_OUTPUT = 2**20
"""Bytes of the end of each output that are kept."""


async def run_command(
    command: Sequence[str], address: AgentAddress, row: dict[str, Any]
) -> float | None:
    """Runs a program to its end; returns the reward in the last line of its output, if there is one.

    Args:
        command: The program and its arguments.
        address: Where it finds the policy.
        row: Its standard input, as JSON; what JSON does not have is text.

    Raises:
        RuntimeError: It cannot be started, or ended with another status than 0.
    """
    owner = os.getpid()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", processes.__file__, *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OPENAI_BASE_URL": address.base_url, "OPENAI_API_KEY": address.api_key},
        start_new_session=True,
        preexec_fn=lambda: die_with(owner, signal.SIGTERM),
    )
    try:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(row, default=str).encode())
        with suppress(ConnectionError):  # it reads nothing, which is its right
            await process.stdin.drain()
        process.stdin.close()
        output, errors = await asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    if status:
        last = (errors.strip() or output.strip()).splitlines()[-1:]
        raise RuntimeError(f"{command[0]} ended with status {status}: {' '.join(last)}")
    return reward_in(output)


def reward_in(output: str) -> float | None:
    """Returns the reward in the last line of an output, if it is a JSON object with one."""
    line = output.strip().rpartition("\n")[2]
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or "reward" not in found:
        return None
    return float(found["reward"])


async def _end_of(stream: asyncio.StreamReader | None) -> str:
    """Returns the end of an output, at most `LONGEST_OUTPUT` bytes."""
    assert stream is not None, "it is a pipe"
    kept = b""
    while block := await stream.read(2**16):
        kept = (kept + block)[-LONGEST_OUTPUT:]
    return kept.decode(errors="replace")
