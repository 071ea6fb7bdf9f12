"""What `lrl fit --help` and `lrl validate --help` print: the settings of a run, a line each.

Names, types, defaults and sentences are those of the constructors and their docstrings, read from the sources without
importing them: importing torch and Lightning takes seconds, and nobody waits so long for help.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docstring_parser import DocstringStyle, parse

MODEL, DATA = "lrl.policy:PolicyModule", "lrl.datamodule:RolloutDataModule"
STRATEGY, SERVER = "lrl.strategies.base:GeneratorDevices", "lrl.generators.settings:ServerSettings"
TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
GROUPS = {
    "model": (MODEL, "the policy: lrl.PolicyModule"),
    "data": (DATA, "prompts, rewards and steps: lrl.RolloutDataModule"),
    "trainer.strategy": (STRATEGY, "the division of the devices: lrl.AsyncSingleDevice"),
    "trainer.strategy.server": (SERVER, "the vLLM servers: lrl.ServerSettings"),
}
OF_THE_TRAINER = (
    *("accelerator", "devices", "max_steps", "max_epochs", "precision", "logger", "callbacks", "default_root_dir"),
    *("log_every_n_steps", "enable_progress_bar"),
)
CALLBACKS = "lrl.callbacks"
BESIDE = {
    "config": "A YAML file, or the name of a shipped recipe ({recipes}); several are laid over one another.",
    "ckpt_path": "Checkpoint to go on from.",
    "seed_everything": "Seed of the run (default 0).",
    "print_config": "Print what the run would use, and end.",
}
HEADS = {"fit": "Train a policy.", "validate": "Evaluate a policy without training it."}
USAGE = """usage: lrl {verb} [--config RECIPE] [--SETTING VALUE ...]

{head} A setting on the command line wins over the recipe. Each line: name, type, default, what it does.
"""
FURTHER = """Further
  lrl {verb} --model.objective.help GSPO                 the settings of a class, for any setting that names one
  lrl {verb} --trainer.callbacks.help lrl.callbacks.Evaluation
  lrl {verb} --help all                                  everything that Lightning's Trainer takes, too
  docs/own_task.md                                  recipes, lists, interpolation, classes of your own
"""
WIDEST, NARROWEST = 160, 100


class Setting(NamedTuple):
    """One setting."""

    name: str
    type: str
    default: str
    says: str


def text(verb: str, recipes: str) -> str:
    """The help of `verb`."""
    width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    lines = [USAGE.format(verb=verb, head=HEADS[verb])]
    beside = {name: says.format(recipes=recipes) for name, says in BESIDE.items()}
    lines += _table("Run", [Setting(f"--{name}", "", "", says) for name, says in beside.items()], width)
    for prefix, (where, title) in GROUPS.items():
        lines += _table(f"{prefix}, {title}", [_named(prefix, one) for one in settings_of(where)], width)
    trainer = {one.name: one for one in settings_of(TRAINER)}
    lines += _table("trainer, of Lightning's own", [_named("trainer", trainer[name]) for name in OF_THE_TRAINER], width)
    append = "callbacks, added by --trainer.callbacks+ NAME --trainer.callbacks.SETTING VALUE"
    lines += _table(append, [Setting(name, "", "", says) for name, says in _callbacks()], width)
    return "\n".join([*lines, FURTHER.format(verb=verb)])


def all_settings() -> list[str]:
    """The names of all settings, of the shipped classes and of Lightning's Trainer."""
    groups = {prefix: where for prefix, (where, _) in GROUPS.items()} | {"trainer": TRAINER}
    return [*BESIDE, *(f"{prefix}.{one.name}" for prefix, where in groups.items() for one in settings_of(where))]


def settings_of(where: str) -> list[Setting]:
    """The settings of a class, named `module:class`, in the order of its constructor."""
    module, _, name = where.partition(":")
    node = _definition(module, name)
    assert isinstance(node, ast.ClassDef)
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    says = _says(node) | (_says(init) if init else {})
    fields = list(_parameters(init) if init else _fields(node))
    return [
        Setting(name, _shown(module, kind), "" if default is None else _value(module, default), says.get(name, ""))
        for name, kind, default in fields
    ]


GENERIC = {"Sequence": "list", "Iterable": "list", "list": "list", "dict": "mapping", "Callable": "function"}
Field = tuple[str, ast.expr | None, ast.expr | None]


