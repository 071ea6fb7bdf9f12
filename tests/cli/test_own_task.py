"""A reader's own task, from docs/own_task.md as it stands: its files and its command.

The command runs in a process of its own, with real reward workers, and ends where the first server
would start.

Covers lrl/cli/main.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


MINE = """
import lrl

class Keyword(lrl.rewards.Reward):
    def __call__(self, prompt, response, **columns):
        return 1.0
"""


def test_the_recipe_for_a_users_own_task_is_short_and_works_and_classes_beside_it_are_found(
    tmp_path: Path,
) -> None:
    """By a console script, whose folder is not the current one, and by the reward workers."""
    assert ROW is not None and COMMAND is not None and len(FILES["own.yaml"].splitlines()) <= 15
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "problems.jsonl").write_text(f"{ROW[1]}\n" * 16)
    tiny_llama(tmp_path / "policy")
    (tmp_path / "mine.py").write_text(MINE)
    script = tmp_path / "bin/lrl"
    script.parent.mkdir()
    script.write_text(UP_TO_A_SERVER)
    words = [sys.executable, script, *COMMAND[1].split(), "--data.rewards+", "mine.Keyword"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=540)
    assert "a server would start here" in done.stdout, done.stderr[-3000:]
    assert "\r" not in done.stderr, "without a terminal no bar fills the log"
