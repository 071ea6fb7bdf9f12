"""Programs of a policy against a row's tests: what counts, what is wrong, and what is an error.
Attacks on the sandbox are in `sandbox/test_attacks.py`."""

import itertools
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import psutil
import pytest

from lrl.errors import ConfigError
from lrl.rewards import Code, GaveUp
from lrl.rewards.code import program_in
from lrl.rewards.sandbox import session
from lrl.rewards.verifiers.math import within
from tests.leftovers import wait_for
from tests.rewards.scenes import LACKING, counted, needs_bubblewrap, scored, started

ISOLATION = "none" if LACKING else "bubblewrap"
BUSY = "while True: pass"
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


@pytest.fixture(scope="module")
def judges():
    """They try tests once."""
    return code(), code(partial=True)


@pytest.mark.parametrize(("program", "tests", "whole", "share"), PROGRAMS)
def test_a_program_is_worth_the_tests_that_it_passes(judges, program, tests, whole, share):
    found = [judge("", program, tests=tests) for judge in judges]
    assert found == pytest.approx([whole, share])


@pytest.mark.parametrize(
    ("program", "tests", "settings", "limit"),
    [
        (BUSY, PAIRS, {"cpu_s": 1, "isolation": "none"}, "the limit of 1 s of CPU time"),
        ("import time\ntime.sleep(60)", PAIRS, {"timeout_s": 2, "isolation": "none"}, "2 s"),
        ("x = 2**28", "assert bytearray(x)", {"memory_mib": 128, "isolation": "none"}, "128 MiB"),
        (
            "def f():\n while 1: print(1)",
            "f()",
            {"max_output_bytes": 10**4, "isolation": "none"},
            "10000",
        ),
        (BUSY, PAIRS, {"cpu_s": 1}, "the limit of 1 s of CPU time"),
        ("import time\ntime.sleep(60)", PAIRS, {"timeout_s": 2}, "the time limit of 2 s"),
        ("x = bytearray(2**28)", PAIRS, {"memory_mib": 128}, "the limit of 128 MiB of memory"),
        ("x = 2**28", "assert bytearray(x)", {"memory_mib": 128}, "the limit of 128 MiB of memory"),
        ("while True: print('x' * 1000)", PAIRS, {"max_output_bytes": 10**4}, "10000 bytes"),
        ("def f():\n while 1: print(1)", "f()", {"max_output_bytes": 10**4}, "10000 bytes"),
    ],
)
def test_a_program_that_breaks_a_limit_is_wrong_and_counted(program, tests, settings, limit):
    found = code(**settings)("", program, tests=tests)
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


@needs_bubblewrap
def test_workers_score_programs_and_limits_are_counted():
    with started([Code(timeout_s=5.0, cpu_s=1)], workers=1, timeout_s=30.0) as pool:
        texts = [DOUBLE, "def double(x): pass", BUSY]
        blocks = [f"```python\n{text}\n```" for text in texts]
        found = scored(pool, *blocks, columns={"tests": ASSERTS})
    assert [rollout.reward for rollout in found] == [1.0, 0.0, 0.0]
    assert counted(pool) == {"scored": 3, "zero": 2} and pool.counts["gave_up"] == 1


# ---- a sandbox that does not work, or is ended from outside: neither is a 0


@pytest.fixture
def fake_bwrap(monkeypatch):
    """Puts a bwrap on PATH that all users may run. No sandbox is known to work."""
    session.check.cache_clear()
    with TemporaryDirectory(prefix="lrl") as folder:  # pytest's cannot be reached by other users
        Path(folder).chmod(0o755)

        def fake(text):
            file = Path(folder, "bwrap")
            file.write_text(f"#!/bin/sh\n{text}\n")
            file.chmod(0o755 if text else 0o644)
            monkeypatch.setenv("PATH", folder)

        yield fake
    session.check.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "sudo apt-get install bubblewrap.*isolation: none"),
        ("echo bwrap: No permissions to create new namespace >&2; exit 1", "No permissions"),
        ("exit 3", "status 3"),
    ],
)
def test_a_bwrap_that_does_not_work_is_refused_with_its_own_words(text, words, fake_bwrap):
    fake_bwrap(text)
    with pytest.raises(ConfigError, match=words):
        code(isolation="bubblewrap")


@needs_bubblewrap
def test_what_the_machine_causes_is_an_error_and_not_a_zero(monkeypatch, fake_bwrap):
    judge = code(isolation="bubblewrap")
    fake_bwrap("echo bwrap: no space >&2; exit 1")
    with pytest.raises(RuntimeError, match="did not start.*bwrap: no space"):
        judge("", DOUBLE, tests=ASSERTS)
    monkeypatch.setenv("PATH", "/no/folder")
    with pytest.raises(RuntimeError, match="bwrap is not on PATH"):
        judge("", DOUBLE, tests=ASSERTS)


@needs_bubblewrap
def test_a_sandbox_that_is_ended_from_outside_is_an_error_and_not_a_zero():
    judge = code(timeout_s=60.0)
    me = psutil.Process()

    def started():
        return [one for one in me.children(recursive=True) if one not in before]

    def kill():
        wait_for(lambda: len(started()) > 2, 60.0, "the program")
        started()[1].send_signal(signal.SIGKILL)

    judge("", DOUBLE, tests=PAIRS)  # which are tried
    before = me.children(recursive=True)  # of other tests
    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="ended from outside"):
        judge("", "import time\ntime.sleep(60)", tests=PAIRS)
    killer.join()


def test_a_program_that_the_kernel_ends_for_lack_of_memory_is_an_error_and_not_a_zero(monkeypatch):
    dies = "import os\nos.kill(os.getpid(), 9)"
    judge = code()
    assert judge("", dies, tests=PAIRS) == 0.0  # it has done that itself
    numbers = itertools.count()
    monkeypatch.setattr(session, "_oom_kills", lambda: f"oom_kill {next(numbers)}")
    with pytest.raises(RuntimeError, match="out of memory"):
        judge("", dies, tests=PAIRS)


@needs_bubblewrap
@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_that_got_no_processor_is_an_error_unless_it_had_several_processes(
    processes, monkeypatch
):
    judge = code(isolation="bubblewrap", timeout_s=1.5)
    only_waits = session.RUNNER.replace("int(stat.read().split()[1]) * 1e-9", "1e9")
    assert only_waits != session.RUNNER
    monkeypatch.setattr(session, "RUNNER", only_waits)
    program = "import os, time\n" + "os.fork()\n" * (processes - 1) + "time.sleep(60)"
    if processes > 1:
        assert judge("", program, tests=PAIRS) == 0.0
        return
    monkeypatch.setattr(session.Sandbox, "deadline_s", 2.0)
    with pytest.raises(TimeoutError, match="too busy"):
        judge("", program, tests=PAIRS)
