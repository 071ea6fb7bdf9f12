"""The site is built without a warning, and without asking another host for anything.

Skipped without its tools: `make docs` installs them, and so does CI.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import lrl
from tests.strategies.forked_ranks import start_fork

ROOT = Path(__file__).parents[1]
NEEDED = ("sphinx", "myst_parser", "furo")
LOADS = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"(https?:)?//|url\([\"']?(https?:)?//|@import"
)
"""What a browser would fetch from another host. A link that one has to click is none of it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    words = ["-q", "--fail-on-warning", "--keep-going", "--conf-dir", str(ROOT / "docs" / "site")]
    fork = start_fork(build, folder / "said", {}, *words, str(ROOT), str(folder))
    assert fork.wait(300.0) == 0, fork.printed()
    return folder


def build(*words: str) -> None:
    from sphinx.cmd.build import build_main

    raise SystemExit(build_main(words))


def test_the_site_is_built_without_a_warning_and_begins_with_the_readme(site: Path) -> None:
    assert (site / "index.html").read_text() == (site / "README.html").read_text()
    assert (site / "docs" / "troubleshooting.html").exists()
    assert "max_lag" in (site / "searchindex.js").read_text()


def test_no_page_of_the_site_asks_another_host(site: Path) -> None:
    files = [file for kind in ("html", "css") for file in site.rglob(f"*.{kind}")]
    assert len(files) > 40
    assert [file.name for file in files if LOADS.search(file.read_text())] == []


def test_the_reference_has_every_public_class(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "docs" / "site" / "api").glob("*.html"))
    found = [getattr(lrl, name) for name in lrl.__all__]
    modules = [lrl, *(one for one in found if isinstance(one, ModuleType))]
    public = {
        name
        for module in modules
        for name in getattr(module, "__all__", ())
        if isinstance(getattr(module, name), type)
    }
    assert len(public) > 60
    assert public - set(re.findall(r'id="lrl[\w.]*\.(\w+)"', pages)) == set()
