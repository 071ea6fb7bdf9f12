"""Programs that try to leave the limits of the sandbox, to take over its first process, or to make
an error where a 0 is due; each of another kind than those of `test_attacks`.

A program sets `won` if it has succeeded.
"""

import os
import re
import struct
from pathlib import Path

import psutil
import pytest

from lrl.rewards import Code
from lrl.rewards.sandbox.session import ARCHITECTURES, DENIED, opened, seccomp_filter
from tests.rewards.scenes import LACKING, needs_bubblewrap

IMPORTS = (
    "import ctypes, fcntl, mmap, os, resource, socket, threading, time\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
)
TRY_ALL = "import os\nfor number in range(10**9):\n  name = '/tmp/' + 'x' * 200 + str(number)\n  "


@pytest.fixture(scope="module")
def sandboxed():
    if LACKING:
        pytest.skip(LACKING)
    limits = {"timeout_s": 2.0, "cpu_s": 1, "memory_mib": 64, "max_output_bytes": 2**16}
    judge = Code(fenced=False, max_processes=4, **limits)
    assert judge("", f"{IMPORTS}won = True", tests="assert won") == 1.0
    return judge


FIRST_PROCESS = {
    "reads its memory": "open('/proc/1/mem', 'rb')",
    "writes its memory": "open('/proc/1/mem', 'r+b')",
    "reads where its memory is": "assert open('/proc/1/maps').read()",
    "opens its files": "assert os.listdir('/proc/1/fd')",
    "opens its files by a thread": "assert os.listdir('/proc/1/task/1/fd')",
    "reads its command": "assert open('/proc/1/cmdline').read()",
    "enters its root folder": "assert os.listdir('/proc/1/root')",
    "reads its stack": "assert open('/proc/1/syscall').read()",
    "sets its limits": "resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
    "reads its limits": "resource.prlimit(1, resource.RLIMIT_NPROC)",
    "sets the limits of a child": (
        "child = os.fork()\nif not child: time.sleep(9)\n"
        "resource.prlimit(child, resource.RLIMIT_CPU, (9, 9))"
    ),
    "puts a file in its place": "open('/proc/1/mem', 'wb')",
}
THE_KERNEL = {
    "is not the first to be ended": "open('/proc/self/oom_score_adj', 'w').write('0')",
    "writes its own memory by a file": "open('/proc/self/mem', 'r+b')",
    "maps the ids of users": "open('/proc/self/uid_map', 'w').write('0 0 1')",
    "raises its share of processors": "os.nice(-5)\nassert os.nice(0) < 0",
    "is a real-time process": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "sets the clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
    "names the machine": "socket.sethostname('x')",
    "opens a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "opens a socket of packets": "socket.socket(17, socket.SOCK_RAW)",
    "loads a part of the kernel by a pair of sockets": (
        "pair = (ctypes.c_int * 2)()\nfound = libc.socketpair(30, 1, 0, pair)\n"
        "assert found == 0 or ctypes.get_errno() != 97"
    ),
    "opens a terminal": "os.openpty()",
    "opens the terminal of the user": "open('/dev/tty')",
    "reads the machine's memory": (
        "names = '/dev/mem', '/dev/kmem', '/dev/port', '/proc/kcore', '/proc/kmsg'\nopened = 0\n"
        "for name in names:\n  try: opened += bool(open(name, 'rb').read(1))\n"
        "  except OSError: pass\nassert opened"
    ),
    "opens devices for others": (
        "assert any(map(os.path.exists, ('/dev/kvm', '/dev/fuse', '/dev/net/tun',"
        " '/dev/loop-control', '/dev/kmsg', '/sys/fs/cgroup')))"
    ),
    "presses a key of the kernel": "open('/proc/sysrq-trigger', 'w').write('h')",
    "gets rights from a program": (
        "status = open('/proc/self/status').read()\n"
        "assert 'NoNewPrivs:\\t1' not in status or 'CapBnd:\\t0000000000000000' not in status"
    ),
    "has a group": "assert set(os.getgroups()) - {1000, 65534}",
    "calls the kernel as a program of 32 bits": (
        "import mmap, platform\nassert platform.machine() == 'x86_64'\n"
        # mov eax, 310 (unshare); mov ebx, CLONE_NEWUSER; int 0x80; ret
        "code = bytes.fromhex('53b836010000bb00000010cd805bc3')\n"
        "page = mmap.mmap(-1, 4096, prot=7)\npage.write(code)\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "assert ctypes.CFUNCTYPE(ctypes.c_int)(at)() == 0"
    ),
    "makes a namespace by another set of numbers": (
        "assert libc.syscall(0x40000000 + 272, 0x10000000) == 0"
    ),
}
MORE_THAN_ITS_SHARE = {
    "memory that is shared": "mmap.mmap(-1, 2**27, flags=mmap.MAP_SHARED)",
    "memory of a device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**27)",
    "large pages": "mmap.mmap(-1, 2**27, flags=0x40022)",
    "memory that stays": "assert libc.mlockall(3) == 0 and bytearray(2**26)",
    "a stack without end": "threading.stack_size(2**27)\nthreading.Thread(target=int).start()",
    "words of a command": "os.execv('/usr/bin/true', ['true'] + ['x' * 10**5] * 10**3)",
    "a file with a hole": "open('/tmp/hole', 'wb').truncate(2**40)",
    "its own input": "os.ftruncate(0, 2**27)",
    "threads": (
        "for _ in range(8): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    ),
    "children that nobody has waited for": "for _ in range(20):\n  if os.fork() == 0: os._exit(0)",
    "files that are open": "for _ in range(200): os.dup(0)",
    "queues of messages": (
        "for number in range(9):\n"
        "  assert libc.syscall(240, b'x%d' % number, 0o102, 0o600,"
        " (ctypes.c_long * 4)(0, 9, 2**20)) >= 0"
    ),
    "standard error": "os.write(2, bytes(2**17))\nwhile True: os.write(2, bytes(2**17))",
    "pipes": "for _ in range(20):\n  _, end = os.pipe()\n  fcntl.fcntl(end, 1031, 2**24)\n",
}
FILES = {
    "empty files": "os.close(os.open(name, os.O_CREAT | os.O_WRONLY))",
    "folders": "os.mkdir(name)",
    "links to nothing": "os.symlink('x' * 4000, name)",
    "names of one file": "open('/tmp/x', 'a').close() if number == 0 else os.link('/tmp/x', name)",
    "pipes with names": "os.mkfifo(name)",
    "files of several processes": (
        "os.fork() if number < 2 else os.close(os.open(f'{name}-{os.getpid()}', os.O_CREAT))"
    ),
}


@pytest.mark.parametrize("name", FIRST_PROCESS | THE_KERNEL | MORE_THAN_ITS_SHARE)
def test_a_program_stays_within_its_limits(name, sandboxed):
    program = IMPORTS + (FIRST_PROCESS | THE_KERNEL | MORE_THAN_ITS_SHARE)[name]
    assert sandboxed("", f"{program}\nwon = True", tests="assert won") == 0.0


@pytest.mark.parametrize("program", FILES.values(), ids=FILES)
def test_files_that_take_only_the_kernels_memory_are_counted(program, sandboxed):
    verdict = sandboxed.verdict(TRY_ALL + program, tests="assert won")
    assert verdict.passed == 0 and "files" in verdict.limit


def test_the_files_of_all_runs_are_counted_together(sandboxed):
    program = (
        "import os\nfor number in range(3000):"
        " os.close(os.open(f'/dev/shm/{os.getpid()}-{number}', os.O_CREAT))\nprint(0)"
    )
    verdict = sandboxed.verdict(program, tests=[{"input": "", "output": "0"}] * 30)
    assert "files" in verdict.limit


ON_PURPOSE = {
    "interrupts the first process": "os.kill(1, signal.SIGINT)",
    "sends it all signals": "[os.kill(1, number) for number in range(1, 65) if number not in (32, 33)]",
    "lets it start no other": ("resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))"),
    "lets it open nothing": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "gives it no processor": "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
    "stops itself": "os.kill(0, signal.SIGSTOP)",
    "closes its outputs": "os.close(1), os.close(2)",
    "leaves a child that holds its output": "os.fork() or time.sleep(60)",
    "makes its output wait for nobody": "os.set_blocking(1, False)",
    "cannot be waited for": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
}


@pytest.mark.parametrize("name", ON_PURPOSE)
def test_no_program_makes_an_error_of_its_zero(name, sandboxed):
    program = (
        "import os, resource, signal, time\nprint(input(), flush=True)\n"
        f"try: {ON_PURPOSE[name]}\nexcept OSError: pass"
    )
    pairs = [{"input": "a", "output": "a"}, {"input": "b", "output": "b"}]
    assert sandboxed("", program, tests=pairs) in (0.0, 1.0)


def test_the_first_process_has_the_limits_of_the_program(sandboxed):
    with opened(sandboxed.sandbox, "pass") as session:
        assert session.run().status == 0
        (runner,) = psutil.Process(session.process.pid).children()
        place = Path(f"/proc/{runner.pid}")
        limits = place.joinpath("limits").read_text()
        assert re.search(r"Max address space +67108864 +67108864 ", limits)
        assert re.search(r"Max processes +6 +6 ", limits)
        assert place.joinpath("oom_score_adj").read_text() == "1000\n"


# ---- the filter of system calls, as the kernel sees it and as it is written

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
"""ptrace, mount, keyctl, unshare, perf_event_open, process_vm_readv, memfd_create, bpf,
userfaultfd, io_uring_setup."""


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
