"""The limit on computing counts the time of the processor alone, and nothing computes beyond it."""

import signal
import threading
import time

import pytest

from lrl.rewards.verifiers.cpu_limit import OutOfTimeError, within


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
        with pytest.raises(OutOfTimeError):
            within(0.05, compute)
        assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
        signal.raise_signal(signal.SIGVTALRM)
        assert rung == [True]
    finally:
        signal.signal(signal.SIGVTALRM, before)


def test_code_that_swallows_the_signal_is_still_out_of_time():
    with pytest.raises(OutOfTimeError):
        within(0.05, swallow)


def test_time_that_goes_by_without_computing_does_not_count():
    assert within(0.05, lambda: time.sleep(0.2) or "slept") == "slept"


def test_a_multiplication_of_large_numbers_is_ended():
    with pytest.raises(OutOfTimeError):
        within(0.05, lambda: 3 ** (10**8))


def test_outside_of_the_main_thread_there_is_no_limit():
    found = []
    thread = threading.Thread(target=lambda: found.append(within(1e-9, lambda: sum(range(10**6)))))
    thread.start()
    thread.join(60)
    assert found == [sum(range(10**6))]
