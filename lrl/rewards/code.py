"""Programs: the code in a response is run against the row's tests, in a sandbox.

Whatever a program does is its own fault, and worth 0. What the machine does to it (no sandbox, no
process, no memory, no processor) is an error, and never a reward.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.code_tests import Pair, Tests, tests_in
from lrl.rewards.code_text import is_same_output, program_in
from lrl.rewards.sandbox import Sandbox
from lrl.rewards.sandbox_session import Limits, Run, SandboxSession
from lrl.system.config_errors import fault

log = logging.getLogger(__name__)

Isolation = Literal["bubblewrap", "none"]
_LEAST_MEMORY_MIB = 32
_TRIED_ROWS = 16
"""Rows whose tests are tried before a run; those of the others when they are first used."""


class Verdict(NamedTuple):
    """The outcome of a response's tests."""

    passed: int
    tests: int
    reason: str = ""
    """Why the first test has failed that did."""
    limit: str = ""
    """The limit that the program has broken, if that is why."""


class Code(Reward):
    r"""1 if the program in the response passes all tests of its row, else 0. It runs in a sandbox
    (bubblewrap).

    The program is the last fenced block of Python in the response. A row's tests are Python that
    calls the program from a process of its own, or pairs of what a program reads on standard input
    and has to write on standard output. Tests that an empty program passes are an error.

    Args:
        tests: The column with the tests: asserts, `check(candidate)`, functions of pytest, classes
            of unittest, or pairs, in the forms of public data sets (docs/rewards.md).
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
        partial: Whether the reward is the share of the tests that pass.
        fenced: Whether the program is a fenced block; false takes the whole response.
        timeout_s: Seconds for a response, all its tests together; at most half of
            `data.reward_timeout_s`.
        memory_mib: MiB of memory of each process of a program.
        cpu_s: Whole seconds of CPU time of each process of a program, for each run.
        max_processes: Processes and threads of a program at once.
        max_output_bytes: Bytes that a run of a program may write to its outputs.
        isolation: `bubblewrap`; or `none`, a plain process of this user, which can read and change
            what the user can.
        python: Path of the interpreter; empty for the one that runs lrl, without the packages of
            its virtual environment.

    Raises:
        ValueError: A limit is out of range, or no program can run in the sandbox on this machine.
    """

    def __init__(
        self,
        tests: str = "tests",
        weight: float = 1.0,
        name: str = "code",
        partial: bool = False,
        fenced: bool = True,
        timeout_s: float = 4.0,
        memory_mib: int = 512,
        cpu_s: int = 2,
        max_processes: int = 8,
        max_output_bytes: int = 2**20,
        isolation: Isolation = "bubblewrap",
        python: str = "",
    ) -> None:
        super().__init__(weight, name)
        self.tests = tests
        self.partial = partial
        self.fenced = fenced
        self.give_up_s = timeout_s
        limits = Limits(
            timeout_s=timeout_s,
            memory_mib=memory_mib,
            cpu_s=cpu_s,
            max_processes=max_processes,
            max_output_bytes=max_output_bytes,
        )
        self.sandbox = Sandbox(limits, isolation, python)
        self._tried: set[int] = set()  # hashes of tests that an empty program fails
        if _are_sound(limits, isolation):
            self._check_sandbox()

    def missing_column(self, columns: Collection[str]) -> str:
        return "" if self.tests in columns else repr(self.tests)

    def check_row(self, columns: Mapping[str, Any]) -> None:
        tests = tests_in(columns, self.tests)
        if len(self._tried) < _TRIED_ROWS and self.sandbox.fault() is None:
            self._try(tests)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns the reward; `GaveUp` if the program has broken a limit and passed no test that
        counts.

        Raises:
            ValueError: The row has no tests, or some that an empty program passes, or
                that lack a module.
            RuntimeError: The sandbox does not work on this machine, or was ended from outside.
            TimeoutError: The machine is too busy for the program.
            OSError: No process can be started.
        """
        verdict = self.verdict(response, **columns)
        all_passed = verdict.passed == verdict.tests
        reward = verdict.passed / verdict.tests if self.partial else float(all_passed)
        return (
            GaveUp(f"the program broke {verdict.limit}") if verdict.limit and not reward else reward
        )

    def verdict(self, response: str, **columns: Any) -> Verdict:
        """Returns how many tests a response passes, and why not all; see `__call__`."""
        tests = tests_in(columns, self.tests)
        if found := self.sandbox.fault():
            raise RuntimeError(f"the sandbox does not work: {found.found}; {found.remedy}")
        self._try(tests)
        program = program_in(response) if self.fenced else response
        if program is None:
            return Verdict(0, len(tests.counted), "the response has no block of Python")
        return self._verdict(program, tests)

    def _try(self, tests: Tests) -> None:
        """Raises ValueError for tests that an empty program passes."""
        if (key := hash(tests)) in self._tried:
            return
        found = self._verdict("", tests)
        if found.passed == found.tests:
            raise ValueError(
                f"the column `{self.tests}` has no tests, as an empty program passes them: "
                f"{[*tests.pairs, *(step.source for step in tests.steps)]!r:.200}"
            )
        self._tried.add(key)

    def _verdict(self, program: str, tests: Tests) -> Verdict:
        with self.sandbox.open(program) as session:
            if tests.pairs:
                return self._by_pairs(session, tests.pairs)
            return self._by_steps(session, tests)

    def _by_steps(self, session: SandboxSession, tests: Tests) -> Verdict:
        run = session.run(steps=tests.steps, names=tests.names, ends_at_failure=not self.partial)
        if run.unfit:
            raise ValueError(
                f"the tests in the column `{self.tests}` cannot run: {run.unfit}. Set Code.python to "
                "a Python that has it, or import `solution` for the program"
            )
        failed = [number for number in tests.counted if number not in run.passed]
        passed = len(tests.counted) - len(failed)
        if not failed:
            return Verdict(passed, passed)
        why = run.limit or run.error or f"the program ended with status {run.status}"
        reason = f"{tests.steps[failed[0]].source!r:.200}: {why}"
        return Verdict(passed, len(tests.counted), reason, run.limit)

    def _by_pairs(self, session: SandboxSession, pairs: Sequence[Pair]) -> Verdict:
        passed = 0
        first: Verdict | None = None
        for pair in pairs:
            run = session.run(pair.stdin.encode())
            reason = _difference(run, pair)
            if not reason:
                passed += 1
                continue
            first = first or Verdict(0, len(pairs), reason, run.limit)
            if not self.partial or not session.is_open:
                break
        found = first or Verdict(0, len(pairs))
        return found._replace(passed=passed)

    def _check_sandbox(self) -> None:
        if found := self.sandbox.fault():
            fault(
                f"Code.isolation is {self.sandbox.isolation!r}, and no program can run so on this "
                f"machine: {found.found}. Type: {found.remedy}. (docs/rewards.md, section Code, has "
                "more; `isolation: none` runs the programs of a policy without a sandbox.)"
            )
        elif self.sandbox.isolation == "none":
            log.warning(
                "Code.isolation is none: programs that the policy writes run as this user, and can "
                "read and change what the user can."
            )
        else:
            log.info("Programs run in a sandbox, by %s.", self.sandbox.interpreter_path)


def _difference(run: Run, pair: Pair) -> str:
    """Returns why a run has not passed; empty if it has."""
    if run.limit:
        return run.limit
    if run.status != 0:
        return run.error or f"the program ended with status {run.status}"
    if is_same_output(run.output, pair.stdout):
        return ""
    written = run.output.decode(errors="replace")
    return f"the output is {written!r:.200}, not {pair.stdout!r:.200}"


def _are_sound(limits: Limits, isolation: str) -> bool:
    """Calls `fault` for every setting that is wrong; returns whether none is."""
    least = {
        "memory_mib": _LEAST_MEMORY_MIB,
        "cpu_s": 1,
        "max_processes": 1,
        "max_output_bytes": 1,
    }
    wrong = []
    for name, lowest in least.items():
        value = getattr(limits, name)
        if not isinstance(value, int) or value < lowest:
            wrong.append(f"Code.{name} is {value!r}; it must be a whole number, at least {lowest}.")
    if not isinstance(limits.timeout_s, int | float) or not 0 < limits.timeout_s < math.inf:
        wrong.append(f"Code.timeout_s is {limits.timeout_s!r}; it must be above 0, and finite.")
    if isolation not in get_args(Isolation):
        wrong.append(f"Code.isolation is {isolation!r}; it must be `bubblewrap` or `none`.")
    for text in wrong:
        fault(text)
    return not wrong
