"""A number that is too large is found in its text, and any other passes; nothing computes beyond its
limit, which counts the time of the processor alone."""

import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.rewards.verifiers.limits import (
    MAX_BITS,
    MAX_DEPTH,
    TooMuchError,
    check_magnitude,
    within,
)

HUGE = [
    "2^{2^{40}}", "10^{10^9}", "1000000!", "(10^9)!", "1,000,000!", r"1\,000\,000!", "3!!!!", "10**10**9",
    "9^9^9^9", "((2^{10})^{10^5})^{10^5}", r"\frac{1}{2^{2^{40}}}", "2^{-2^{40}}", r"\sqrt{2^{2^{40}}}",
    r"\sin(10^{10^9})", r"\log 10^{10^9}", r"\left(10\right)^{10^{9}}", "(2^{2^{40}}, 5)", "[0, 10^{10^{10^{10}}})",
    r"\{2^{2^{40}}, 3\}", r"\begin{pmatrix} 2^{2^{40}} & 1 \\ 1 & 1 \end{pmatrix}", r"\gcd(10^{10^9}, 5)",
    r"\binom{1000000000}{500000000}", r"\Gamma(1000000)", "0.5^{1000000}", "(1+i)^{1000000}",
    r"\lfloor 10^{10^9}/3 \rfloor", "(2x)^{10^9}", r"\operatorname{eye}(20000)", "2^" * 500 + "2",
    "(" * 500 + "1" + ")" * 500, "{" * 500 + "1" + "}" * 500,
]  # fmt: skip
FINE = [
    "", "7", "100!", "2^{1000}", "3^{100000}", "x^{2005} + 1", "x^{10^9}", "e^{-3.14159}", "10^{0.5}", "2^{10/3}",
    r"2^{\frac{1000}{3}}", "2^{1005 + 1000}", r"\frac{100!}{98! \cdot 2!}", "1000(1.05)^{10}", "(1 + 0.05)^{360}",
    "(x+1)^{100}",
    r"\left(\frac{3}{4}\right)^{2005}", r"90^{\circ}", r"\sum_{k=1}^{1000000} k^2", r"\int_0^{1000000} x dx",
    "x_{1000000}!",
    "10101_{2}", r"\binom{100}{50}", r"\text{10^9^9}", "1,000,000", "5!", "[0,1)" + r"\cup [0,1)" * 50, "}" * 500,
    "^", "!",
]  # fmt: skip


def is_too_large(text):
    try:
        check_magnitude(text)
    except TooMuchError:
        return True
    return False


@pytest.mark.parametrize(
    ("text", "huge"), [*((one, True) for one in HUGE), *((one, False) for one in FINE)]
)
def test_an_expression_too_large_to_compute_is_seen_from_its_text(text, huge):
    assert is_too_large(text) == huge


@given(
    st.text(alphabet="0123456789.,^!{}()[]+-*/=x_ e\\E")
    | st.lists(st.sampled_from(HUGE + FINE)).map(" ".join)
)
def test_no_text_is_an_error(text):
    try:
        check_magnitude(text)
    except TooMuchError as error:
        assert str(MAX_BITS) in str(error) or str(MAX_DEPTH) in str(error)


# ---- time


def compute():
    while True:
        pass


def swallow():
    while True:
        try:
            compute()
        except BaseException:
            return "found"


def test_computing_ends_at_the_limit_and_the_old_signal_handler_is_restored():
    rung = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: rung.append(True))
    try:
        with pytest.raises(TooMuchError):
            within(0.05, compute)
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
        signal.raise_signal(signal.SIGVTALRM)
        assert rung == [True]
    finally:
        signal.signal(signal.SIGVTALRM, before)


def test_code_that_swallows_the_signal_is_still_out_of_time():
    with pytest.raises(TooMuchError):
        within(0.05, swallow)


def test_time_that_goes_by_without_computing_does_not_count():
    assert within(0.05, lambda: time.sleep(0.2) or "slept") == "slept"


def test_a_multiplication_of_large_numbers_is_ended():
    with pytest.raises(TooMuchError):
        within(0.05, lambda: 3 ** (10**8))


def test_outside_of_the_main_thread_there_is_no_limit():
    found = []
    thread = threading.Thread(target=lambda: found.append(within(1e-9, lambda: sum(range(10**6)))))
    thread.start()
    thread.join(60)
    assert found == [sum(range(10**6))]
