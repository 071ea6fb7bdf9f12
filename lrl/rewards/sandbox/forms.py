"""The tests in a row, in the forms of public data sets, as `Code` runs them: pairs of a program's
input and output, or steps of Python that call the program. The row alone decides which."""

import ast
import builtins
import json
import re
import symtable
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lrl.rewards.sandbox.runner import MODULES

_NAMES_OF_FUNCTIONS = ("fn_name", "func_name", "entry_point")
_CALLED = ("functional", "function_call")
_REFUSED = {
    *("mock", "monkeypatch", "capsys", "capfd", "caplog", "asyncio"),
    *("redirect_stdout", "redirect_stderr", "stdin", "stdout"),
    *("fixture", "parametrize", "setup_method", "setup_class", "setup_module", "setup_function"),
    *("skipif", "xfail", "tmp_path", "tmpdir"),
}
"""What works only in the program's own process, or under pytest."""
_MAIN = re.compile(r"\b(unittest|pytest)\.main\(")
"""In a statement that starts the tests by itself."""
_MODULES = {"np": "numpy", "pd": "pandas", **{name: name for name in sys.stdlib_module_names}}
_CALLS = """
import json
def _plain(value):
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return value
def _call(name, values, *right):
    function = globals().get(name) or getattr(Solution(), name)
    found = _plain(function(*json.loads(values)))
    assert any(found == _plain(json.loads(each)) for each in right), f"{name} returns {found!r:.200}"
"""
_UNITTEST = """
import unittest
def _run(case):
    found = unittest.TestSuite([case]).run(unittest.TestResult())
    assert found.wasSuccessful(), str(found.errors or found.failures)[-300:]
"""


class Pair(NamedTuple):
    stdin: str
    stdout: str


class Step(NamedTuple):
    """A piece of a row's tests, which runs beside the program."""

    source: str
    is_test: bool = True  # counts; else its failure fails all that come later


