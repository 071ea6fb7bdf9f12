"""The pages: what they name exists."""

from __future__ import annotations

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
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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
