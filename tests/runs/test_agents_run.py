"""A run that is killed while agents elsewhere play (the program of `docs/agents.md`), and starts
again at the same port: each prompt is trained once, and no agent waits for ever."""

from __future__ import annotations

import json
import os
import re
import signal
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

import lrl
from lrl.callbacks import Evaluation
from lrl.callbacks.base import run_of
from lrl.environments import Agent
from tests.http_call import call
from tests.leftovers import MARK, wait_for
from tests.lent_server import LentServer, server_elsewhere
from tests.runs.test_async_run import fit
from tests.strategies.forked_ranks import Fork, free_port, start_fork

STEPS, GROUPS, RESPONSES = 4, 2, 3
KEY = "k" * 32
DEADLINE_S = 300.0
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10, 10 + GROUPS * STEPS)]


class Telling(L.Callback):
    """Writes a line for each step, before it is saved."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        groups: Any = run_of(trainer).step_stream.groups  # type: ignore[union-attr]
        rollouts = [one for group in groups for one in group.rollouts]
        line = {
            "step": trainer.global_step,
            "prompts": [group.prompt.id for group in groups],
            "whole": sum(len(one.turns) == 1 and not one.failure for one in rollouts),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(policy: Path, folder: Path, port: int, url: str, token: str) -> None:
    """A run with the server of another process, which saves at every step and resumes from what is
    there."""
    saved = folder / "checkpoints" / "last.ckpt"
    agents = Agent(port=port)
    agents.stop = tuple(string.ascii_letters)  # else a turn of this policy has hundreds of tokens
    evaluation = Evaluation(lrl.Prompts(ROWS[:2], name="held_out"), every_n_steps=100)
    fit(
        server_elsewhere(url, token, lrl.ServerSettings(dtype="float32")),
        policy,
        folder,
        steps=STEPS,
        callbacks=[
            Telling(folder / "steps.jsonl"),
            ModelCheckpoint(saved.parent, every_n_train_steps=1, save_last=True),
            evaluation,
        ],
        ckpt_path=str(saved) if saved.exists() else None,
        rewards=[],
        rollouts_per_group=RESPONSES,
        max_lag=1,
        max_response_tokens=400,
        max_turn_tokens=128,
        environment=agents,
        prompts=ROWS,
    )
    assert evaluation.reports and not any(report.failures for _, report in evaluation.reports)


@pytest.fixture
def start(
    policy_folder: Path, lent_server: LentServer, tmp_path: Path, mark: str
) -> Iterator[Callable[[int], Fork]]:
    """Starts the run at a port, or starts it again."""
    started: list[Fork] = []
    where = (lent_server.url, lent_server.token)

    def start(port: int) -> Fork:
        variables = {name: os.environ[name] for name in (MARK, "TMPDIR")}
        variables["LRL_AGENT_KEY"] = KEY
        output = tmp_path / f"output-{len(started)}"
        words = (policy_folder, tmp_path, port, *where)
        started.append(start_fork(train, output, variables, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()


@pytest.fixture
def plays(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts the program of the page."""
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (program,) = re.findall(r"```python\n(# plays_elsewhere\.py\n.*?)```", page, re.S)
    (tmp_path / "plays_elsewhere.py").write_text(program)
    words = [sys.executable, "plays_elsewhere.py", str(Path("agents", "address.json"))]
    started: list[subprocess.Popen[bytes]] = []

    def play() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(words, cwd=tmp_path))
        return started[-1]

    yield play
    for one in started:
        one.kill()


def asked(run: Fork, port: int, path: str, key: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """What a run answers an agent, once it listens and has an episode for it: status and JSON."""
    answers: list[tuple[int, bytes]] = []
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def answered() -> bool:
        assert run.poll() is None, run.printed()
        with suppress(ConnectionError):
            url, sent = f"http://127.0.0.1:{port}", json.dumps(body).encode()
            answers.append(call(url, "POST", path, headers, sent))
        return bool(answers) and answers[-1][0] != 429

    wait_for(answered, DEADLINE_S, "the run's answer")
    status, found = answers[-1]
    return status, json.loads(found)


def test_a_run_that_is_killed_while_agents_play_trains_every_prompt_once(
    start: Callable[[int], Fork], plays: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    steps, port = tmp_path / "steps.jsonl", free_port()
    first = start(port)
    address = tmp_path / "agents" / "address.json"
    wait_for(lambda: address.exists() or first.poll() is not None, DEADLINE_S, "its address")
    # An episode that nobody ends, with a turn that the checkpoint has: without it the run might end
    # before it is killed.
    _, episode = asked(first, port, "/episodes", KEY)
    path = f"{urlsplit(episode['base_url']).path}/chat/completions"
    turn = {"messages": [{"role": "user", "content": "go"}]}
    assert asked(first, port, path, episode["api_key"], **turn)[0] == 200
    players = [plays() for _ in range(3)]
    saved = tmp_path / "checkpoints" / "last.ckpt"
    wait_for(lambda: saved.exists() or first.poll() is not None, DEADLINE_S, "a checkpoint")
    first.send_signal(signal.SIGKILL)
    assert [one.wait(DEADLINE_S) for one in players] == [0] * 3
    first.wait(DEADLINE_S)

    second = start(port)
    status, _ = asked(second, port, path, episode["api_key"], **turn)
    assert status == 410, "the episode was of the run before"
    players = [plays() for _ in range(3)]
    assert second.wait(DEADLINE_S) == 0, second.printed()
    assert [one.wait(DEADLINE_S) for one in players] == [0] * 3

    said = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [line["step"] for line in said].count(1) == 1, "it was saved, and is not trained again"
    trained = {line["step"]: line for line in said}  # the last one may be
    assert sorted(trained) == list(range(1, STEPS + 1))
    prompts = [prompt for line in trained.values() for prompt in line["prompts"]]
    assert sorted(prompts) == list(range(STEPS * GROUPS))
    assert {line["whole"] for line in trained.values()} == {GROUPS * RESPONSES}
    assert not (tmp_path / "agents").exists()
