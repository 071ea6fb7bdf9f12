"""The tests in a row, in the forms of public data sets, as `Code` runs them: pairs of a program's
input and output, or steps of Python that call the program.

What decides is the row alone, and all of it is decided before a program runs.
"""

import ast
import builtins
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lrl.rewards.sandbox_session import MODULES, Step

_FORMS = (
    "Python source with asserts, a list of sources, `check(candidate)` with a column `entry_point`, "
    "functions of pytest, classes of unittest, or pairs: a list of [input, output] or of "
    '{"input": text, "output": text}, {"inputs": list, "outputs": list} (with "fn_name" for calls), '
    "and JSON text of these"
)
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_NAMES_OF_FUNCTIONS = ("fn_name", "func_name", "entry_point")
_CALLED = ("functional", "function_call")
_INSIDE = {
    *("mock", "monkeypatch", "capsys", "capfd", "caplog", "asyncio"),
    *("redirect_stdout", "redirect_stderr", "stdin", "stdout"),
}
"""What works only in the program's own process."""
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{12,}={0,2}\s*")
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
_PYTEST = """
import pathlib, sys, pytest
class _Tests(pytest.Module):
    def _getobj(self):
        return sys.modules["__main__"]
class _Plugin:
    def pytest_collection(self, session):
        tests = _Tests.from_parent(session, path=pathlib.Path("/tests.py"))
        session.items = list(session.genitems(tests))
        session.testscollected = len(session.items)
        return True
"""
_RUN_PYTEST = (
    'assert pytest.main(["-q", "-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null"], '
    '[_Plugin()]) == 0, "pytest"'
)


class Pair(NamedTuple):
    """A test of a program as a whole."""

    stdin: str
    stdout: str


class Tests(NamedTuple):
    """The tests of a row: pairs, or steps."""

    pairs: tuple[Pair, ...] = ()
    steps: tuple[Step, ...] = ()
    names: tuple[str, ...] = ()
    """What the steps need of the program."""

    @property
    def counted(self) -> list[int]:
        """The numbers of those that count."""
        if self.pairs:
            return list(range(len(self.pairs)))
        return [number for number, step in enumerate(self.steps) if step.is_test]


def tests_in(columns: Mapping[str, Any], name: str) -> Tests:
    """Returns the tests in a column of a row.

    Raises:
        ValueError: The row has no such column, or no tests in it in a form that is known.
    """
    if name not in columns:
        raise ValueError(f"the row has no column `{name}`, only {sorted(columns)}")
    value = columns[name]
    try:
        return _tests(_opened(value), columns)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the column `{name}` is {value!r:.200}: {error}. Code takes {_FORMS}"
        ) from error


def _opened(value: Any) -> Any:
    """Returns what a text stands for: a list or a dict written as JSON or as Python's literal."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        for read in (json.loads, ast.literal_eval):
            with suppress(SyntaxError, ValueError):
                return read(value)
    return value


def _tests(value: Any, columns: Mapping[str, Any]) -> Tests:
    if isinstance(value, str):
        if _BASE64.fullmatch(value):
            raise ValueError("it is base64, which has to be decoded before")
        return _of_source(value, columns)
    if isinstance(value, Mapping):
        return _of_cases(list(_cases(value)), columns)
    if isinstance(value, list | tuple) and value:
        members = [_opened(each) for each in value]
        if all(isinstance(each, str) for each in members):
            return _with_names([Step(each, is_test=True) for each in members])
        if all(isinstance(each, Mapping) for each in members):
            return _of_cases([case for each in members for case in _cases(each)], columns)
        if all(_is_pair(each) for each in members):
            return Tests(tuple(Pair(*each) for each in members))
    raise ValueError("it is in no form that is known")


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(each, str) for each in value)
    )


# ---- pairs, and calls of a function


def _cases(value: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the cases of a dict, each with `input` and `output`: one, or lists of them."""
    for left, right in (("inputs", "outputs"), ("input", "output")):
        if left not in value or right not in value:
            continue
        inputs, outputs = value[left], value[right]
        is_one = left == "input" and (isinstance(inputs, str) or _function(value) != "")
        if is_one:
            yield dict(value)
            return
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise ValueError(f"`{left}` and `{right}` have to be lists, or texts")
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError(f"it has {len(inputs)} {left} and {len(outputs)} {right}")
        for each, expected in zip(inputs, outputs, strict=True):
            yield {**value, "input": each, "output": expected}
        return
    raise ValueError(f"a test has the keys {sorted(value)}, and needs `input` and `output`")


def _of_cases(cases: list[dict[str, Any]], columns: Mapping[str, Any]) -> Tests:
    kinds = [str(case.get("testtype") or case.get("type") or "") for case in cases]
    names = [
        _function(case, columns if kind in _CALLED else {})
        for case, kind in zip(cases, kinds, strict=True)
    ]
    is_call = [
        kind in _CALLED or (not kind and name != "")
        for kind, name in zip(kinds, names, strict=True)
    ]
    if not any(is_call):
        return Tests(tuple(Pair(_text(case["input"]), _text(case["output"])) for case in cases))
    if not all(is_call) or not all(names):
        raise ValueError(
            "its tests call a function: each needs its name, as `fn_name` or `func_name` of the "
            "test or of `metadata`, or in a column `entry_point`"
        )
    calls = [_call(case, name) for case, name in zip(cases, names, strict=True)]
    return Tests((), (Step(_CALLS, is_test=False), *calls), (*dict.fromkeys(names), "Solution"))


def _function(*places: Mapping[str, Any]) -> str:
    """Returns the name of the function that is tested; empty if no place has it."""
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
    return Step(f"_call({name!r}, {', '.join(map(repr, texts))})", is_test=True)


# ---- Python


