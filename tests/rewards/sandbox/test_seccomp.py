"""The calls that the filter refuses, as the kernel sees them and as the filter is written."""

import os
import struct

import pytest

from lrl.rewards import Code
from lrl.rewards.sandbox.seccomp import ARCHITECTURES, DENIED, seccomp_filter
from tests.rewards.bubblewrap_here import needs_bubblewrap

CALLS = """
import ctypes, errno, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
def error_of(*words):
    found = libc.syscall(*words)
    return None if found != -1 else ctypes.get_errno()
def allowed(numbers):
    return [number for number in numbers if error_of(number, 0, 0, 0, 0, 0) != errno.EPERM]
arm = platform.machine() == "aarch64"
"""


@needs_bubblewrap
def test_the_kernel_refuses_calls_by_the_filter():
    sandboxed = Code(fenced=False, timeout_s=10.0, cpu_s=1, memory_mib=128)
    column = list(ARCHITECTURES).index(os.uname().machine)
    numbers = [int(call[1 + column]) for call in DENIED if call[1 + column] != "-1"]
    tests = [
        f"assert allowed({numbers}) == [], allowed({numbers})",
        "assert error_of(220 if arm else 56, 0x10000000 | 17, 0, 0, 0, 0) == errno.EPERM",
        "assert error_of(435, 0, 0) == errno.ENOSYS",
        "assert error_of(167 if arm else 157, 1, 0) == errno.EPERM",
        "assert error_of(198 if arm else 41, 40, 1, 0) == errno.EAFNOSUPPORT",
    ]
    assert sandboxed.verdict(CALLS, tests=tests).reason == ""


def result_of(program, machine_number, call, argument=0):
    """Runs a filter, as the kernel does, on a call; returns what it answers."""
    data = struct.pack("=IIQQ", call, machine_number, 0, argument)
    instructions = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        match code:
            case 0x06:
                return operand
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x15:
                at += if_true if value == operand else if_false
            case 0x35:
                at += if_true if value >= operand else if_false
            case 0x45:
                at += if_true if value & operand else if_false
            case _:
                raise AssertionError(code)


REFUSED = {
    "x86_64": [101, 165, 250, 272, 298, 310, 319, 321, 323, 425],
    "aarch64": [117, 40, 219, 97, 241, 270, 279, 280, 282, 425],
}
"""ptrace, mount, keyctl, unshare, perf_event_open, process_vm_readv, memfd_create, bpf, userfaultfd,
io_uring_setup."""


@pytest.mark.parametrize(
    ("machine", "read", "clone", "socket_"), [("x86_64", 0, 56, 41), ("aarch64", 63, 220, 198)]
)
def test_the_filter_is_the_same_on_both_machines(machine, read, clone, socket_):
    program = seccomp_filter(machine)
    number = ARCHITECTURES[machine]
    allow, refuse = 0x7FFF0000, 0x00050001
    assert result_of(program, number, read) == allow
    for refused in REFUSED[machine]:
        assert result_of(program, number, refused) == refuse
    assert result_of(program, number, clone, 0x01200011) == allow  # fork
    assert result_of(program, number, clone, 0x10000011) == refuse  # a new user namespace
    assert result_of(program, number, socket_, 2) == allow
    assert result_of(program, number, socket_, 40) == 0x00050061
    assert result_of(program, 0x40000003, read) == refuse  # a program of 32 bits
    assert result_of(program, number, 0x40000000 + 101) == refuse  # the numbers of x32
