"""The YAML that a command names after `--config`: shipped recipes by name, and files.

Their text is checked before jsonargparse reads it: its errors name neither file nor line, and of a
key that stands twice it silently takes the second.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lrl
from lrl.system.import_by_name import nearest

FOLDER = Path(lrl.__file__).parent / "recipes"
CONFIG = ("--config", "-c")


def recipes() -> dict[str, Path]:
    """Returns the paths of the shipped recipes by name."""
    return {path.stem: path for path in FOLDER.glob("*.yaml")}


def with_recipe_paths(words: Sequence[str]) -> list[str]:
    """Replaces the name of a shipped recipe after `--config` by its path, and checks all YAML that
    the words name; a file of that name wins. Raises FileNotFoundError if there is neither, and
    ValueError if YAML has no settings, or a key twice."""
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

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            first: dict[str, Any] = {}
            for key, _ in node.value:
                mark = first.setdefault(str(key.value), key.start_mark)
                if mark is not key.start_mark and key.value != "<<":
                    problem = f"{key.value} is already in line {mark.line + 1}"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            return super().construct_mapping(node, deep)

    try:
        text = Path(value).read_text(encoding="utf-8-sig") if _is_yaml_file(value) else value
        if not isinstance(yaml.load(text, Loader), dict) and option in CONFIG:
            raise ValueError("it maps no settings to values, as in `data: {max_lag: 1}`")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{option} {value}: {place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ValueError(f"{option} {value}: {' '.join(str(error).split())}") from error
