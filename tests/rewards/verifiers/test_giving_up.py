"""If a verifier gives up, the response is wrong and counted, and its worker stays; an error stays
an error. A number that is too large is found in its text, and nothing computes beyond its limit,
which counts the time of the processor alone.

Covers lrl/rewards/verifiers/math.py.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.rewards import Math
from lrl.rewards.verifiers.math import MAX_BITS, MAX_DEPTH, TooMuchError, check_magnitude, within
from tests.event_loop import run
from tests.rewards.scenes import counted, scored, start_afresh, started

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


@pytest.mark.parametrize(
    ("text", "huge"), [*((one, True) for one in HUGE), *((one, False) for one in FINE)]
)
def test_an_expression_too_large_to_compute_is_seen_from_its_text(text, huge):
    try:
        check_magnitude(text)
    except TooMuchError:
        assert huge
    else:
        assert not huge


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


def test_time_that_goes_by_without_computing_does_not_count():
    assert within(0.05, lambda: time.sleep(0.2) or "slept") == "slept"


@pytest.mark.parametrize("work", [swallow, lambda: 3 ** (10**8)])
def test_code_that_swallows_the_signal_or_multiplies_large_numbers_is_out_of_time(work):
    with pytest.raises(TooMuchError):
        within(0.05, work)


# ---- in a worker

GIVE_UP_S = 0.5
LONG = [
    "+".join(f"x_{{{i}}}^{{{i}}}" for i in range(600)),
    "(" * 19 + "1" + ")" * 19,
    "+".join(rf"\sin({i}x)" for i in range(1, 30)),
    r"\sum_{k=1}^{100000} k^{k}",
    r"(\sqrt{2}+1)^{100000}",
    "0." + "3" * 5000,
    "1" * 5000,
    r"\begin{pmatrix}" + r" \\ ".join(" & ".join(["x"] * 12) for _ in range(12)) + r"\end{pmatrix}",
]


@pytest.fixture(scope="module")
def shared_pool():
    with started([Math(give_up_s=GIVE_UP_S)], workers=1, timeout_s=120) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool):
    return start_afresh(shared_pool)


def boxed(*formulas):
    return [rf"So it is $\boxed{{{formula}}}$." for formula in formulas]


def test_a_huge_or_slow_response_is_wrong_and_no_worker_is_lost(pool):
    for formula in LONG:
        check_magnitude(formula)  # so the limit on CPU time ends it
    wrong = [*HUGE, *LONG]
    rollouts = scored(pool, *boxed("4", *wrong, "2+2"), columns={"answer": "4"})
    assert [rollout.reward for rollout in rollouts] == [1.0, *[0.0] * len(wrong), 1.0]
    assert counted(pool) == {"scored": len(wrong) + 2, "zero": len(wrong)}
    assert pool.counts["gave_up"] >= len(HUGE) + 4 and pool.counts["replaced"] == 0


def pin_to(cores):
    """Gives these cores to what this thread and the loop, which starts workers, start from now on."""

    async def on_the_loop():
        os.sched_setaffinity(0, cores)

    os.sched_setaffinity(0, cores)
    run(on_the_loop())


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="only Linux tells who waits for a processor"
)
def test_a_verdict_does_not_depend_on_how_busy_the_machine_is():
    """On one core beside six processes that compute, a worker gets about a seventh of the time."""
    cores = os.sched_getaffinity(0)
    compute = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    others = []
    pin_to({min(cores)})
    try:
        with started([Math(give_up_s=GIVE_UP_S)], workers=1, timeout_s=3 * GIVE_UP_S) as pool:
            scored(pool, *boxed("2+2"), columns={"answer": "4"})  # the first call loads the parser
            start_afresh(pool)
            others = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(6)]
            rollouts = scored(pool, *boxed(LONG[0], "2+2"), columns={"answer": "4"})
    finally:
        pin_to(cores)
        for other in others:
            other.kill()
            other.wait()
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]
    assert counted(pool) == {"scored": 2, "zero": 1} and pool.counts["replaced"] == 0


def test_the_gold_answer_itself_is_right_at_any_size():
    gold = "10^{10^{10}}"
    assert Math()("", rf"It is $\boxed{{ {gold} }}$.", answer=gold) == 1.0
    with pytest.raises(ValueError, match="gold answer '10.* would have more than"):
        Math()("", r"\boxed{5}", answer=gold)


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{10^{10^9} \bmod 7 = 4}",
        r"As $10^{10^9}$ is even and $2^{2^{40}}$ too, it is $\boxed{4}$.",
        "As $10^{10^9}$ is even, it is $4$.",
    ],
)
def test_a_huge_number_before_the_final_expression_is_not_computed(response):
    assert Math()("", response, answer="4") == 1.0
