"""Hostile programs in the sandbox: none gets out, none claims a success, none leaves anything.

A program that attacks sets `won` if it has succeeded, and its test is `assert won`: it is worth 1
only then. Where it can be tried without harm, the same program wins without the sandbox.

Covers lrl/rewards/sandbox/runner.py, session.py.
"""

import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from lrl.rewards import Code
from lrl.rewards.sandbox.session import ARCHITECTURES, DENIED, opened, seccomp_filter
from tests.leftovers import wait_for, wait_for_none
from tests.rewards.scenes import needs_bubblewrap

ROOT = Path(__file__).parents[3]
pytestmark = needs_bubblewrap
SECRET = "LRL_TEST_SECRET"
MARK = uuid.uuid4().hex[:12]
"""The name of processes and files of these programs."""
IMPORTS = (
    "import atexit, builtins, ctypes, fcntl, glob, mmap, os, resource, signal, socket, sys, threading, time\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
)
CALL_ME = f"import ctypes; ctypes.CDLL(None).prctl(15, b{MARK!r})\n"
WON = "assert won"


@pytest.fixture(scope="module")
def sandboxed():
    limits = {"timeout_s": 3.0, "cpu_s": 1, "memory_mib": 64, "max_output_bytes": 2**16}
    judge = Code(fenced=False, max_processes=4, **limits)
    assert judge("", f"{IMPORTS}won = True", tests=WON) == 1.0
    return judge


@pytest.fixture(scope="module")
def bare():
    return Code(fenced=False, timeout_s=10.0, isolation="none")


@pytest.fixture
def outside(monkeypatch):
    """What is there to steal: a secret in the environment and in a file, and two servers. Yields
    the words that programs use for them."""
    monkeypatch.setenv(SECRET, "open sesame")
    folder = tempfile.mkdtemp(prefix="lrl")
    os.chmod(folder, 0o777)
    Path(folder, "secret").write_text("open sesame")
    abstract = f"\0{MARK}{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        yield {"FOLDER": folder, "PORT": tcp.getsockname()[1], "ABSTRACT": abstract}
    shutil.rmtree(folder)


def named():
    """The living processes of the programs of this file."""
    every = psutil.process_iter(["name", "status"])  # one that ends meanwhile is left out
    marked = [process for process in every if process.info["name"] == MARK]
    return [process for process in marked if process.info["status"] != psutil.STATUS_ZOMBIE]


STEALING = {
    "a file": "won = open('FOLDER/secret').read() == 'open sesame'",
    "a file by a link": "os.symlink('FOLDER/secret', 'link')\nwon = 'open' in open('link').read()",
    "a file by the root of a process": (
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  try: won = 'open' in open(f'/proc/{pid}/root/FOLDER/secret').read()\n"
        "  except OSError: pass\n"
    ),
    "a write": "open('FOLDER/written', 'w').write('x')\nwon = True",
    "the users": "won = 'root' in open('/etc/passwd').read()",
    "the processes": "won = len([each for each in os.listdir('/proc') if each.isdigit()]) > 3",
    "the network": "socket.create_connection(('127.0.0.1', PORT), 1)\nwon = True",
    "a socket without a file": "socket.socket(socket.AF_UNIX).connect('ABSTRACT')\nwon = True",
    "the name of the machine": "won = socket.gethostname() != 'sandbox'",
}


@pytest.mark.parametrize("name", STEALING)
def test_nothing_outside_can_be_read_or_changed(name, outside, sandboxed, bare):
    program = IMPORTS + STEALING[name]
    for word, value in outside.items():
        program = program.replace(word, str(value).replace("\0", "\\x00"))
    assert sandboxed("", program, tests=WON) == 0.0
    assert not Path(outside["FOLDER"], "written").exists()
    assert bare("", program, tests=WON) == 1.0


