"""What `Code` reads: the program in a response, and the tests in a row."""

import ast
import re
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from lrl.rewards.sandbox_session import Step

# Without a step back (`+` behind each): a policy writes lines of any length, and the time would grow
# with its square.
_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^`]*+")
_PYTHON = ("python", "py", "python3")
_KEYS = {"input", "output"}


class Pair(NamedTuple):
    """A test of a program as a whole."""

    stdin: str
    stdout: str


class Tests(NamedTuple):
    """The tests of a row: pairs, or steps."""

    pairs: list[Pair]
    steps: list[Step]

    @property
    def counted(self) -> list[int]:
        """The numbers of those that count."""
        if self.pairs:
            return list(range(len(self.pairs)))
        return [number for number, step in enumerate(self.steps) if step.is_test]


def program_in(response: str) -> str | None:
    """Returns the last fenced block that is named as Python, else the last one without a name;
    None if there is neither. A block that is not closed is none."""
    named = None
    unnamed = None
    fence = ""
    language = ""
    lines: list[str] = []
    for line in response.splitlines():
        found = _FENCE.fullmatch(line)
        if not fence:
            if found is not None:
                fence, language = found[1], found[2].lower()
                lines = []
        elif found is not None and found[1].startswith(fence) and not found[2]:
            if language in _PYTHON:
                named = lines
            elif not language:
                unnamed = lines
            fence = ""
        else:
            lines.append(line)
    block = unnamed if named is None else named
    return None if block is None else textwrap.dedent("\n".join(block) + "\n")


def tests_in(columns: Mapping[str, Any], name: str) -> Tests:
    """Returns the tests in a column of a row: source, a list of sources, or a list of pairs.

    Of one source every `assert` at its top level is a test; without any, all of it is one.

    Raises:
        ValueError: The row has no such column, or no tests in it.
    """
    if name not in columns:
        raise ValueError(f"the row has no column `{name}`, only {sorted(columns)}")
    value = columns[name]
    if isinstance(value, str) and value.strip():
        return Tests([], _steps(value, name))
    if isinstance(value, list | tuple) and value:
        if all(isinstance(each, str) for each in value):
            for each in value:
                _parsed(each, name)
            return Tests([], [Step(each, is_test=True) for each in value])
        if all(isinstance(each, Mapping) for each in value):
            return Tests([_pair(each, name) for each in value], [])
    raise ValueError(
        f"the column `{name}` is {value!r:.200}; Code takes Python source with asserts, a list of "
        'sources, or a list of {"input": text, "output": text}'
    )


def _steps(source: str, name: str) -> list[Step]:
    statements = _parsed(source, name).body
    if not any(isinstance(each, ast.Assert) for each in statements):
        return [Step(source, is_test=True)]
    return [Step(ast.unparse(each), isinstance(each, ast.Assert)) for each in statements]


def _parsed(source: str, name: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the column `{name}` is no Python: {error}: {source!r:.200}") from error


def _pair(value: Mapping[str, Any], name: str) -> Pair:
    if not value.keys() >= _KEYS or not all(isinstance(value[key], str) for key in _KEYS):
        raise ValueError(
            f"the column `{name}` has the test {dict(value)!r:.200}; it needs the texts `input` and "
            "`output`"
        )
    return Pair(value["input"], value["output"])


def is_same_output(written: bytes, right: str) -> bool:
    """Whether two outputs are equal, apart from white space at the ends of lines and of the
    text."""
    return _lines(written.decode(errors="replace")) == _lines(right)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