def _parameters(init: ast.FunctionDef) -> Iterator[Field]:
    first, positional = len(init.args.args) - len(init.args.defaults), init.args.args
    for number, argument in enumerate(positional[1:], start=1):
        yield argument.arg, argument.annotation, init.args.defaults[number - first] if number >= first else None
    for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        yield argument.arg, argument.annotation, default


def _fields(node: ast.ClassDef) -> Iterator[Field]:
    """Those of a dataclass."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, one.annotation, one.value


def _says(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """What a docstring has for each argument."""
    found = parse(ast.get_docstring(node) or "", DocstringStyle.GOOGLE)
    return {one.arg_name: one.description or "" for one in found.params}


def _callbacks() -> Iterator[tuple[str, str]]:
    for statement in _tree(CALLBACKS).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(CALLBACKS):
            for alias in statement.names:
                node = _definition(str(statement.module), alias.name)
                assert isinstance(node, ast.ClassDef)
                yield alias.name, (ast.get_docstring(node) or "").partition("\n\n")[0]


# ---- reading sources


@cache
def _tree(module: str) -> ast.Module:
    """The syntax tree of a module. Only its top package is looked up: looking further would import that."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *inner)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _definition(module: str, name: str) -> ast.ClassDef | ast.expr | None:
    """The class, or the value, that `name` has in a module; None if it is not lrl's."""
    for statement in _tree(module).body:
        match statement:
            case ast.ClassDef() if statement.name == name:
                return statement
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value
            case ast.ImportFrom(module=str(source)) if source.startswith("lrl"):
                if any(alias.name == name for alias in statement.names):
                    return _definition(source, name)
    return None


def _shown(module: str, kind: ast.expr | None) -> str:
    """A type as a user would say it: choices as they are typed, null for None."""
    match kind:
        case None:
            return ""
        case ast.BinOp(left=left, right=right):
            return _either(module, left, right)
        case ast.Constant(value=None):
            return "null"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=choices)):
            return "|".join(str(choice.value) for choice in choices if isinstance(choice, ast.Constant))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=choice)):
            return str(choice)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return f"{_shown(module, inner)}|null"
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=kinds)):
            return _either(module, *kinds)
        case ast.Subscript(value=ast.Name(id=name)) if name in GENERIC:
            return GENERIC[name]
        case ast.Name(id=name) if isinstance(alias := _definition(module, name), ast.expr):
            return _shown(module, alias)
        case ast.Name(id=name) if name.startswith("_"):  # an alias within Lightning, of words
            return "str"
    return ast.unparse(kind)


def _either(module: str, *kinds: ast.expr) -> str:
    return "|".join(dict.fromkeys("|".join(_shown(module, one) for one in kinds).split("|")))


def _value(module: str, default: ast.expr) -> str:
    """A default as it is written in YAML."""
    if isinstance(default, ast.Name) and isinstance(value := _definition(module, default.id), ast.expr):
        default = value
    if isinstance(default, ast.Call):  # field(default_factory=dict)
        return "{}"
    if isinstance(default, ast.Constant):
        words = {None: "null", True: "true", False: "false"}
        return words[default.value] if default.value is None or isinstance(default.value, bool) else str(default.value)
    return ast.unparse(default)


# ---- laying it out


def _named(prefix: str, setting: Setting) -> Setting:
    return setting._replace(name=f"--{prefix}.{setting.name}")


def _table(title: str, settings: list[Setting], width: int) -> list[str]:
    """A title, and a line for each setting."""
    names = max(len(one.name) for one in settings)
    kinds = max(len(_kind(one)) for one in settings)
    lines = []
    for one in settings:
        head = f"  {one.name:{names}}  " + (f"{_kind(one):{kinds}}  " if kinds else "")
        lines.append(head + _in_short(one.says, max(20, width - len(head))))
    return [title, *(line.rstrip() for line in lines), ""]


def _in_short(says: str, width: int) -> str:
    """The first sentence, or as much of it as there is room for: to a colon or semicolon, or cut."""
    words = " ".join(says.split())
    for end in (r"(?<=\.) ", r"[;:] "):
        words = re.split(end, words)[0]
        if len(words) <= width:
            return words
    return textwrap.shorten(words, width, placeholder=" ...")


def _kind(setting: Setting) -> str:
    return f"{setting.type} = {setting.default}" if setting.default else setting.type
