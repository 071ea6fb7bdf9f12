"""The YAML that a command names after `--config`: shipped recipes by name, and files.

Their text is checked before jsonargparse reads it: its errors name neither file nor line, and of a
key that stands twice it silently takes the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lrl
from lrl.system.import_by_name import nearest

if TYPE_CHECKING:
    import yaml

FOLDER = Path(lrl.__file__).parent / "recipes"
CONFIG = ("--config", "-c")


def recipes() -> dict[str, Path]:
    """Returns the paths of the shipped recipes by name."""
    return {path.stem: path for path in FOLDER.glob("*.yaml")}


def with_recipe_paths(words: Sequence[str]) -> list[str]:
    """Replaces the name of a shipped recipe after `--config` by its path, and checks all YAML that
    the words name; a file of that name wins.

    Raises:
        FileNotFoundError: There is neither; names the nearest one.
        ValueError: A file is no YAML of settings, or has a key twice; names file, line and column.
    """
    expanded: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        if not (word.startswith("-") and equals):
            option, equals, value = (expanded or [""])[-1], "", word
        if option in CONFIG:
            value = _path(value)
        if option in CONFIG or _is_yaml_file(value):
            _check(option, value)
        expanded.append(f"{option}={value}" if equals else value)
    return expanded


def _path(name: str) -> str:
    """Returns the path of a recipe, or `name` if it is a file, or YAML itself."""
    if set(name) & set("{:\n") or (name and Path(name).exists()):
        return name
    known = recipes()
    if name in known:
        return str(known[name])
    files = {file.stem: file.name for file in Path(name).parent.glob("*.y*ml")}
    meant = nearest(Path(name).stem, [*known, *files])
    near = f" Did you mean {files.get(meant, meant)}?" if meant else ""
    raise FileNotFoundError(
        f"--config {name or repr(name)}: there is no such file, and no such recipe.{near} "
        f"Shipped are {', '.join(sorted(known))}."
    )


def _is_yaml_file(value: str) -> bool:
    path = Path(value)
    return "\n" not in value and path.suffix in (".yaml", ".yml") and path.is_file()


def _check(option: str, value: str) -> None:
    """Raises ValueError if YAML cannot be read or has a key twice."""
    import yaml  # no reward worker needs it

    try:
        text = Path(value).read_text(encoding="utf-8-sig") if _is_yaml_file(value) else value
        root = yaml.compose(text)
        for key, line in _repeated_keys(root):
            problem = f"{key.value} is already in line {line}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        if option in CONFIG and not isinstance(root, yaml.MappingNode):
            raise ValueError("it maps no settings to values, as in `data: {max_lag: 1}`")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{option} {value}: {place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"{option} {value}: {' '.join(str(error).split())}") from error


def _repeated_keys(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, int]]:
    """Yields each key that stands twice in a mapping, with the line of the first one."""
    first: dict[object, int] = {}
    pairs = [] if node is None or isinstance(node.value, str) else node.value
    for pair in pairs:
        key, *values = pair if isinstance(pair, tuple) else (None, pair)
        if key is not None and isinstance(key.value, str) and key.value != "<<":
            if key.value in first:
                yield key, first[key.value]
            first[key.value] = key.start_mark.line + 1
        for value in values:
            yield from _repeated_keys(value)
