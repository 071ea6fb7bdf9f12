"""A calculator as an environment, which writes the result behind `=`; and as a tool."""

import re
from fractions import Fraction

from lrl.environments import Turns
from lrl.environments.base import Answer

_NUMBER = r"\d+(?:\.\d+)?"
_TERMS = rf"-?{_NUMBER}(?:\s*[-+*x×/÷]\s*{_NUMBER})+"
_CALCULATION = re.compile(rf"{_TERMS}(?=\s*=$)")
_PART = re.compile(rf"([-+*x×/÷]?)\s*({_NUMBER})")
_DISPLAY = 10**8
"""Above every number that the display can show."""


class Calculator(Turns):
    """Writes the result of the calculation before a `=`, or nothing if there is none. A turn that
    does not end with `=` ends the episode."""

    stop: tuple[str, ...] = ("=",)
    deterministic = True

    def reply(self, turn: str) -> Answer:
        if not turn.endswith("="):
            return "", True, 0.0
        found = _CALCULATION.search(turn)
        return _shown(found.group()) if found else "", False, 0.0


class ProseCalculator(Calculator):
    """A calculator for prose, with a space around `=`: `5 * 12 =` gets ` 60`."""

    stop = (" =", "=")

    def reply(self, turn: str) -> Answer:
        result, done, reward = super().reply(turn)
        space = " " if result and turn.endswith(" =") else ""
        return f"{space}{result}", done, reward


def calculate(expression: str) -> str:
    """Works out a calculation.

    Args:
        expression: Numbers with + - * / between them.
    """
    result = _shown(expression) if re.fullmatch(_TERMS, expression.strip()) else ""
    return result or "error: write two numbers or more with + - * / between them, and no brackets"


def _shown(calculation: str) -> str:
    """Returns the result as displayed; empty for a division by zero, or a number too long."""
    try:
        result = _result(calculation)
    except ZeroDivisionError:
        return ""
    if abs(result) >= _DISPLAY:
        return ""
    return f"{float(result):.4f}".rstrip("0").rstrip(".")


def _result(calculation: str) -> Fraction:
    total = Fraction(0)
    term = Fraction(0)
    for operator, digits in _PART.findall(calculation):
        number = Fraction(digits)
        match operator:
            case "*" | "x" | "×":
                term *= number
            case "/" | "÷":
                term /= number
            case "-":
                total += term
                term = -number
            case _:
                total += term
                term = number
    return total + term
