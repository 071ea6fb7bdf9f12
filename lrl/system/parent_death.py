"""A helper process that ends with its owner, however that one ends.

Only the kernel can do that for a helper that runs foreign code: a watching thread cannot run while,
say, a regular expression holds Python's lock.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_bound = threading.Event()
"""Set after `die_with`."""


def die_with(owner: int, by: int = signal.SIGKILL) -> None:
    """Ends this process with the process `owner`, its parent, by that signal.

    It ends with the *thread* that started it: start helpers on one that outlives them.
    """
    _bound.set()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, by) != 0:
        raise OSError(
            ctypes.get_errno(),
            "prctl(PR_SET_PDEATHSIG) failed; a helper process could outlive its run",
        )
    if os.getppid() != owner:  # it died before the line above
        os._exit(1)


def unbind_from_parent() -> None:
    """Undoes `die_with`, for a process with other ways to notice the end of its owner."""
    if not _bound.is_set():  # then whoever started this process has bound it, for good
        return
    _bound.clear()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def bound_to_this_process(words: Sequence[str], by: int = signal.SIGKILL) -> list[str]:
    """Returns a command whose process ends with this one; see `die_with`."""
    begin = (
        "import os, sys; from lrl.system.parent_death import die_with; "
        "die_with(int(sys.argv[1]), int(sys.argv[2])); os.execv(sys.argv[3], sys.argv[3:])"
    )
    return [sys.executable, "-P", "-c", begin, str(os.getpid()), str(int(by)), *words]
