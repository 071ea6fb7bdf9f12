"""Mathematics: two expressions are equal if math-verify (sympy) can show it, in whatever form they are written.

A policy also writes expressions that no verifier can work out. Then the verifier gives up, and the response is wrong.
Numbers that are too large are found in the text. Any other computation that takes too long is ended after `give_up_s`.
"""

import logging
import re
import signal
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from math_verify import parse, verify

from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.boxed import last_boxed
from lrl.rewards.size import TooLargeError, check_size
from lrl.runtime.config_errors import above

# Each warns once per process that its timeout is off. That counts wall-clock time, so that a right response would be
# wrong on a busy machine.
for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)

_PLAIN_PI = re.compile(r"(?<![a-zA-Z\\])(?<!text\{)(?<!mathrm\{)(?<!mbox\{)(?<!name\{)pi(?![a-zA-Z])")
_LAST_FORMULA = re.compile(r"(?:\$([^$]+)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\])[\s.*]*$", re.DOTALL)
_EQUALS = re.compile(r"(?<![\\<>!])=")
_LONGEST_END = 2000
"""Characters at the end of a response that are searched for a formula without a box."""
_REPEAT_S = 0.5
"""Seconds after which the signal of `within` comes again, in case the code has swallowed its exception."""
_Found = TypeVar("_Found")


class Math(Reward):
    r"""1 if the final expression of the response equals the right one, else 0. Checked by math-verify.

    It gives up on a response that cannot be worked out (`2^{2^{40}}`) or takes too long; the response is then wrong.

    Args:
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
        give_up_s: Seconds of CPU time before it gives up on a response; at most half of `data.reward_timeout_s`.
    """

    def __init__(self, weight: float = 1.0, name: str = "math", give_up_s: float = 2.0) -> None:
        super().__init__(weight, name)
        above(0, "Math", give_up_s=give_up_s)
        self.give_up_s = give_up_s

    def missing_column(self, columns: Collection[str]) -> str:
        return "" if {"answer", "solution"} & set(columns) else "'answer' or 'solution'"

    def __call__(
        self, prompt: str, response: str, *, answer: object = None, solution: str | None = None, **columns: Any
    ) -> float:
        r"""Returns 1.0, 0.0 or `GaveUp`.

        Args:
            prompt: Not used.
            response: The response.
            answer: The gold expression in LaTeX.
            solution: A text whose last `\boxed{}` is the gold expression; read if there is no `answer`.
            columns: Not used.

        Raises:
            ValueError: The row has neither column, or no expression can be read from it.
        """
        text = solution if answer is None else rf"\boxed{{{answer}}}"
        if text is None or r"\boxed" not in text:
            raise ValueError(r"the row has neither a column `answer` nor a `solution` with a \boxed{}")
        right, final = _final(text), _final(response)
        same = right.split() == final.split()
        try:
            check_size(right)
        except TooLargeError as error:
            if same:
                return 1.0
            raise ValueError(f"the gold answer {right!r} {error}: nothing can be compared with it") from error
        try:
            check_size(final if same or _EQUALS.search(right) else _EQUALS.split(final)[-1])
        except TooLargeError as error:
            return GaveUp(f"the response {error}")
        try:
            gold = within(self.give_up_s, lambda: _parsed(text))
        except OutOfTimeError as error:
            raise ValueError(f"the gold answer {text!r} was not read in {self.give_up_s:g} s of CPU time") from error
        if not gold:
            raise ValueError(f"no expression can be read from the gold answer {text!r}")
        try:
            return within(self.give_up_s, lambda: float(verify(gold, _parsed(response), timeout_seconds=None)))
        except OutOfTimeError:
            return GaveUp(f"the response was not compared in {self.give_up_s:g} s of CPU time")


def _parsed(text: str) -> list[Any]:
    return parse(_PLAIN_PI.sub(r"\\pi", text), parsing_timeout=None)


def _final(text: str) -> str:
    r"""Returns what math-verify compares first: the last box, even if it is not closed, else a formula at the end."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if r"\boxed{" in text:
        return text.rpartition(r"\boxed{")[2]
    formula = _LAST_FORMULA.search(text[-_LONGEST_END:])
    return next(group for group in formula.groups() if group) if formula else ""


class OutOfTimeError(BaseException):
    """The CPU time is used up. Not an `Exception`: a library might catch that as one of its own."""


def within(seconds: float, work: Callable[[], _Found]) -> _Found:
    """Returns what `work` returns, if it takes no more CPU time of this process than `seconds`.

    CPU time does not depend on how busy the machine is. A signal ends the work. Python handles it between two bytecode
    instructions and inside a multiplication of large numbers, but not inside other C code. Python handles no signals
    outside of the main thread, so there is no limit there. Raises OutOfTimeError if `work` took longer, also if it
    swallowed the exception and returned.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return work()
    armed, late = True, False

    def ring(*_: object) -> None:
        nonlocal late
        if armed:
            late = True
            raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
            found = work()
        finally:
            armed = False
    finally:  # the signal may come just before the line above, and its next one comes much later
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # Never the default, which would end the process if a signal is still pending.
        signal.signal(signal.SIGVTALRM, before if callable(before) else signal.SIG_IGN)
    if late:
        raise OutOfTimeError
    return found
