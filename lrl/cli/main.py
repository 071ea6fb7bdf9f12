"""The command `lrl`: fit and validate on LightningCLI, and a module for each other command.

Heavy imports stay in functions: `doctor` must work without torch, and every reward worker imports
this script again.
"""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import lrl
from lrl.errors import NotRunning
from lrl.system.imports import did_you_mean, quick_imports, with_current_folder

USAGE = """usage: lrl COMMAND [--config RECIPE] [--SETTING VALUE ...]

  init       begin a run of your own:     lrl init my_run
  fit        train a policy:              lrl fit --config quickstart
  validate   evaluate without training:   lrl validate --config gsm8k --model.model FOLDER
  ray        train on nodes of Ray:       lrl ray --nodes 2 --gpus 8 fit --config RECIPE
  chat       ask an exported policy:      lrl chat FOLDER "47+38="
  export     a checkpoint as a policy:    lrl export CHECKPOINT FOLDER
  view       look at a run's rollouts:    lrl view runs/quickstart/version_0
  prompt     where a live policy answers: lrl prompt runs/quickstart/version_0
  join       one more generator for it:   lrl join runs/quickstart/version_0
             workers that score and play: lrl join https://ADDRESS:PORT --kind worker
  leave      one generator less:          lrl leave runs/quickstart/version_0
  plan       forecast step times:         lrl plan --model FOLDER --cluster 8xH100 --lengths fixed:512
  doctor     what this machine can do, and what to type where something is wrong
  --version  lrl's version

`lrl fit --help` lists the settings; a RECIPE is a YAML file, or the name of a shipped one ({recipes}).
"""
LIGHTNINGS = ("fit", "validate")
OTHERS = {
    **{name: (name, "main") for name in ("init", "ray", "chat", "export", "view")},
    **{"prompt": ("join", "prompt"), "join": ("join", "main"), "leave": ("join", "leave")},
    **{name: (name, "main") for name in ("plan", "doctor")},
}
"""The commands besides fit and validate: the module and the function of each."""
COMMANDS = (*LIGHTNINGS, *OTHERS)
RECIPES = Path(lrl.__file__).parent / "recipes"
CONFIG = ("--config", "-c")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line, this process's if none is given; returns the exit status: 0, 2 for bad
    input, 130 after Ctrl-C. A run that a signal ends raises SystemExit with 130 or 143."""
    try:
        return run_command(list(sys.argv[1:] if args is None else args))
    except KeyboardInterrupt:  # there is nothing to save, and a traceback would say nothing
        sys.stderr.write("\n")
        return 128 + signal.SIGINT


def run_command(words: list[str]) -> int:
    """Runs one command line; returns its exit status."""
    if not words or words[0] in {"-h", "--help", "help"}:
        sys.stdout.write(USAGE.format(recipes=", ".join(sorted(recipes()))))
        return 0
    if words[0] in {"--version", "-V", "version"}:
        sys.stdout.write(f"lrl {lrl.__version__}\n")
        return 0
    if words[0] in OTHERS:
        try:
            module, function = OTHERS[words[0]]
            return int(getattr(import_module(f"lrl.cli.{module}"), function)(words[1:]))
        except (ValueError, OSError, NotRunning) as error:
            return bad_input(str(error))
    if words[0] not in LIGHTNINGS and not words[0].startswith("-"):
        near = did_you_mean(words[0], COMMANDS)
        known = ", ".join(COMMANDS)
        return bad_input(f"there is no command {words[0]!r}.{near} There are {known}.")
    if words[0] in LIGHTNINGS and words[-1] in {"-h", "--help"}:
        from lrl.cli import settings

        sys.stdout.write(settings.help_of(words[0], sorted(recipes())))
        return 0
    if set(words[1:2]) & recipes().keys():
        return bad_input(f"Did you mean lrl {words[0]} --config {words[1]}?")
    try:
        words = with_recipe_paths(words)
    except (FileNotFoundError, ValueError) as error:
        return bad_input(str(error))
    if words[-2:] == ["--help", "all"]:
        words.pop()
    return run_lightning(words)


def recipes() -> dict[str, Path]:
    """Returns the paths of the shipped recipes by name."""
    return {path.stem: path for path in RECIPES.glob("*.yaml")}


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
    raise FileNotFoundError(
        f"--config {name or repr(name)}: there is no such file, and no such recipe."
        f"{did_you_mean(Path(name).stem, known)} Shipped are {', '.join(sorted(known))}."
    )


def _check(option: str, value: str) -> None:
    """Raises ValueError if YAML cannot be read, maps nothing, or has a key twice: jsonargparse names
    neither file nor line, and silently takes the second."""
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


def _is_yaml_file(value: str) -> bool:
    path = Path(value)
    return "\n" not in value and path.suffix in (".yaml", ".yml") and path.is_file()


def bad_input(message: str) -> int:
    """Writes the error; returns the exit status."""
    sys.stderr.write(f"lrl: error: {message}\n")
    return 2


def run_lightning(words: Sequence[str]) -> int:
    """Runs fit or validate: LightningCLI parses the settings and builds the run."""
    with quick_imports():
        from lrl.cli.lightning import LrlCLI
        from lrl.cli.parsing import from_the_root

    with_current_folder()  # also for classes, which LightningCLI finds
    # LightningCLI reads it, and other ranks start with it.
    sys.argv = [sys.argv[0], *from_the_root(words, words[0])]
    try:
        LrlCLI()
    except KeyboardInterrupt:  # before the run listens for signals, or after it
        return 128 + signal.SIGINT
    except LrlCLI.expected_errors as error:
        return bad_input(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