def _of_source(source: str, columns: Mapping[str, Any]) -> Tests:
    body = [each for each in ast.parse(source).body if not _is_main(each)]
    steps = _collected(body) or _check(body, columns) or _asserts(body)
    return _with_names(steps)


def _is_main(statement: ast.stmt) -> bool:
    """Whether a statement starts the tests by itself."""
    return isinstance(statement, ast.Expr | ast.If) and bool(
        re.search(r"\b(unittest|pytest)\.main\(", ast.unparse(statement))
    )


def _collected(body: list[ast.stmt]) -> list[Step]:
    """Returns the steps of unittest's and pytest's tests; none if there is no such test."""
    called = {name for each in body if not isinstance(each, _DEFINITIONS) for name in _loaded(each)}
    calls: list[str] = []
    needs_pytest = any("pytest" in ast.unparse(each) for each in body if _imports(each))
    for each in body:
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test"):
            if each.name not in called:
                calls.append(f"{each.name}()")
                needs_pytest |= bool(each.args.args or each.decorator_list)
        elif isinstance(each, ast.ClassDef):
            methods = [part for part in each.body if isinstance(part, ast.FunctionDef)]
            tests = [part.name for part in methods if part.name.startswith("test")]
            if any("TestCase" in ast.unparse(base) for base in each.bases):
                calls += [f"_run({each.name}({test!r}))" for test in tests]
            elif each.name.startswith("Test") and tests:
                calls += [f"{each.name}().{test}()" for test in tests]
                needs_pytest |= len(tests) < len(methods) or bool(each.decorator_list)
                needs_pytest |= any(
                    len(part.args.args) != 1 or part.decorator_list for part in methods
                )
    if not calls:
        return []
    setup = "\n".join(map(ast.unparse, body)) + _UNITTEST
    if needs_pytest:
        return [Step(setup + _PYTEST, is_test=False), Step(_RUN_PYTEST, is_test=True)]
    return [Step(setup, is_test=False), *(Step(each, is_test=True) for each in calls)]


def _check(body: list[ast.stmt], columns: Mapping[str, Any]) -> list[Step]:
    """Returns the steps of HumanEval's form; none if `check` is not defined, or called already."""
    called = {name for each in body if not isinstance(each, _DEFINITIONS) for name in _loaded(each)}
    defined = any(isinstance(each, ast.FunctionDef) and each.name == "check" for each in body)
    if not defined or "check" in called:
        return []
    name = _function(columns)
    if not name:
        raise ValueError("`check` needs the name of the function, in a column `entry_point`")
    ast.parse(name, mode="eval")
    setup = "\n".join(map(ast.unparse, body))
    return [Step(setup, is_test=False), Step(f"check({name})", is_test=True)]


def _asserts(body: list[ast.stmt]) -> list[Step]:
    """Returns a test for each `assert`; all of the source is one if it has none, and calls
    something."""
    if any(isinstance(each, ast.Assert) for each in body):
        return [Step(ast.unparse(each), isinstance(each, ast.Assert)) for each in body]
    statements = [each for each in body if not isinstance(each, _DEFINITIONS)]
    if not any(isinstance(part, ast.Call) for each in statements for part in ast.walk(each)):
        raise ValueError("it tests nothing: it has neither an assert nor a call")
    return [Step("\n".join(map(ast.unparse, body)), is_test=True)]


def _imports(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _loaded(tree: ast.AST) -> Iterator[str]:
    for each in ast.walk(tree):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            yield each.id


def _identifiers(tree: ast.AST) -> Iterator[str]:
    for each in ast.walk(tree):
        if isinstance(each, ast.AsyncFunctionDef):
            yield "asyncio"
        if not isinstance(each, ast.keyword):
            for field in ("id", "attr", "arg", "name", "module"):
                yield from str(getattr(each, field, None)).split(".")


def _with_names(steps: list[Step]) -> Tests:
    """Returns the tests with what they need of the program: the names that they do not bind.

    A builtin function is Python's own, unless they name nothing else. So is a module whose import
    they have left to the program.
    """
    tree = ast.Module([each for step in steps for each in ast.parse(step.source).body], [])
    if found := _INSIDE.intersection(_identifiers(tree)):
        raise ValueError(
            f"its tests use `{min(found)}`, which works only in the program's own process; they run "
            "in another"
        )
    for each in ast.walk(tree):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Compare):
            raise ValueError(f"`{ast.unparse(each)}` is a comparison without an assert")
    bound: set[str] = set()
    parts: list[str] = []  # what an import of the program names
    for each in ast.walk(tree):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            bound.add(each.id)
        elif isinstance(each, ast.FunctionDef | ast.ClassDef):
            bound.add(each.name)
        elif isinstance(each, ast.arg):
            bound.add(each.arg)
        elif isinstance(each, ast.ImportFrom) and each.module in MODULES:
            parts += [alias.name for alias in each.names if alias.name != "*"]
        elif isinstance(each, ast.alias):
            bound.add((each.asname or each.name).partition(".")[0])
        elif isinstance(each, ast.ExceptHandler) and each.name:
            bound.add(each.name)
    bases = {
        each.value.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name)
    }
    free = [name for name in dict.fromkeys(_loaded(tree)) if name not in bound]
    modules = [name for name in free if name in bases and name in _MODULES]
    own = [name for name in free if name not in modules and not hasattr(builtins, name)]
    names = [*own, *parts] or [name for name in free if name not in modules]
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef) and not set(own).isdisjoint(map(ast.unparse, each.bases)):
            raise ValueError(f"its class `{each.name}` inherits from one of the program's")
    imports = [Step(f"import {_MODULES[name]} as {name}", is_test=False) for name in modules]
    return Tests((), (*imports, *steps), tuple(dict.fromkeys(names)))
