"""A reader's own task, from docs/own_task.md as it stands: its files, its command, and what may be
wrong.

The command runs in a process of its own, with real reward workers, and ends where the first server
would start.

Covers lrl/errors.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_policies import tiny_llama

PAGE = (Path(__file__).parents[2] / "docs" / "own_task.md").read_text()
SECTION = re.search(r"## Three files and a command\n(.*?)\n## ", PAGE, re.DOTALL)
assert SECTION is not None
FILES = dict(re.findall(r"```\w+\n# (\S+)\n(.*?)```", SECTION[1], re.DOTALL))
ROW = re.search(r"^    (\{.*\})$", SECTION[1], re.MULTILINE)
COMMAND = re.search(r"^    lrl (.*)$", SECTION[1], re.MULTILINE)
UP_TO_A_SERVER = """
import sys
from lrl.cli.main import main

def start(server):
    print("a server would start here")
    raise SystemExit(0)

if __name__ == "__main__":
    from lrl.generators.server import Server

    Server.start = start
    sys.exit(main())
"""


@pytest.fixture
def readers_folder(tmp_path: Path) -> Path:
    assert ROW is not None
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "problems.jsonl").write_text(f"{ROW[1]}\n" * 16)
    tiny_llama(tmp_path / "policy")
    return tmp_path


def run(folder: Path, script: str, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in the folder: Python's path begins with the script's own folder."""
    (folder / script).parent.mkdir(exist_ok=True)
    (folder / script).write_text(text)
    command = [sys.executable, script, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=540)


MINE = """
import lrl

class Keyword(lrl.rewards.Reward):
    def __call__(self, prompt, response, **columns):
        return 1.0
"""


def test_the_recipe_for_a_users_own_task_is_short_and_works_and_classes_beside_it_are_found(
    readers_folder: Path,
) -> None:
    """By a console script, whose folder is not the current one, and by the reward workers."""
    assert COMMAND is not None and len(FILES["own.yaml"].splitlines()) <= 15
    (readers_folder / "mine.py").write_text(MINE)
    words = [*COMMAND[1].split(), "--data.rewards+", "mine.Keyword"]
    done = run(readers_folder, "bin/lrl", UP_TO_A_SERVER, *words)
    assert "a server would start here" in done.stdout, done.stderr[-3000:]
    assert "\r" not in done.stderr, "without a terminal no bar fills the log"


SCRIPT = """
if __name__ == "__main__":
    import lightning as L

    import lrl
    from lrl.callbacks import WeightSync

    policy = lrl.PolicyModule("./policy")
    data = lrl.RolloutDataModule("problems.jsonl", "rewards.py:right", groups_per_step=4, rollouts_per_group=4)
    settings = {"accelerator": "cpu", "max_steps": 1, "max_epochs": -1, "logger": False}
    L.Trainer(devices=2, strategy=lrl.AsyncSingleDevice(), callbacks=[WeightSync()], **settings).fit(policy, data)
"""


def test_a_script_ends_with_the_message_alone_where_the_user_is_at_fault(
    readers_folder: Path,
) -> None:
    wrong = SCRIPT.replace("groups_per_step=4", "groups_per_step=40")
    done = run(readers_folder, "train.py", wrong)
    message = "groups_per_step is 40, and problems has 16"
    errors = done.stderr[done.stderr.index("lrl: error:") :]
    assert done.returncode == 1 and message in errors, done.stderr
    assert "Traceback" not in done.stderr and len(errors.splitlines()) <= 3
