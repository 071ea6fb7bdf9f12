"""What README and docs say is true: scripts run as they stand, commands parse, metrics, files and
tests exist.

The script of the README runs in a process of its own, with its own vLLM server, as a reader would run
it. Only sizes are replaced in its text.

Covers callbacks/summary.py.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

import lrl
from lrl.callbacks.rollout_log import CHARTS
from lrl.cli.main import main
from lrl.rewards.pool import KINDS
from tests.leftovers import nothing_left

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDES = "".join(
    (ROOT / "docs" / f"{page}.md").read_text()
    for page in (
        *("own_task", "data", "objectives", "lag_and_devices", "dispatch", "running"),
        *("environments", "agents", "real_model", "own_loss"),
    )
)
METRICS = (ROOT / "docs" / "metrics.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

(SCRIPT,) = re.findall(r"```python\n(import lrl\n.*?)```", README, re.DOTALL)
COMMAND_LINE = r"^    (lrl (?:fit|validate) .*?)(?:  .*)?$"
ONE_COMMAND_A_LINE = re.sub(r" \\\n +", " ", README + GUIDES)
COMMANDS = re.findall(COMMAND_LINE, ONE_COMMAND_A_LINE, re.MULTILINE)
FAMILIES = "reward|rewards|rollouts|policy|time|trainer|generators|throughput|fleet|eval"
TAGS_ON_THE_PAGE = [
    tag
    for cell in re.findall(r"^\| (`[^|]+`) \|", METRICS, re.MULTILINE)
    for tag in re.findall(rf"`((?:{FAMILIES})/[^`]+)`", cell)
]
LIGHTNINGS_OWN = {"epoch"}
NEEDS_A_SETTING = {
    "rewards/scorers",
    "rewards/moved",
    "eval/<dataset>/<column>/<value>",
    "policy/kl_reference",
}
SOMETHING_HAPPENED = {
    *(f"rewards/{kind}" for kind in ("gave_up", *KINDS, "retried", "replaced")),
    *(f"fleet/{what}" for what in ("restarts", "reissued", "moved", "joined", "left")),
    *(
        f"rollouts/{what}"
        for what in ("discarded", "masked_tokens", "skipped_groups", "replayed_groups")
    ),
    *(f"eval/<dataset>/{what}" for what in ("failures", "truncated", "version_high", "pass@<k>")),
}
"""Absent from a run in which it did not."""


def run_small(script: str, policy: Path, folder: Path) -> EventAccumulator:
    """Run the README's script with another policy and less work; what it wrote to TensorBoard."""
    held_out = '"lrl.quickstart.task:held_out"'
    smaller = {
        '"lrl.quickstart.warmup:policy"': repr(str(policy)),
        'task:correct")': 'task:correct", groups_per_step=2, rollouts_per_group=4)',
        held_out: f"lrl.Prompts({held_out}, limit=4)",
        "max_steps=60": "max_steps=2",
    }
    for old, new in smaller.items():
        assert old in script, old
        script = script.replace(old, new)
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()


def tags(events: EventAccumulator) -> set[str]:
    kinds = events.Tags()
    texts = {tag.removesuffix("/text_summary") for tag in kinds["tensors"]}
    return {*kinds["scalars"], *texts} - LIGHTNINGS_OWN - {CONFIG_SUMMARY_TAG}


def is_tag(logged: str, documented: str) -> bool:
    """Whether a run's tag is this one of the page, where `<...>` stands for any name."""
    return re.fullmatch(re.sub(r"<\w+>", r"[^/]+", documented), logged) is not None


@pytest.fixture(scope="module")
def first_run(
    quickstart_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, EventAccumulator]]:
    """The script's folder and metrics; the script leaves no process and no file elsewhere."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as environment:
        leaves = nothing_left(environment)
        next(leaves)
        run = folder, run_small(SCRIPT, quickstart_policy, folder)
        next(leaves, None)
    yield run


def test_the_first_script_does_the_quickstarts_job(
    first_run: tuple[Path, EventAccumulator],
) -> None:
    folder, events = first_run
    assert len(SCRIPT.splitlines()) <= 8
    assert [event.step for event in events.Scalars("policy/loss")] == [0, 1]
    assert (folder / "lightning_logs" / "version_0" / "policy" / "model.safetensors").exists()
    assert (folder / "lightning_logs" / "version_0" / "curve.png").exists()


def test_the_page_names_every_metric_of_a_run_and_no_other(
    first_run: tuple[Path, EventAccumulator],
) -> None:
    logged = tags(first_run[1])
    assert {
        tag for tag in logged if not any(is_tag(tag, known) for known in TAGS_ON_THE_PAGE)
    } == set()
    absent = {known for known in TAGS_ON_THE_PAGE if not any(is_tag(tag, known) for tag in logged)}
    assert absent - SOMETHING_HAPPENED == NEEDS_A_SETTING


def test_every_chart_of_the_overview_has_a_tag_that_is_logged(
    first_run: tuple[Path, EventAccumulator],
) -> None:
    tags = first_run[1].Tags()
    assert CONFIG_SUMMARY_TAG in tags["tensors"]
    for patterns in CHARTS.values():
        assert any(re.match(pattern, tag) for pattern in patterns for tag in tags["scalars"])


def test_the_script_for_those_who_know_trl_builds_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "from_trl.md").read_text()
    (script,) = re.findall(r"```python\n# lrl\n(.*?)```", page, re.DOTALL)
    # A module, since the reward is imported by its name; no GPU is here.
    script = script.replace('if __name__ == "__main__":', "def build():").replace('"gpu"', '"cpu"')
    (tmp_path / "ported.py").write_text(script)
    monkeypatch.syspath_prepend(tmp_path)
    built = []
    monkeypatch.setattr(L.Trainer, "fit", lambda trainer, *parts: built.append(parts))
    importlib.import_module("ported").build()
    ((policy, data),) = built
    assert isinstance(policy, lrl.PolicyModule)
    assert isinstance(data, lrl.RolloutDataModule)


def test_every_tag_in_the_code_is_on_the_page() -> None:
    sources = [path for folder in ("lrl", "callbacks") for path in (ROOT / folder).rglob("*.py")]
    written = {
        tag
        for path in sources
        for tag in re.findall(rf'"((?:{FAMILIES})/[^" ]+(?<!\.py))"', path.read_text())
    }
    assert written
    # In an f-string any expression may stand in braces; the page has names in its place.
    patterns = {tag: re.sub(r"\\\{.*?\\\}", ".+", re.escape(tag)) for tag in written}
    assert {
        tag
        for tag, like in patterns.items()
        if not any(re.fullmatch(like, t) for t in TAGS_ON_THE_PAGE)
    } == set()


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the guides have the reader write."""
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", README + GUIDES, re.DOTALL):
        (tmp_path / name).write_text(text)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_the_pages_parses(
    command: str, readers_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(command)[1:], "--print_config"])
    printed = capsys.readouterr()
    assert end.value.code == 0, printed.err
    assert "class_path: " in printed.out


def test_an_interpolation_takes_the_value_of_its_setting(
    readers_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "fit --config quickstart --config keep.yaml --data.groups_per_step 7 --print_config"
    with pytest.raises(SystemExit):
        main(words.split())
    assert "every_n_train_steps: 7" in capsys.readouterr().out


def test_the_file_tree_names_only_what_exists() -> None:
    tree = re.search(r"```\n(lrl/ .*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert tree is not None
    folder = ROOT
    for line in tree[1].splitlines():
        name = line.split()[0]
        path = (folder if line.startswith(" ") else ROOT) / name
        assert path.exists(), name
        folder = path if not line.startswith(" ") else folder