class Tests(NamedTuple):
    """The tests of a row: pairs; or steps, and what they need of the program."""

    pairs: tuple[Pair, ...] = ()
    steps: tuple[Step, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def counted(self) -> list[int]:
        tests = self.pairs or self.steps
        return [number for number, one in enumerate(tests) if getattr(one, "is_test", True)]


def tests_in(columns: Mapping[str, Any], name: str) -> Tests:
    """Raises ValueError if a column has no tests in a known form."""
    if name not in columns:
        raise ValueError(f"the row has no column `{name}`, only {sorted(columns)}")
    value = columns[name]
    try:
        return _tests(_opened(value), columns)
    except (SyntaxError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the column `{name}` is {value!r:.200}: {error!r}. docs/rewards.md, section Code, has "
            "the forms that are read"
        ) from error


def _opened(value: Any) -> Any:
    """Reads a list or a dict that is written as JSON or as Python's literal."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):
            with suppress(SyntaxError, ValueError):
                return read(value)
    return value


def _tests(value: Any, columns: Mapping[str, Any]) -> Tests:
    if isinstance(value, str):
        return _with_names(_steps(value, columns))
    members = list(map(_opened, [value] if isinstance(value, Mapping) else value))
    if not members:
        raise ValueError("it has no tests")
    if all(isinstance(each, str) for each in members):
        return _with_names(list(map(Step, members)))
    return _of_cases([case for each in members for case in _cases(each)], columns)


# ---- pairs, and calls of a function


def _cases(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the cases of a member, each with `input` and `output`: one, or lists of them."""
    if isinstance(value, list | tuple):
        left, right = value
        value = {"input": left, "output": right}
    if "inputs" in value:
        inputs, outputs = value["inputs"], value["outputs"]
    else:
        inputs, outputs = value["input"], value["output"]
        if isinstance(inputs, str) or _function(value):
            yield value
            return
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("its inputs and outputs have to be lists, or texts")
    for each, expected in zip(inputs, outputs, strict=True):
        yield {**value, "input": each, "output": expected}


def _of_cases(cases: list[Mapping[str, Any]], columns: Mapping[str, Any]) -> Tests:
    pairs: list[Pair] = []
    calls: list[Step] = []
    names: list[str] = []
    for case in cases:
        kind = case.get("testtype") or case.get("type") or ""
        name = _function(case, columns if kind in _CALLED else {})
        if kind not in _CALLED and (kind or not name):
            pairs.append(Pair(_text(case["input"]), _text(case["output"])))
        else:
            calls.append(_call(case, name))
            names.append(name)
    if not all(names) or (pairs and calls):
        raise ValueError(
            "its tests call a function: each needs its name, as `fn_name` or `func_name` of the "
            "test or of `metadata`, or in a column `entry_point`"
        )
    if calls:
        return Tests((), (Step(_CALLS, is_test=False), *calls), (*dict.fromkeys(names), "Solution"))
    return Tests(tuple(pairs))


def _function(*places: Mapping[str, Any]) -> str:
    for place in places:
        metadata = _opened(place.get("metadata"))
        for fields in (place, metadata if isinstance(metadata, Mapping) else {}):
            for key in _NAMES_OF_FUNCTIONS:
                if isinstance(fields.get(key), str) and fields[key]:
                    return str(fields[key])
    return ""


def _text(value: Any) -> str:
    """Returns a text; lines may stand in a list, as in APPS."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"the input or output {value!r:.80} is no text, and no function is named")
    return value


def _call(case: Mapping[str, Any], name: str) -> Step:
    """Returns the step of a call. Arguments in a text are JSON, one a line (LiveCodeBench); in a
    list they stand beside a right value that is itself, or in a list of one (APPS, TACO)."""
    values, right = case["input"], case["output"]
    if isinstance(values, str):
        values = [json.loads(line) for line in values.split("\n") if line.strip()]
        rights = [json.loads(right)]
    else:
        rights = [right, *(right[:1] if isinstance(right, list) else [])]
    if not isinstance(values, list):
        raise ValueError(f"the arguments {values!r:.80} are no list")
    texts = [json.dumps(each) for each in (values, *rights)]
    return Step(f"_call({name!r}, {', '.join(map(repr, texts))})")


# ---- Python


def _steps(source: str, columns: Mapping[str, Any]) -> list[Step]:
    body = [
        each
        for each in ast.parse(source).body
        if not (isinstance(each, ast.Expr | ast.If) and _MAIN.search(ast.unparse(each)))
    ]
    setup = "\n".join(map(ast.unparse, body))
    defined = {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    others = [each for each in body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
    parts = [part for each in others for part in ast.walk(each)]
    called = {part.id for part in parts if isinstance(part, ast.Name)}
    collected = [defined[name] for name in defined if name not in called]
    if calls := [call for each in collected for call in _collected(each)]:
        return [Step(setup + _UNITTEST, is_test=False), *map(Step, calls)]
    if "check" in defined.keys() - called:  # HumanEval
        name = _function(columns)
        if not name:
            raise ValueError("`check` needs the name of the function, in a column `entry_point`")
        return [Step(setup, is_test=False), Step(f"check({name})")]
    if any(isinstance(each, ast.Assert) for each in body):
        return [Step(ast.unparse(each), isinstance(each, ast.Assert)) for each in body]
    if not any(isinstance(part, ast.Call) for part in parts):
        raise ValueError("it tests nothing: it has neither an assert nor a call")
    return [Step(setup)]


def _collected(found: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Returns the calls of the tests in a function or class, as pytest would collect them."""
    for each in ast.walk(found):
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test"):
            given = [one.arg for one in each.args.args if one.arg != "self"]
            if len(given) > len(each.args.defaults):
                raise ValueError(f"`{each.name}` has an argument, `{given[0]}`: it needs pytest")
    if isinstance(found, ast.FunctionDef):
        return [f"{found.name}()"] if found.name.startswith("test") else []
    methods = [part.name for part in found.body if isinstance(part, ast.FunctionDef)]
    tests = [name for name in methods if name.startswith("test")]
    if any("TestCase" in ast.unparse(base) for base in found.bases):
        return [f"_run({found.name}({name!r}))" for name in tests]
    return [f"{found.name}().{name}()" for name in tests if found.name.startswith("Test")]


def _with_names(steps: list[Step]) -> Tests:
    """Returns the tests with what they need of the program: the names that they do not bind.
    Builtin functions are Python's own, unless they name nothing else; modules always are."""
    source = "\n".join(step.source for step in steps)
    parts: list[str] = []  # what an import of the program names
    bases: set[str] = set()  # names before a dot
    inherited: set[str] = set()
    words: set[str] = set()
    for each in ast.walk(ast.parse(source)):
        words.update(str(getattr(each, field, "")) for field in ("id", "attr", "name", "module"))
        match each:
            case ast.Expr(ast.Compare()):
                raise ValueError(f"`{ast.unparse(each)}` is a comparison without an assert")
            case ast.arg(arg=name):
                words.add(name)
            case ast.AsyncFunctionDef():
                words.add("asyncio")
            case ast.ImportFrom(module=module) if module in MODULES:
                parts += [alias.name for alias in each.names if alias.name != "*"]
            case ast.Attribute(value=ast.Name(id=name)):
                bases.add(name)
            case ast.ClassDef():
                inherited.update(map(ast.unparse, each.bases))
    if found := _REFUSED & {word for dotted in words for word in dotted.split(".")}:
        raise ValueError(
            f"its tests use `{min(found)}`; they run without pytest, in another process than the "
            "program's"
        )
    free = _free(symtable.symtable(source, "tests.py", "exec"))
    modules = [name for name in free if name in bases and name in _MODULES]
    own = [name for name in free if name not in modules and not hasattr(builtins, name)]
    if found := inherited & {*own, *parts}:
        raise ValueError(f"its class inherits from the program's `{min(found)}`")
    names = [*own, *parts] or [name for name in free if name not in modules]
    imports = [Step(f"import {_MODULES[name]} as {name}", is_test=False) for name in modules]
    return Tests((), (*imports, *steps), tuple(dict.fromkeys(names)))


def _free(module: symtable.SymbolTable) -> list[str]:
    """Returns the global names that a module reads and does not bind."""
    read: dict[str, None] = {}
    bound: set[str] = set()
    tables = [module]
    for table in tables:
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table is module:
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
                elif symbol.is_referenced():
                    read[symbol.get_name()] = None
    return [name for name in read if name not in bound]
