"""The transport that writes files in memory."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from lrl.weights.shared_memory import SharedMemory
from tests.weights.whole_weights import SmallPolicy


@pytest.fixture
def transport() -> Iterator[SharedMemory]:
    with closing(SharedMemory(SmallPolicy(), "run-0")) as made:
        yield made


def stage(transport: Any) -> str:
    """Returns the path that the generators get."""
    transport.policy.step()
    transport.stage()
    sent: list[dict[str, Any]] = []
    transport.send(SimpleNamespace(update=lambda info: sent.append(info(None))))
    return sent[0]["file"]


def test_a_reader_of_the_older_file_reads_all_of_it(transport: Any) -> None:
    with open(stage(transport), "rb") as reader, open(reader.name, "rb") as whole:
        begun, old = reader.read(10), whole.read()
        newer = stage(transport)
        assert begun + reader.read() == old
    assert transport.policy.is_in(load_file(newer), torch.float32)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_only_the_runs_own_user_opens_the_file(transport: Any) -> None:
    path = stage(transport)
    read: Any = partial(subprocess.run, ["cat", path], capture_output=True, timeout=60)
    assert read().stdout == Path(path).read_bytes() != b""
    other = read(user=65534, group=65534, extra_groups=[])
    assert other.stdout == b"" and b"Permission denied" in other.stderr


def test_a_version_is_freed_with_the_next_one_and_at_the_end(transport: Any) -> None:
    def is_held(path: str) -> bool:
        return "run-0" in (os.readlink(path) if os.path.lexists(path) else "")

    first, second = stage(transport), stage(transport)
    assert not is_held(first) and is_held(second)
    transport.close()
    transport.close()
    assert not is_held(second)


def test_without_room_nothing_is_left_and_the_older_version_stays(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, held = Path(stage(transport)), len(os.listdir("/proc/self/fd"))
    content = path.read_bytes()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64))
    with pytest.raises(OSError, match="the weights take .* GiB of memory, and .* are free"):
        stage(transport)
    assert len(os.listdir("/proc/self/fd")) == held
    assert path.read_bytes() == content
