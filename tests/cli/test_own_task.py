"""A reader's own task, from docs/own_task.md as it stands: its files, its command, and what may be
wrong.

The command runs in a process of its own, with real reward workers, and ends where the first server
would start.

Covers lrl/errors.py.
"""

from __future__ import annotations

import json
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


def lrl(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as a console script: Python's path begins with the script's folder, not the
    current one."""
    script = folder / "bin" / "lrl"
    script.parent.mkdir(exist_ok=True)
    script.write_text(UP_TO_A_SERVER)
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=540)


def test_the_recipe_for_a_users_own_task_is_short_and_works_unchanged(readers_folder: Path) -> None:
    assert COMMAND is not None and len(FILES["own.yaml"].splitlines()) <= 15
    done = lrl(readers_folder, *COMMAND[1].split())
    assert "a server would start here" in done.stdout, done.stderr[-3000:]
    assert "\r" not in done.stderr, "without a terminal no bar fills the log"


def test_a_class_and_functions_of_the_current_folder_are_found_also_by_the_reward_workers(
    readers_folder: Path,
) -> None:
    (readers_folder / "mine.py").write_text(
        "import json\nimport lrl\n\n"
        "class Keyword(lrl.rewards.Reward):\n"
        "    def __call__(self, prompt, response, **columns):\n        return 1.0\n\n"
        "def rows():\n    return [json.loads(line) for line in open('problems.jsonl')]\n\n"
        "def model():\n    return 'policy'\n"
    )
    rewards = json.dumps(["rewards:right", {"class_path": "mine.Keyword"}])
    words = ["fit", "--config", "own.yaml", "--model.model", "mine.py:model"]
    words += ["--data.prompts", "mine:rows", "--data.rewards", rewards]
    done = lrl(readers_folder, *words)
    assert "a server would start here" in done.stdout, done.stderr[-3000:]


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


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    command = [sys.executable, "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=540)


def test_a_script_ends_with_the_message_alone_where_the_user_is_at_fault(
    readers_folder: Path,
) -> None:
    wrong = SCRIPT.replace("groups_per_step=4", "groups_per_step=40")
    done = run_script(wrong, readers_folder)
    message = "groups_per_step is 40, and problems has 16"
    errors = done.stderr[done.stderr.index("lrl: error:") :]
    assert done.returncode == 1 and message in errors, done.stderr
    assert "Traceback" not in done.stderr and len(errors.splitlines()) <= 3
