"""Help of `lrl fit` and `lrl validate`: the settings of a run, a line each.

Names, types, defaults and sentences come from the constructors and their docstrings. The sources
are read without being imported, because importing torch and Lightning takes seconds.
"""

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

MODEL = "lrl.policy:PolicyModule"
DATA = "lrl.datamodule:RolloutDataModule"
STRATEGY = "lrl.strategies.generator_devices:GeneratorDevices"
SERVER = "lrl.generators.settings:ServerSettings"
PROMPTS = "lrl.rollouts.prompts:Prompts"
TRAINER = "lightning.pytorch.trainer.trainer:Trainer"
GROUPS = {
    "model": (MODEL, "the policy: lrl.PolicyModule"),
    "data": (DATA, "prompts, rewards and steps: lrl.RolloutDataModule"),
    "trainer.strategy": (STRATEGY, "the division of the devices: lrl.AsyncSingleDevice"),
    "trainer.strategy.server": (SERVER, "the vLLM servers: lrl.ServerSettings"),
}
TRAINER_SETTINGS = (
    *(
        "accelerator",
        "devices",
        "max_steps",
        "max_epochs",
        "precision",
        "logger",
        "callbacks",
        "default_root_dir",
    ),
    *("log_every_n_steps", "enable_progress_bar"),
)
CALLBACKS = "lrl.callbacks"
BASE = "OnRankZero"
"""The class there that is a base, and no callback to name in a recipe."""
OTHER_SETTINGS = {
    "config": (
        "A YAML file, or the name of a shipped recipe ({recipes}); several are laid over one "
        "another."
    ),
    "ckpt_path": "Checkpoint to resume from.",
    "seed_everything": "Seed of the run (default 0).",
    "print_config": "Print what the run would use, and end.",
}
HEADS = {"fit": "Train a policy.", "validate": "Evaluate a policy without training it."}
USAGE = """usage: lrl {verb} [--config RECIPE] [--SETTING VALUE ...]

{head} A setting on the command line wins over the recipe. Each line: name, type, default, what it does.
"""
FURTHER_HELP = """Further
  lrl {verb} --model.objective.help GSPO                 the settings of a class, for any setting that names one
  lrl {verb} --trainer.callbacks.help lrl.callbacks.Evaluation
  lrl {verb} --help all                                  everything that Lightning's Trainer takes, too
  lrl {verb} --config quickstart --print_config          what a run would use; your own config needs only what differs
"""
WIDEST, NARROWEST = 160, 100


class Setting(NamedTuple):
    """A line of the help."""

    name: str
    kind: str
    """Its type, and its default after an equals sign."""
    text: str


