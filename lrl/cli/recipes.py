"""Shipped recipes, which `--config` knows by name."""

from collections.abc import Sequence
from pathlib import Path

import lrl
from lrl.system.import_by_name import nearest

FOLDER = Path(lrl.__file__).parent / "recipes"


def recipes() -> dict[str, Path]:
    """Returns the paths of the shipped recipes by name."""
    return {path.stem: path for path in FOLDER.glob("*.yaml")}


def with_recipe_paths(words: Sequence[str]) -> list[str]:
    """Replaces the name of a shipped recipe after `--config` by its path; a file of that name wins.
    Checks all YAML.

    Raises:
        FileNotFoundError: There is neither; names the nearest one.
        ValueError: A file is no YAML of settings.
    """
    from lrl.cli.config_file import check_files  # it imports yaml, which no reward worker needs

    known = recipes()

    def path(name: str) -> str:
        if set(name) & set("{:\n") or (name and Path(name).exists()):  # YAML itself, or a file
            return name
        if name not in known:
            files = {file.stem: file.name for file in Path(name).parent.glob("*.y*ml")}
            meant = nearest(Path(name).stem, [*known, *files])
            near = f" Did you mean {files.get(meant, meant)}?" if meant else ""
            raise FileNotFoundError(
                f"--config {name or repr(name)}: there is no such file, and no such recipe.{near} "
                f"Shipped are {', '.join(sorted(known))}."
            )
        return str(known[name])

    expanded = list(words)
    for index, word in enumerate(words):
        if word.startswith("--config="):
            expanded[index] = f"--config={path(word.removeprefix('--config='))}"
        elif index and words[index - 1] in {"--config", "-c"}:
            expanded[index] = path(word)
    check_files(expanded)
    return expanded
