"""Checks of the YAML that a command names, before jsonargparse reads it: its errors name neither
file nor line, and of a key that stands twice it silently takes the second."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

CONFIG = ("--config", "-c")


def check_files(words: Sequence[str]) -> None:
    """Checks every YAML file that a command names, and YAML after `--config`.

    Raises:
        ValueError: One is no YAML, or has a key twice; names the file, the line and the column.
    """
    for before, word in pairwise(["", *words]):
        option, _, value = word.partition("=") if word.startswith("-") else (before, "", word)
        path = Path(value)
        is_file = "\n" not in value and path.suffix in (".yaml", ".yml") and path.is_file()
        if not is_file and (option not in CONFIG or not value):
            continue
        try:
            text = path.read_text(encoding="utf-8-sig") if is_file else value
            check(text, of_settings=option in CONFIG)
        except (ValueError, OSError) as error:
            raise ValueError(f"{option} {value}: {error}") from error


def check(text: str, of_settings: bool) -> None:
    """Raises ValueError if `text` is no YAML, has a key twice, or should be settings and is not."""
    try:
        root = yaml.compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(_at(mark, f"{error.problem} ({error.context or 'YAML'})")) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    for key, first in _repeated_keys(root):
        line = first.start_mark.line + 1
        raise ValueError(_at(key.start_mark, f"{key.value} is already in line {line}"))
    if of_settings and not isinstance(root, yaml.MappingNode):
        raise ValueError("it maps no settings to values, as in `data: {max_lag: 1}`")


def _at(mark: yaml.Mark, problem: str) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _repeated_keys(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yields each key that stands twice in a mapping, with the first of its name."""
    pairs = node.value if isinstance(node, yaml.CollectionNode) else []
    first: dict[str, yaml.Node] = {}
    for pair in pairs:
        key, *values = pair if isinstance(pair, tuple) else (None, pair)
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in first:
                yield key, first[key.value]
            first[key.value] = key
        for value in values:
            yield from _repeated_keys(value)
