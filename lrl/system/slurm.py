"""A job of SLURM: what it is over all its starts, and its next one."""

import logging
import os
import subprocess
import sys
import zlib
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment

log = logging.getLogger(__name__)


def job() -> str:
    """Returns the job's id, which it keeps when it is requeued; empty outside of SLURM."""
    if task := os.environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def run_of_job() -> str:
    """Returns what the starts of one command in one job have in common, and no other run has."""
    return f"{job()}-{zlib.crc32(repr(sys.argv).encode()):08x}"


def requeued() -> bool:
    """Whether SLURM has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def requeue_signal(trainer: Any) -> int | None:
    """Returns the signal at which the run ends and asks for its requeue; None if at none."""
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def requeue() -> None:
    """Has SLURM start this job again; logs why it does not."""
    words = ["scontrol", "requeue", job()]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=60.0)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        log.error("SLURM does not requeue job %s: %s", job(), str(why).strip())
