"""Help of `lrl fit` and `lrl validate`: the settings of a run, a line each.

Names, types, defaults and sentences are those of the constructors and their docstrings.
"""

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lightning as L
from jsonargparse import ArgumentParser
from jsonargparse._typehints import ActionTypeHint, type_to_str

import lrl
from lrl import callbacks
from lrl.strategies.generator_devices import GeneratorDevices

GROUPS: dict[str, type] = {
    "model": lrl.PolicyModule,
    "data": lrl.RolloutDataModule,
    "data.prompts": lrl.Prompts,
    "trainer.strategy": GeneratorDevices,
    "trainer.strategy.server": lrl.ServerSettings,
}
TRAINER_SETTINGS = (
    *("accelerator", "devices", "max_steps", "max_epochs", "precision", "logger", "callbacks"),
    *("usual_callbacks", "default_root_dir", "log_every_n_steps", "enable_progress_bar"),
)
RUN = {
    "config": "A YAML file, or the name of a shipped recipe; several are merged in order.",
    "ckpt_path": "Checkpoint to resume from.",
    "seed_everything": "Seed of the run (default 0).",
    "print_config": "Print what the run would use, and exit.",
}
HEAD = """usage: lrl {verb} [--config RECIPE] [--SETTING VALUE ...]

Recipes: {recipes}. The command line wins over the recipe.
"""
FURTHER = """Further
  lrl {verb} --model.objective.help GSPO           settings of a class, for any setting that names one
  lrl {verb} --trainer.callbacks.help lrl.callbacks.Evaluation
  lrl {verb} --help all                            everything that Lightning's Trainer takes
  lrl {verb} --config quickstart --print_config    what a run would use
"""
WIDTH = 160
WIDEST_TYPE = 60


class Setting(NamedTuple):
    """A line of the help."""

    name: str
    kind: str
    """Its type, and its default after an equals sign."""
    text: str


def text(verb: str, recipes: Sequence[str]) -> str:
    """Returns the help of `verb`."""
    trainer = settings_of(lrl.Trainer, "trainer.")
    tables = {"Run": [Setting(name, "", sentence) for name, sentence in RUN.items()]}
    for group, kind in GROUPS.items():
        tables[f"{group}: {kind.__name__}"] = settings_of(kind, f"{group}.")
    tables["trainer: Trainer"] = [
        one for one in trainer if one.name.removeprefix("trainer.") in TRAINER_SETTINGS
    ]
    lines = [HEAD.format(verb=verb, recipes=", ".join(recipes))]
    for title, settings in tables.items():
        lines += [title, *_table([one._replace(name=f"--{one.name}") for one in settings]), ""]
    lines += ["callbacks, added by --trainer.callbacks+ NAME --trainer.callbacks.SETTING VALUE"]
    lines += [*_table(list(_callbacks())), "", FURTHER.format(verb=verb)]
    return "\n".join(lines)


def all_settings() -> list[str]:
    """Returns the names of all settings of the shipped classes and of Lightning's Trainer."""
    groups = {**GROUPS, "trainer": lrl.Trainer}
    inner = [one.name for name, kind in groups.items() for one in settings_of(kind, f"{name}.")]
    return [*RUN, *inner]


def settings_of(kind: Any, prefix: str = "") -> list[Setting]:
    """Returns the settings of a class and its bases; `prefix` is for their names."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False)
    found = []
    for action in parser._actions:
        if not isinstance(action, ActionTypeHint) or "." in action.dest:
            continue  # its help, or a setting of a setting
        shown = type_to_str(action._typehint)
        if not getattr(action, "_required", action.required):
            shown += f" = {action.default}"
        if len(shown) > WIDEST_TYPE:
            shown = f"{shown[: WIDEST_TYPE - 4]} ..."
        found.append(Setting(prefix + action.dest, shown, action.help or ""))
    return found


def _callbacks() -> Iterator[Setting]:
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        if issubclass(kind, L.Callback) and name != "OnRankZero":  # a base of one's own
            yield Setting(name, "", " ".join((kind.__doc__ or "").partition("\n\n")[0].split()))


def _table(settings: list[Setting]) -> list[str]:
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    names, kinds = (max(len(one[column]) for one in settings) for column in (0, 1))
    lines = []
    for name, kind, sentence in settings:
        head = f"  {name:{names}}  " + (f"{kind:{kinds}}  " if kinds else "")
        first = " ".join(sentence.split()).partition(". ")[0]
        lines.append(head + textwrap.shorten(first, max(20, width - len(head)), placeholder=" ..."))
    return [line.rstrip() for line in lines]
