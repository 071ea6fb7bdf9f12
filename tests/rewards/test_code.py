"""Programs of a policy against a row's tests: what counts, and that settings are checked. The attacks
on the sandbox are in `sandbox/test_attacks.py`.
"""

import pytest

from lrl.errors import ConfigError
from lrl.rewards import Code, GaveUp
from lrl.rewards.code import program_in
from lrl.rewards.sandbox.forms import tests_in as read_tests
from lrl.rewards.verifiers.limits import within
from tests.rewards.bubblewrap_here import LACKING, needs_bubblewrap
from tests.rewards.scenes import counted, scored, started

ISOLATION = "none" if LACKING else "bubblewrap"
DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = "assert double(1) == 2\nassert double(2) == 4\nassert double('a') == 'aa'"
PAIRS = [{"input": "1\n2\n", "output": "3\n"}, {"input": "4\n5\n", "output": "9\n"}]


def code(**settings):
    settings = {"fenced": False, "timeout_s": 20.0, "isolation": ISOLATION} | settings
    return Code(**settings)


THREAD = (
    "import threading\na, b = int(input()), int(input())\n"
    "threading.Thread(target=lambda: print(a + b)).start()"
)
EXIT = "import sys\nprint(sum(map(int, sys.stdin)))\nif __name__ == '__main__': sys.exit(0)"
PROGRAMS = [
    (DOUBLE, ASSERTS, 1.0, 1.0), (DOUBLE, ASSERTS.splitlines(), 1.0, 1.0),
    ("def double(x): return x + x", "two = 2\nassert double(1) == two", 1.0, 1.0),
    ("def double(x): return 2 + x", ASSERTS, 0.0, 1 / 3),
    ("def double(x): return 2 + x", [*ASSERTS.splitlines(), "pass"], 0.0, 2 / 4),
    ("def double(x): return 1", "def check(f):\n  assert f(1)\ncheck(double)", 1.0, 1.0),
    (DOUBLE, "assert double(1) == 2\n1 / 0\nassert double(2) == 4", 0.0, 1 / 2),
    ("def double(x: return", ASSERTS, 0.0, 0.0),
    ("print(int(input()) + int(input()))", PAIRS, 1.0, 1.0),
    ("print(input(), 'x')\nprint(int(input()) + 1)", PAIRS, 0.0, 0.0),
    ("print(int(input()) + 2, '')\nprint()", PAIRS, 0.0, 1 / 2),
    ("print(int(input()) + int(input()))\n1 / 0", PAIRS, 0.0, 0.0),
    (EXIT, PAIRS, 1.0, 1.0),
    (THREAD, PAIRS, 1.0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests", "whole", "share"), PROGRAMS)
def test_a_program_is_worth_the_tests_that_it_passes(program, tests, whole, share):
    assert code()("", program, tests=tests) == whole
    assert code(partial=True)("", program, tests=tests) == pytest.approx(share)


@pytest.mark.parametrize("isolation", sorted({"none", ISOLATION}))
@pytest.mark.parametrize(
    ("program", "tests", "settings", "limit"),
    [
        ("while True: pass", PAIRS, {"cpu_s": 1}, "the limit of 1 s of CPU time"),
        ("import time\ntime.sleep(60)", PAIRS, {"timeout_s": 2}, "the time limit of 2 s"),
        ("x = bytearray(2**28)", PAIRS, {"memory_mib": 128}, "the limit of 128 MiB of memory"),
        ("x = 2**28", "assert bytearray(x)", {"memory_mib": 128}, "the limit of 128 MiB of memory"),
        ("while True: print('x' * 1000)", PAIRS, {"max_output_bytes": 10**4}, "10000 bytes"),
        ("def f():\n while 1: print(1)", "f()", {"max_output_bytes": 10**4}, "10000 bytes"),
    ],
)
def test_a_program_that_breaks_a_limit_is_wrong_and_counted(
    isolation, program, tests, settings, limit
):
    found = code(isolation=isolation, **settings)("", program, tests=tests)
    assert found == 0.0 and isinstance(found, GaveUp) and limit in found.reason


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Here:\n```python\nx = 1\n```\nand that is it", "x = 1\n"),
        ("```py\nx = 1\n```\n```python\nx = 2\n```\nIt prints\n```\n2\n```", "x = 2\n"),
        ("```\nx = 1\n```\n```bash\nls\n```", "x = 1\n"),
        ("1. so\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''\n"),
        ("```python\nx = 1\n```\n```python\nx = ", "x = 1\n"),
        ("```python\nx = 1", None),
        ("```bash\nls\n```", None),
        ("no code", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_closed_block_of_python(response, program):
    assert program_in(response) == program


@pytest.mark.parametrize("line", ["~" * 300_000 + "`", "```" + "a" * 300_000 + "`"])
def test_a_line_of_any_length_is_read_at_once(line):
    """The time grew with its square: such a response timed out, and had no reward."""
    assert within(30.0, lambda: program_in(line)) is None


def test_a_program_reads_and_writes_as_outside_of_a_sandbox():
    judge = code()
    program = (
        "print(sum(map(int, open('/dev/stdin').read().split())), file=open('/dev/stdout', 'w'))"
    )
    assert judge("", program, tests=[["1 2", "3"]]) == 1.0
    assert judge("", "print(10**9999)", tests=[["", "1" + "0" * 9999]]) == 1.0
    assert judge("", "print('a\\u2028b\\x0cc')", tests=[["", "a\u2028b\x0cc\r\n"]]) == 1.0
    assert judge("", "print('a\\nb')", tests=[["", "a\u2028b"]]) == 0.0
    assert program_in("```python\nx = 'a\u2028b'\n```") == "x = 'a\u2028b'\n"


def test_a_response_without_a_block_is_worth_0_and_the_reason_can_be_asked_for():
    judge = code(fenced=True)
    assert judge("", DOUBLE, tests=ASSERTS) == 0.0
    assert judge("", f"```python\n{DOUBLE}```", tests=ASSERTS) == 1.0
    assert judge.verdict(DOUBLE, tests=ASSERTS).reason == "the response has no block of Python"
    found = judge.verdict("```python\ndef double(x): return x\n```", tests=ASSERTS)
    assert (found.passed, found.tests) == (0, 3) and "AssertionError" in found.reason
    found = judge.verdict("```python\nprint(7)\n```", tests=PAIRS)
    assert (found.passed, found.tests) == (0, 2) and "'7\\n', not '3\\n'" in found.reason


@pytest.mark.parametrize(
    "value",
    ["", "assert (", [], None, 3, ["assert ("], [{"input": "1"}], [{"input": 1, "output": "1"}]],
)
def test_a_row_without_tests_is_an_error_and_not_a_zero(value):
    judge = code()
    for call in (judge.check_row, lambda row: judge("", "x = 1", **row)):
        with pytest.raises(ValueError, match="the column `tests`"):
            call({"tests": value})
    with pytest.raises(ValueError, match="no column `tests`"):
        read_tests({"test": "assert True"}, "tests")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("timeout_s", float("nan")), ("memory_mib", 0), ("python", "/no/such/python")],
)
def test_a_wrong_setting_is_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=rf"Code\.{setting} is|no/such/python"):
        code(**{setting: value})


@needs_bubblewrap
def test_workers_score_programs_and_limits_are_counted():
    with started([Code(timeout_s=5.0, cpu_s=1)], workers=1, timeout_s=30.0) as pool:
        texts = [DOUBLE, "def double(x): pass", "while True: pass"]
        blocks = [f"```python\n{text}\n```" for text in texts]
        found = scored(pool, *blocks, columns={"tests": ASSERTS})
    assert [rollout.reward for rollout in found] == [1.0, 0.0, 0.0]
    assert counted(pool) == {"scored": 3, "zero": 2} and pool.counts["gave_up"] == 1