def text(verb: str, recipes: str) -> str:
    """Returns the help of `verb`."""
    trainer = {one.name: one for one in settings_of(TRAINER, "--trainer.")}
    run = [
        Setting(f"--{name}", "", text.format(recipes=recipes))
        for name, text in OTHER_SETTINGS.items()
    ]
    tables = {
        "Run": run,
        **{
            f"{prefix}, {title}": settings_of(where, f"--{prefix}.")
            for prefix, (where, title) in GROUPS.items()
        },
        "trainer, of Lightning's own": [trainer[f"--trainer.{name}"] for name in TRAINER_SETTINGS],
        "callbacks, added by --trainer.callbacks+ NAME --trainer.callbacks.SETTING VALUE": list(
            _callbacks()
        ),
    }
    width = min(WIDEST, max(NARROWEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    lines = [line for title, settings in tables.items() for line in _table(title, settings, width)]
    return "\n".join(
        [USAGE.format(verb=verb, head=HEADS[verb]), *lines, FURTHER_HELP.format(verb=verb)]
    )


def all_settings() -> list[str]:
    """Returns the names of all settings, of the shipped classes and of Lightning's Trainer."""
    groups = {prefix: where for prefix, (where, _) in GROUPS.items()} | {
        "data.prompts": PROMPTS,
        "trainer": TRAINER,
    }
    return [
        *OTHER_SETTINGS,
        *(one.name for prefix, where in groups.items() for one in settings_of(where, f"{prefix}.")),
    ]


def settings_of(where: str, prefix: str) -> list[Setting]:
    """Returns the settings of a class, named `module:class`, in the order of its constructor;
    `prefix` is for names."""
    module, _, name = where.partition(":")
    node = _definition(module, name)
    assert isinstance(node, ast.ClassDef)
    init = next(
        (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"),
        None,
    )
    sentences = _documented(node) | (_documented(init) if init else {})
    settings = []
    for name, kind, default in _parameters(init) if init else _fields(node):
        value = "" if default is None else f" = {_value(module, default)}"
        settings.append(
            Setting(prefix + name, _type(module, kind) + value, sentences.get(name, ""))
        )
    return settings


GENERIC = {
    "Sequence": "list",
    "Iterable": "list",
    "list": "list",
    "dict": "mapping",
    "Callable": "function",
}
Field = tuple[str, ast.expr | None, ast.expr | None]


def _parameters(init: ast.FunctionDef) -> Iterator[Field]:
    arguments = [*init.args.args, *init.args.kwonlyargs][1:]
    defaults = [*init.args.defaults, *init.args.kw_defaults]  # the first arguments have none
    for argument, default in zip(
        arguments, [None] * (len(arguments) - len(defaults)) + defaults, strict=True
    ):
        yield argument.arg, argument.annotation, default


def _fields(node: ast.ClassDef) -> Iterator[Field]:
    """Yields the fields of a dataclass."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, one.annotation, one.value


def _documented(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """Returns the text of a docstring for each argument."""
    found = parse(ast.get_docstring(node) or "", DocstringStyle.GOOGLE)
    return {one.arg_name: one.description or "" for one in found.params}


def _callbacks() -> Iterator[Setting]:
    for statement in _statements(CALLBACKS):
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(CALLBACKS):
            for alias in statement.names:
                if alias.name == BASE:
                    continue
                node = _definition(str(statement.module), alias.name)
                assert isinstance(node, ast.ClassDef)
                yield Setting(alias.name, "", (ast.get_docstring(node) or "").partition("\n\n")[0])


@cache
def _tree(module: str) -> ast.Module:
    """Returns the syntax tree of a module."""
    top, *inner = module.split(".")
    # Of the whole name, it would import the packages on the way.
    spec = importlib.util.find_spec(top)
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *inner)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _statements(module: str) -> Iterator[ast.stmt]:
    """Yields the statements of a module, also those for type checkers, which name its classes where
    they are imported at their first use."""
    for statement in _tree(module).body:
        yield from statement.body if isinstance(statement, ast.If) else [statement]


def _definition(module: str, name: str) -> ast.ClassDef | ast.expr | None:
    """Returns the class, or the value, of `name` in a module; None if it is not lrl's."""
    for statement in _statements(module):
        match statement:
            case ast.ClassDef() if statement.name == name:
                return statement
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value
            case ast.ImportFrom(module=str(source)) if source.startswith("lrl"):
                if any(alias.name == name for alias in statement.names):
                    return _definition(source, name)
    return None


def _type(module: str, kind: ast.expr | None) -> str:
    """Returns a type in YAML's words: choices as a user types them, null for None."""
    match kind:
        case None:
            return ""
        case ast.BinOp(left=left, right=right):
            return _either(module, left, right)
        case ast.Constant(value=None):
            return "null"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=choices)):
            return "|".join(
                str(choice.value) for choice in choices if isinstance(choice, ast.Constant)
            )
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=choice)):
            return str(choice)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return f"{_type(module, inner)}|null"
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=kinds)):
            return _either(module, *kinds)
        case ast.Subscript(value=ast.Name(id=name)) if name in GENERIC:
            return GENERIC[name]
        case ast.Name(id=name) if isinstance(alias := _definition(module, name), ast.expr):
            return _type(module, alias)
        case ast.Name(id=name) if name.startswith("_"):  # an alias within Lightning, for strings
            return "str"
    return ast.unparse(kind)


def _either(module: str, *kinds: ast.expr) -> str:
    return "|".join(dict.fromkeys("|".join(_type(module, one) for one in kinds).split("|")))


def _value(module: str, default: ast.expr) -> str:
    """Returns a default as YAML has it."""
    if isinstance(default, ast.Name) and isinstance(
        value := _definition(module, default.id), ast.expr
    ):
        default = value
    if isinstance(default, ast.Attribute) and isinstance(default.value, ast.Name):
        owner = _definition(module, default.value.id)
        fields = _fields(owner) if isinstance(owner, ast.ClassDef) else ()
        of_field = [value for name, _, value in fields if value and name == default.attr]
        default = of_field[0] if of_field else default
    if isinstance(default, ast.Call):  # field(default_factory=dict)
        return "{}"
    text = str(default.value) if isinstance(default, ast.Constant) else ast.unparse(default)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)


def _table(title: str, settings: list[Setting], width: int) -> list[str]:
    """Returns a title, and a line for each setting."""
    names, kinds = (max(map(len, column)) for column in list(zip(*settings, strict=True))[:2])
    lines = []
    for name, kind, text in settings:
        head = f"  {name:{names}}  " + (f"{kind:{kinds}}  " if kinds else "")
        lines.append((head + _shorten(text, max(20, width - len(head)))).rstrip())
    return [title, *lines, ""]


def _shorten(text: str, width: int) -> str:
    """Returns the first sentence, cut to `width` characters: at a colon or semicolon, or with
    dots."""
    words = " ".join(text.split())
    for end in (r"(?<=\.) ", r"[;:] "):
        words = re.split(end, words)[0]
        if len(words) <= width:
            return words
    return textwrap.shorten(words, width, placeholder=" ...")
