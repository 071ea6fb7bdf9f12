"""A run that is killed while agents elsewhere play, and starts again at the same port: each prompt is
trained once, and no agent waits for ever."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import string
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lrl
from lrl.callbacks.base import run_of
from lrl.environments import Agent
from tests.leftovers import MARK
from tests.lent_server import LentServer, server_elsewhere
from tests.runs.test_async_run import fit
from tests.strategies.forked_ranks import Fork, free_port, start_fork

AGENTS, STEPS, GROUPS, RESPONSES = 8, 4, 2, 3
ENDED_BEFORE = (STEPS - 1) * GROUPS * RESPONSES
"""Episodes that end before the kill. The rest are held: the run cannot end, and has done a step, for
without it no more than two steps' episodes would have begun."""
KEY = "k" * 32
USER = {"role": "user", "content": "go"}
DEADLINE_S = 300.0


class Telling(L.Callback):
    """Writes a line for each step, before it is saved."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        groups: Any = run_of(trainer).step_stream.groups  # type: ignore[union-attr]
        line = {
            "step": trainer.global_step,
            "prompts": [group.prompt.id for group in groups],
            "failures": [one.failure for group in groups for one in group.rollouts if one.failure],
            "turns": [len(one.turns) for group in groups for one in group.rollouts],
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(policy: Path, folder: Path, port: int, url: str, token: str) -> None:
    """A run with the server of another process, which saves at every step and resumes from what is
    there."""
    saved = folder / "checkpoints" / "last.ckpt"
    agents = Agent(port=port)
    agents.stop = tuple(string.ascii_letters)  # else a turn of this policy has hundreds of tokens
    fit(
        server_elsewhere(url, token, lrl.ServerSettings(dtype="float32")),
        policy,
        folder,
        steps=STEPS,
        callbacks=[
            Telling(folder / "steps.jsonl"),
            ModelCheckpoint(saved.parent, every_n_train_steps=1, save_last=True),
        ],
        ckpt_path=str(saved) if saved.exists() else None,
        rewards=[],
        rollouts_per_group=RESPONSES,
        max_lag=1,
        max_response_tokens=400,
        max_turn_tokens=128,
        environment=agents,
        max_reward_failures=1.0,
        prompts=[{"prompt": f"{n}+1="} for n in range(10, 10 + GROUPS * STEPS)],
    )


@pytest.fixture
def start(
    policy_folder: Path, lent_server: LentServer, tmp_path: Path, mark: str
) -> Iterator[Callable[[], Fork]]:
    """Starts the run, or starts it again."""
    port, started = free_port(), []
    where = (lent_server.url, lent_server.token)

    def start() -> Fork:
        variables = {name: os.environ[name] for name in (MARK, "TMPDIR")}
        variables["LRL_AGENT_KEY"] = KEY
        output = tmp_path / f"output-{len(started)}"
        words = (policy_folder, tmp_path, port, *where)
        started.append(start_fork(train, output, variables, *words))
        return started[-1]

    start.url = f"http://127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield start
    for one in started:
        one.process.kill()


class Agents:
    """Agents that play whatever run is at an address, one episode after the other.

    Args:
        url: The address.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: Counter[int | str] = Counter()
        """Statuses, and `closed` for connections without one."""
        self.may_end = asyncio.Semaphore(ENDED_BEFORE)
        """How many episodes may get further than their first turn."""
        self.held = 0
        """Agents that wait for it."""
        self.kept: dict[str, Any] = {}
        """An episode of the first run."""

    async def play(self, session: aiohttp.ClientSession) -> None:
        """Plays until it is cancelled."""
        while True:
            status, episode = await self.ask(session, f"{self.url}/episodes", KEY)
            if status != 200:
                await asyncio.sleep(0.05)
                continue
            self.kept = self.kept or episode
            url, key = episode["base_url"], episode["api_key"]
            status, said = await self.ask(session, f"{url}/chat/completions", key, [USER])
            if status == 200:
                self.held += 1
                await self.may_end.acquire()
                self.held -= 1
                messages = [USER, said["choices"][0]["message"], USER]
                await self.ask(session, f"{url}/chat/completions", key, messages)
                await self.ask(session, f"{url}/end", key, reward=0.5)

    async def ask(
        self, session: aiohttp.ClientSession, url: str, key: str, messages: Any = (), **body: Any
    ) -> tuple[int | str, Any]:
        """Returns status and JSON of an answer, and counts it."""
        headers = {"Authorization": f"Bearer {key}"}
        body |= {"messages": messages} if messages else {}
        status: int | str = "closed"
        found: Any = None
        try:
            async with session.post(url, json=body, headers=headers) as answer:
                found = await answer.json()
                status = answer.status
        except aiohttp.ClientError:
            found = None
        self.answers[status] += 1
        return status, found


async def until(condition: Callable[[], object], run: Fork) -> None:
    while not condition():
        assert run.poll() is None, run.printed()
        await asyncio.sleep(0.02)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_run_that_is_killed_while_agents_play_trains_every_prompt_once(
    start: Callable[[], Fork], tmp_path: Path
) -> None:
    steps = tmp_path / "steps.jsonl"
    saved = tmp_path / "checkpoints" / "last.ckpt"
    agents = Agents(start.url)  # type: ignore[attr-defined]

    async def both_runs() -> None:
        first = start()
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
            playing = [asyncio.create_task(agents.play(session)) for _ in range(AGENTS)]
            await until(lambda: agents.may_end.locked() and agents.held and saved.exists(), first)
            first.send_signal(signal.SIGKILL)
            await asyncio.to_thread(first.wait, DEADLINE_S)
            before = agents.answers["closed"]
            for _ in range(STEPS * GROUPS * RESPONSES):
                agents.may_end.release()
            while agents.answers["closed"] < before + AGENTS:
                await asyncio.sleep(0.02)
            second = start()
            try:
                url, key = agents.kept["base_url"], agents.kept["api_key"]
                status: int | str = "closed"
                while status == "closed":
                    assert second.poll() is None, second.printed()
                    status, _ = await agents.ask(session, f"{url}/chat/completions", key, [USER])
                    await asyncio.sleep(0.02)
                assert status == 410, "the episode was of the run before"
                await asyncio.to_thread(second.wait, DEADLINE_S)
            finally:
                for task in playing:
                    task.cancel()
                await asyncio.gather(*playing, return_exceptions=True)
        assert second.poll() == 0, second.printed()

    asyncio.run(both_runs())
    said = lines(steps)
    assert [line["step"] for line in said].count(1) == 1, "it was saved, and is not trained again"
    trained = {line["step"]: line for line in said}  # the last one may be
    assert sorted(trained) == list(range(1, STEPS + 1))
    prompts = [prompt for line in trained.values() for prompt in line["prompts"]]
    assert sorted(prompts) == list(range(STEPS * GROUPS))
    assert not any(line["failures"] for line in trained.values())
    turns = [turns for line in trained.values() for turns in line["turns"]]
    assert len(turns) == STEPS * GROUPS * RESPONSES and turns.count(2) > len(turns) / 2
    assert set(agents.answers) <= {200, 410, 429, "closed"}
    assert not (tmp_path / "agents").exists()
