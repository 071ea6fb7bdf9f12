"""The settings of Sphinx for the site, which `make docs` builds into build/site.

The pages are read where they are, from the root of the repository, so a link that works on GitHub
works on the site; Sphinx checks each link and its heading. The first page is the README. What the
site loads comes with it: no fonts and no scripts of other hosts.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

project = "lrl"
root_doc = "README"
html_title = "lrl"
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "*.md",
    "docs/**.md",
    "docs/site/api/*.rst",
    "recipes/README.md",
    "benchmarks/**.md",
]
exclude_patterns = ["docs/site/navigation.md", ".*", "build", "lrl", "runs", "tests"]

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # README's second heading may be of any level

add_module_names = False
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
autodoc_inherit_docstrings = False  # torch's and Lightning's have pages of their own
napoleon_use_ivar = True


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Appends the navigation to the first page; on GitHub it would be visible there."""
    if docname == root_doc:
        source[0] += "\n" + (HERE / "navigation.md").read_text()


def as_sphinx_reads_it(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turns the backticks of a docstring, which are Markdown's, into Sphinx's."""
    if what == "module":  # it is for those who change lrl
        lines.clear()
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", one_line_of_code, "\n".join(lines))
    # Behind an empty line napoleon does not take what is before a colon for the attribute's type.
    lines[:] = [*([""] if what in {"attribute", "property"} else []), *text.split("\n")]


def one_line_of_code(found: re.Match[str]) -> str:
    """Writes what stands between backticks in one line and as Sphinx's literal."""
    return f"``{' '.join(found[1].split())}``"


def name_the_first_page(app: Sphinx, exception: Exception | None) -> None:
    """Copies the first page to where a browser looks for it."""
    if exception is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Sphinx calls it."""
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", as_sphinx_reads_it, priority=0)  # before napoleon
    app.connect("build-finished", name_the_first_page)