INSIDE = {
    "the caller's environment": (
        "texts = [str(dict(os.environ))]\n"
        "for file in glob.glob('/proc/[0-9]*/environ'):\n"
        "  texts.append(open(file, 'rb').read().decode())\n"
        f"assert any('{SECRET}' in text for text in texts)"
    ),
    "a file descriptor of the caller": (
        "kinds = [os.readlink(f'/proc/self/fd/{each}') for each in range(20) if"
        " os.path.exists(f'/proc/self/fd/{each}')]\n"
        "assert any(each.startswith('/') and 'memfd' not in each for each in kinds)"
    ),
    "the file of the tests": (
        "texts = b''\nfor file in range(3, 30):\n  try: texts += os.pread(file, 10**6, 0)\n"
        "  except OSError: pass\nassert b'ends_at_failure' in texts"
    ),
    "other interfaces": "assert any(name != 'lo' for _, name in socket.if_nameindex())",
    "the host of a virtual machine": ("socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)"),
    "the kernel by netlink": "socket.socket(socket.AF_NETLINK)",
    "any folder but two": (
        "open_folders = {top for top, inner, _ in os.walk('/') if os.access(top, os.W_OK) and"
        " not top.startswith('/proc')}\nassert open_folders != {'/tmp', '/dev/shm'}"
    ),
    "devices": "os.mknod('/tmp/disk', 0o060600, os.makedev(8, 0))",
    "settings of the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "more files than fit": (
        "for number in range(8): open(f'/tmp/{number}', 'wb').write(bytes(2**24))"
    ),
    "more memory": "x = bytearray(2**30)",
    "another user": "os.setuid(0)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))",
}


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
        "import platform\nassert platform.machine() == 'x86_64'\n"
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
OWN = INSIDE | FIRST_PROCESS | THE_KERNEL | MORE_THAN_ITS_SHARE


@pytest.mark.parametrize("name", OWN)
def test_a_program_has_nothing_but_what_is_its_own(name, outside, sandboxed):
    assert sandboxed("", f"{IMPORTS}{OWN[name]}\nwon = True", tests=WON) == 0.0


TRY_ALL = "import os\nfor number in range(10**9):\n  name = '/tmp/' + 'x' * 200 + str(number)\n  "
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


CLAIMING = {
    "exits with 0": "os._exit(0)",
    "exits": "raise SystemExit(0)",
    "exits from a thread": "threading.Thread(target=os._exit, args=(0,)).start()",
    "exits at the end": "atexit.register(os._exit, 0)\nraise SystemExit",
    "prints words": "print('passed\\nended 0 0.000\\nOK\\n1.0', flush=True)",
    "becomes another program": "os.execv('/usr/bin/true', ['true'])",
    "closes all": "os.closerange(0, 100)",
    "ends the link": (
        "for file in range(3, 20):\n  try: socket.socket(fileno=file).shutdown(socket.SHUT_RDWR)\n"
        "  except OSError: pass\nos._exit(0)"
    ),
    "writes on the link": (
        "for file in range(3, 20):\n"
        '  try: os.write(file, b\'["passed", 0]\\n["ended", 0, ""]\\n\')\n  except OSError: pass\n'
    ),
    "floods the link": (
        "for file in range(3, 20):\n  try:\n"
        "    for _ in range(50_000): os.write(file, b'[\"passed\", 0]\\n')\n  except OSError: pass\n"
    ),
    "replaces functions": (
        "builtins.exec = builtins.compile = lambda *_, **__: None\n"
        "os.read = os.pread = os.write = lambda *_: b''\nsys.exc_info = lambda: None"
    ),
    "replaces the error": "builtins.AssertionError = None",
    "dies": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "ctypes.string_at(0)",
    "exits with the status of a kill": "os._exit(137)",
    "is too deep": (
        "sys.setrecursionlimit(10**9)\nclass A:\n  def __repr__(self): return repr(self)\nrepr(A())"
    ),
    "cannot be read": "-" * 100_000 + "1",
    "has a zero": "x = '\0'",
}


