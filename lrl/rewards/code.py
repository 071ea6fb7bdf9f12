"""Programs: the code in a response is run against the row's tests, in a sandbox.

Whatever a program does is its own fault, and worth 0. What the machine does to it (no sandbox, no
process, no memory, no processor) is an error, and never a reward.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from lrl.errors import ConfigError, above, one_of
from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.sandbox.forms import Pair, Tests, tests_in
from lrl.rewards.sandbox.session import Isolation, Run, Sandbox, check, opened

_TRIED_ROWS = 16  # before a run; the others when they are first used
# Without a step back (`+` behind each), by which the time would grow with the square of a line.
_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^`]*+")
_PYTHON = ("python", "py", "python3")


class Verdict(NamedTuple):
    passed: int
    tests: int
    reason: str = ""  # of the first failure
    limit: str = ""  # that the program broke


class Code(Reward):
    r"""1 if the program in the response, its last fenced block of Python, passes all tests of its
    row in a sandbox (bubblewrap), else 0. Tests that an empty program passes are an error.

    Args:
        tests: The column with the tests: asserts, `check(candidate)`, functions of pytest, classes
            of unittest, or pairs, in the forms of public data sets (docs/rewards.md).
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
        partial: Whether the reward is the share of the tests that pass.
        fenced: Whether the program is a fenced block; false takes the whole response.
        timeout_s: Seconds for a response, all its tests together.
        memory_mib: MiB of memory of each process of a program.
        cpu_s: Whole seconds of CPU time of each process of a program, for each run.
        max_processes: Processes and threads of a program at once.
        max_output_bytes: Bytes that a run of a program may write to its outputs.
        isolation: `bubblewrap`; or `none`, a plain process of this user, which can read and change
            what the user can.
        python: Path of the interpreter; empty for the one that runs lrl, without the packages of
            its virtual environment.
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
        self.binary = not partial
        self.fenced = fenced
        self.give_up_s = timeout_s
        self._tried: set[int] = set()  # hashes of tests that an empty program fails
        above(0, "Code", timeout_s=timeout_s, memory_mib=memory_mib, cpu_s=cpu_s)
        above(0, "Code", max_processes=max_processes, max_output_bytes=max_output_bytes)
        limits = (timeout_s, memory_mib, cpu_s, max_processes, max_output_bytes)
        one_of("Code", isolation=(get_args(Isolation), isolation))
        self.sandbox = Sandbox(*limits, isolation, python)
        self.deadline_s = self.sandbox.deadline_s
        try:
            check(self.sandbox)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"Code.isolation is {isolation!r}, and no program can run so on this machine: "
                f"{error}. (docs/rewards.md, section Code, has the remedies; `isolation: none` "
                "runs programs without a sandbox.)"
            ) from error

    def check_row(self, columns: Mapping[str, Any]) -> None:
        tests = tests_in(columns, self.tests)
        if len(self._tried) < _TRIED_ROWS:
            self._try(tests)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns the reward, `GaveUp` if a broken limit made it 0; raises an error if the tests or
        the machine are to blame."""
        verdict = self.verdict(response, **columns)
        share = verdict.passed / verdict.tests
        reward = share if self.partial else float(share == 1)
        if verdict.limit and not reward:
            return GaveUp(f"the program broke {verdict.limit}")
        return reward

    def verdict(self, response: str, **columns: Any) -> Verdict:
        """Returns how many tests a response passes, and why not all."""
        tests = tests_in(columns, self.tests)
        self._try(tests)
        program = program_in(response) if self.fenced else response
        if program is None:
            return Verdict(0, len(tests.counted), "the response has no block of Python")
        return self._verdict(program, tests)

    def _try(self, tests: Tests) -> None:
        """Raises ValueError for tests that an empty program passes."""
        if hash(tests) in self._tried:
            return
        found = self._verdict("", tests)
        if found.passed == found.tests:
            raise ValueError(
                f"the column `{self.tests}` has no tests, as an empty program passes them: "
                f"{[*tests.pairs, *(step.source for step in tests.steps)]!r:.200}"
            )
        self._tried.add(hash(tests))

    def _verdict(self, program: str, tests: Tests) -> Verdict:
        if tests.pairs:
            return self._by_pairs(program, tests.pairs)
        with opened(self.sandbox, program, tests, ends_at_failure=not self.partial) as session:
            run = session.run()
        failed = [number for number in tests.counted if number not in run.passed]
        passed = len(tests.counted) - len(failed)
        if not failed:
            return Verdict(passed, passed)
        reason = f"{tests.steps[failed[0]].source!r:.200}: {run.why}"
        return Verdict(passed, len(tests.counted), reason, run.limit)

    def _by_pairs(self, program: str, pairs: Sequence[Pair]) -> Verdict:
        passed = 0
        reason = limit = ""  # of the first failure
        with opened(self.sandbox, program) as session:
            for pair in pairs:
                run = session.run(pair.stdin)
                why = _difference(run, pair)
                passed += not why
                if why and not reason:
                    reason, limit = why, run.limit
                if why and (not self.partial or run.is_last):
                    break
        return Verdict(passed, len(pairs), reason, limit)


def program_in(response: str) -> str | None:
    """Returns the last closed block that is named as Python, else the last one without a name."""
    blocks: dict[bool, str] = {}
    fence = ""
    language = ""
    lines: list[str] = []
    for line in response.split("\n"):  # not splitlines(): a program may hold other line ends
        found = _FENCE.fullmatch(line)
        if not fence:
            if found is not None:
                fence, language = found[1], found[2].lower()
                lines = []
        elif found is not None and found[1].startswith(fence) and not found[2]:
            if not language or language in _PYTHON:
                blocks[bool(language)] = textwrap.dedent("\n".join(lines) + "\n")
            fence = ""
        else:
            lines.append(line)
    return blocks.get(True, blocks.get(False))


def _difference(run: Run, pair: Pair) -> str:
    if run.limit or run.status != 0:
        return run.why
    if _lines(run.output) == _lines(pair.stdout):
        return ""
    return f"the output is {run.output!r:.200}, not {pair.stdout!r:.200}"


def _lines(text: str) -> list[str]:
    """Returns the lines of an output, without white space at the ends of lines and of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
