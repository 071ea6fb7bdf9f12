"""Machines that vanish, as two network namespaces whose cable is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.network_namespace import two_machines

ROOT = Path(__file__).parents[2]


def test_both_ranks_notice_that_the_network_between_their_machines_is_gone() -> None:
    with two_machines() as machines:
        ranks = []
        for number, one in enumerate(machines):
            words = [
                sys.executable,
                "-m",
                "tests.distributed.rank_of_a_machine",
                str(number),
                "4",
                "tcp://10.213.0.1:29500",
            ]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": one.cable}
            how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
            ranks.append(subprocess.Popen(["ip", "netns", "exec", one.name, *words], **how))
        try:
            assert [rank.stdout.readline() for rank in ranks] == ["waits\n", "waits\n"]
            machines[0].cut()
            first, second = (rank.communicate(timeout=300)[0] for rank in ranks)
            assert first.startswith("Another rank has ended or cannot be reached")
            assert second.startswith("Rank 0 has ended or cannot be reached")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
