"""Machines that vanish, as two network namespaces whose cable is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """The names of two connected namespaces; the first has the address 10.213.0.1."""
    if not shutil.which("ip"):
        pytest.skip("there is no command ip (iproute2)")
    mark = uuid.uuid4().hex[:6]
    names = [f"lrl-{mark}-{number}" for number in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        ip("link", "add", f"v{mark}0", "netns", names[0], "type", "veth", "peer", f"v{mark}1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.213.0.{number + 1}/24", "dev", f"v{mark}{number}")
            ip("-n", name, "link", "set", f"v{mark}{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [*names, f"v{mark}0"]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_both_ranks_notice_that_the_network_between_their_machines_is_gone(machines: list[str]) -> None:
    first, second, cable = machines
    ranks = []
    for number, name in enumerate((first, second)):
        words = [sys.executable, "-m", "tests.runtime.rank_of_a_machine", str(number), "4", "tcp://10.213.0.1:29500"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": f"{cable[:-1]}{number}"}
        how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(["ip", "netns", "exec", name, *words], **how))
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["waits\n", "waits\n"]
        ip("-n", first, "link", "set", cable, "down")
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert said[0].startswith("Another rank does not take part") and said[1].startswith("Rank 0 does not take part")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
