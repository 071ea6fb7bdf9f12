"""The pages: what they name exists."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import lrl

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "recipes" / "README.md",
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
NAVIGATION = ROOT / "docs" / "site" / "navigation.md"
FILES = [
    str(path)
    for folder in ("lrl", "callbacks", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
]
SETTINGS: dict[str, tuple[Any, ...]] = {
    r"(?:--)?data": (lrl.RolloutDataModule,),
    r"(?:--)?model": (lrl.PolicyModule,),
    r"(?:--)?(?:trainer\.)?strategy": (lrl.AsyncSingleDevice, lrl.AsyncDDP, lrl.AsyncFSDP),
    r"(?:--)?(?:trainer\.)?strategy\.server": (lrl.ServerSettings,),
}
"""Where a setting is a word on a page, and the arguments that it may be."""
NO_SETTINGS = {"class_path", "init_args", "md", "py", "setup"} | {"max_lagg"}
"""Other words behind such a name; the last one is a page's example of a misspelt setting."""
TESTS = {name for file in FILES for name in re.findall(r"def (test_\w+)", Path(file).read_text())}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_and_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`([a-z0-9_/]+\.py)[:`]", text))
    # Elsewhere a name without a folder may be a file that the reader writes.
    if page.name != "architecture.md":
        named = {file for file in named if "/" in file}
    assert {file for file in named if not any(path.endswith(f"/{file}") for path in FILES)} == set()
    assert set(re.findall(r"`(test_\w+)`", text)) - TESTS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "from_verl.md":  # the first column has verl's, which also begin with `data.`
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.M)
    for words, owners in SETTINGS.items():
        known = {
            name
            for owner in owners
            for one in owner.__mro__[:-1]
            for name in inspect.signature(one.__init__).parameters
        }
        named = set(re.findall(rf"(?<![\w./]){words}\.(\w+)", text))
        assert named - known - NO_SETTINGS == set(), words


@pytest.mark.parametrize("page", [*PAGES, NOTEBOOK], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.M)
            anchors = {
                re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings
            }
            assert anchor in anchors, target


def text_of(node: ast.AST) -> str:
    """A text of the code in one line, with `...` for each value; empty for what is none."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [part.value if isinstance(part, ast.Constant) else "..." for part in parts]
    return "".join(text for text in texts if isinstance(text, str)).replace("\n", " ")


def is_in(quotation: str, texts: str) -> bool:
    """Whether one of the lines has the words of the quotation, in which `...` is any text."""
    words = [re.escape(part.strip()) for part in quotation.split("...") if part.strip(" .;,:")]
    return re.search(".*".join(words), texts) is not None


def quotations() -> list[str]:
    """The messages in the tables of the page: in the column under `you see`."""
    found, column = [], 0
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for cells in (row.split(" | ") for row in re.findall(r"^\| (.*) \|$", page, re.M)):
        if "you see" in cells:
            column = cells.index("you see")
        else:
            found += re.findall(r"`([^`]+)`", cells[column])
    return found


def test_every_message_of_the_troubleshooting_page_is_one_of_the_code() -> None:
    library = [file for file in FILES if file.startswith((f"{ROOT}/lrl/", f"{ROOT}/callbacks/"))]
    nodes = [node for file in library for node in ast.walk(ast.parse(Path(file).read_text()))]
    texts = "\n".join(text_of(node) for node in nodes)
    assert len(quotations()) > 30
    assert [quotation for quotation in quotations() if not is_in(quotation, texts)] == []


def test_every_metric_that_a_reader_of_a_run_looks_at_is_one() -> None:
    reference = (ROOT / "docs" / "metrics.md").read_text()
    rows = "".join(re.findall(r"^\| (`[^|]+`) \|", reference, re.M))
    metrics = set(re.findall(r"`([a-z_]+/[^`]+)`", rows))
    families = "|".join({metric.partition("/")[0] for metric in metrics})
    page = (ROOT / "docs" / "reading_a_run.md").read_text()
    named = set(re.findall(rf"`((?:{families})/[a-z_<>/]+)`", page))
    assert len(named) > 15
    assert named - metrics == set()


def test_every_page_is_in_the_navigation_of_the_site_once() -> None:
    listed = [
        entry
        for fence in re.findall(r"```{toctree}\n(.*?)```", NAVIGATION.read_text(), re.DOTALL)
        for entry in fence.splitlines()
        if entry and not entry.startswith(":")
    ]
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in PAGES} - {"README"}
    assert sorted(listed) == sorted(pages - {"docs/site/navigation"} | {"docs/site/api/index"})