@pytest.mark.parametrize("name", CLAIMING)
def test_no_success_is_claimed_and_what_a_program_does_is_no_error(name, sandboxed):
    program = IMPORTS + CLAIMING[name]
    assert sandboxed("", program, tests="assert 1 == 2") == 0.0
    assert sandboxed("", program, tests=[{"input": "", "output": "42"}]) == 0.0


ON_PURPOSE = {
    "sends it all signals": "[os.kill(1, number) for number in range(1, 65) if number not in (32, 33)]",
    "lets it start no other": "resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))",
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
    program = f"{IMPORTS}print(input(), flush=True)\ntry: {ON_PURPOSE[name]}\nexcept OSError: pass"
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


LYING = (
    "class A:\n  def __eq__(self, other): return True\n  __lt__ = __gt__ = __contains__ = __eq__\n"
    "  def __sub__(self, other): return 0.0\n  def __iter__(self): return iter([])\n"
    "def f(*_): return A()"
)
CHEATING = {
    "math.isclose": (
        "import math\nmath.isclose = lambda *_, **__: True",
        "math.isclose(f(1), 2.5)",
    ),
    "its own math": ("class math:\n  isclose = lambda *_, **__: True", "math.isclose(f(1), 2.5)"),
    "builtins.abs": ("import builtins\nbuiltins.abs = lambda _: 0", "abs(f(1) - 2.5) < 1e-6"),
    "its own abs": ("def abs(_): return 0", "abs(f(1) - 2.5) < 1e-6"),
    "builtins.all": (
        "import builtins\nbuiltins.all = lambda _: True",
        "all(f(x) == x for x in (1, 2))",
    ),
    "builtins.sorted": (
        "import builtins\nbuiltins.sorted = lambda _: 1",
        "sorted([f(1)]) == sorted([2])",
    ),
    "builtins.set": ("import builtins\nbuiltins.set = lambda _: 1", "set([f(1)]) == set([2])"),
    "a module in the folder": (
        "open('fractions.py', 'w').write('def Fraction(*_): return 0')",
        "f(1) == fractions.Fraction(1, 2)",
    ),
    "its caller's constants": (
        "import sys\ndef f(_):\n  frame = sys._getframe(1)\n  while frame:\n"
        "    if 42 in frame.f_code.co_consts: return 42\n    frame = frame.f_back\n",
        "f(1) == 42",
    ),
    "equal to all": (LYING, "f(1) == 2.5"),
    "no difference": (LYING, "abs(f(1) - 2.5) < 1e-6"),
    "less and more": (LYING, "f(1) < 2.5 and f(1) > 2.4"),
    "contains all": (LYING, "2.5 in f(1)"),
    "its callback's globals": (
        "def f(g):\n  for name in '__globals__', '__code__', '__closure__':\n"
        "    try:\n      getattr(g, name)\n      return 42\n    except TypeError: pass\n",
        "f(lambda: 0) == 42",
    ),
    "any function of the tests' process": (
        "def f(g):\n  for ask in ('eval', '1'), ('getattr', '{0.__globals__}', 'format'),"
        " ('setattr', g, '__code__', 1):\n"
        "    try:\n      g._peer.ask(*ask)\n      return 42\n    except TypeError: pass\n",
        "f(lambda: 0) == 42",
    ),
    "the memory of the tests": (
        "import os\ndef f(_):\n  for pid in {*filter(str.isdigit, os.listdir('/proc'))} - {str(os.getpid())}:\n"
        "    for name in 'mem', 'environ', 'fd/3', 'fd/4':\n      try:\n"
        "        open(f'/proc/{pid}/{name}', 'rb')\n        return 42\n      except OSError: pass\n",
        "f(1) == 42",
    ),
}


@pytest.mark.parametrize("name", CHEATING)
def test_a_program_can_change_nothing_that_its_tests_compare_with(name, sandboxed):
    program, test = CHEATING[name]
    if "def f" not in program:
        program += "\ndef f(x): return 0"
    assert sandboxed("", program, tests=f"assert {test}") == 0.0


def test_unittest_is_the_tests_own(sandboxed):
    tests = "import unittest\nclass T(unittest.TestCase):\n  def test_it(self): self.assertEqual(f(1), 2)"
    program = "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef f(x): return "
    assert sandboxed("", program + "0", tests=tests) == 0.0
    assert sandboxed("", program + "2", tests=tests) == 1.0


HARMLESS = {
    "kills process 1": "os.kill(1, signal.SIGKILL)",
    "kills all": "if os.fork() == 0: time.sleep(60)\nos.kill(-1, signal.SIGKILL)",
    "leaves a daemon": (
        f"if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    {CALL_ME}"
        "    time.sleep(600)\n  os._exit(0)\n"
    ),
    "leaves files": f"for folder in '/tmp', '/dev/shm': open(f'{{folder}}/{MARK}', 'w')",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_other_processes_and_later_runs_do_not_notice(name, sandboxed):
    program = IMPORTS + HARMLESS[name]
    found = sandboxed("", f"{program}\ndef f(): return 1", tests="assert f() == 1")
    assert found == float(name != "kills all")  # its own tests are among them
    pairs = [{"input": "a", "output": "a"}, {"input": "b", "output": "b"}]
    assert sandboxed("", f"{program}\nprint(input())", tests=pairs) == 1.0
    assert not Path("/tmp", MARK).exists() and not Path("/dev/shm", MARK).exists()
    wait_for_none(named, 30.0, "a daemon")


def test_a_run_sees_no_process_of_the_one_before(sandboxed):
    program = (
        "import os, time\nprint(sum(each.isdigit() for each in os.listdir('/proc')), flush=True)\n"
        "if os.fork() == 0: time.sleep(60)"
    )
    pair = {"input": "", "output": "2"}
    assert sandboxed("", program, tests=[pair, pair, pair]) == 1.0


FORK_BOMB = (
    f"import os, time\n{CALL_ME}while True:\n  try: os.fork()\n  except OSError: time.sleep(600)"
)
IN_VAIN = (
    "import ctypes, signal, time\n"
    "ctypes.CDLL(None).prctl(1, 0)\n"  # it would outlive the process that started it
    "for number in range(1, 32):\n"
    "  try: signal.signal(number, signal.SIG_IGN)\n"
    "  except OSError: pass\n"
    f"{CALL_ME}time.sleep(600)"
)


@pytest.mark.parametrize("program", [FORK_BOMB, IN_VAIN], ids=["fork bomb", "waits"])
def test_nothing_is_left_of_a_program_that_does_not_end(program):
    judge = Code(fenced=False, timeout_s=2.0, cpu_s=1)
    assert judge("", program, tests=WON) == 0.0
    wait_for_none(named, 30.0, "the program")


def test_nothing_is_left_of_a_sandbox_whose_worker_is_killed():
    script = f"from lrl.rewards import Code\nCode(fenced=False, timeout_s=600)('', {IN_VAIN!r}, tests='assert f()')"
    assert not named()
    worker = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        wait_for(named, 60.0, "the program")
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_for_none(named, 30.0, "the program")


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


HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
CONDITIONAL = ["clone", "clone3", "prctl", "prlimit64", "socket", "socketpair"]


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_of_both_machines_has_the_numbers_of_the_kernels_headers(machine):
    """The instructions around them are the same, and the kernel of this machine runs them above."""
    if not (header := Path(HEADERS[machine])).exists():
        pytest.skip("the kernel's headers are not installed")
    numbers = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text()))
    column = list(ARCHITECTURES).index(machine)
    found = {name: columns[column] for name, *columns in DENIED}
    assert found == found | {name: numbers[name] for name in found.keys() & numbers}
    operands = [operand for *_, operand in struct.iter_unpack("=HBBI", seccomp_filter(machine))]
    assert {ARCHITECTURES[machine], *(int(numbers[name]) for name in CONDITIONAL)} <= {*operands}


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
