"""A real SLURM cluster: slurmctld is here, its only node `far` in another network namespace."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.leftovers import wait_for
from tests.network_namespace import HERE, THERE, network_namespace

START_S = 120.0
CONFIG = """
ClusterName=lrl
SlurmctldHost={host}({here})
SlurmctldPort={port}
SlurmdPort={other_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=20
# Once, beside other tests, the jobs had no node for 300 s, which is SLURM's own SlurmdTimeout.
MessageTimeout=100
TCPTimeout=20
SlurmdTimeout=60
NodeName=far NodeAddr={there} CPUs={cores} State=UNKNOWN
PartitionName=main Nodes=far Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def slurm_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has srun and scancel of this process find one."""
    programs = ("munged", "slurmctld", "slurmd", "srun")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or os.geteuid():
        packages = "slurmctld, slurmd, slurm-client, munge"
        pytest.skip(f"a SLURM cluster needs root and Debian's {packages}; missing: {missing}")
    with ExitStack() as ends:
        namespace = ends.enter_context(network_namespace())
        folder = Path(
            ends.enter_context(
                tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
            )
        )
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        ports = {"port": 17000 + os.getpid() % 1000, "other_port": 18000 + os.getpid() % 1000}
        places = {"host": socket.gethostname(), "here": HERE, "there": THERE, "folder": folder}
        (folder / "slurm.conf").write_text(CONFIG.format(**ports, **places, cores=os.cpu_count()))
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))

        def start(*words: str) -> None:
            with (folder / f"{Path(words[0]).name}.log").open("wb") as output:
                process = subprocess.Popen(words, stdout=output, stderr=output)
            ends.callback(process.wait, 60)
            ends.callback(process.kill)

        files = {"--key-file": "key", "--socket": "munge.sock", "--pid-file": "munge.pid"}
        files |= {"--log-file": "munge.log", "--seed-file": "munge.seed"}
        words = (word for option, name in files.items() for word in (option, str(folder / name)))
        start("munged", "--foreground", "--force", *words)
        wait_for((folder / "munge.sock").exists, START_S, "munge")
        start("slurmctld", "-D")
        # Not `ip netns exec`, behind which slurmd misses the control groups of /sys; the node's
        # name is its host name.
        as_far = ["unshare", "--uts", "sh", "-c", "hostname far; exec slurmd -D"]
        start("nsenter", f"--net=/run/netns/{namespace}", *as_far)
        wait_for(lambda: "idle" in _output("sinfo", "--noheader"), START_S, "SLURM's node")
        yield
        _output("scancel", "--me")
        wait_for(lambda: not _output("squeue", "--noheader"), START_S, "the end of SLURM's jobs")


def _output(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()
