"""The generators of a trainer node that rank 0 is not on: its own processes, which join as those of other machines do.

Rank 0 syncs, watches and evicts them. This side sees to it that one runs on each of the node's generator devices: one
that ends is started again, unless it was asked to leave or the run has ended.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lrl.generators.fleet import Fleet
from lrl.membership.keeper import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, OWN_END_S
from lrl.membership.run_file import CERTIFICATE_VARIABLE, TOKEN_VARIABLE, url_elsewhere
from lrl.membership.service import RegistryServer
from lrl.runtime.parent_death import bound_to_this_process

log = logging.getLogger(__name__)

POLL_S = 0.2
END_S = 20.0
"""Seconds to end after each signal."""


class RunAddress(NamedTuple):
    """The URL, token and certificate by which a node joins a run."""

    url: str
    token: str
    certificate: str

    @classmethod
    def of(cls, server: RegistryServer) -> RunAddress:
        """Returns that of a run's registry."""
        return cls(url_elsewhere(server), server.token, server.location().certificate)


class NodeGenerators:
    """Keeps one generator running on each group of devices of this node, from `start` to `stop`.

    Args:
        run: Where they join.
        devices: CUDA indices of each; empty for one on a CPU.
    """

    def __init__(self, run: RunAddress, devices: Sequence[Sequence[int]]) -> None:
        self._places = [_Place(run, each) for each in devices]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lrl-node-generators", daemon=True)

    def start(self) -> None:
        """Starts them, without waiting until they have joined."""
        self._thread.start()

    def stop(self) -> None:
        """Ends them and waits for their end, at most for a minute; idempotent. The run has told them that it is over,
        or is gone."""
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:  # the processes end with the thread that has started them
        while not self._over.wait(POLL_S):
            for place in self._places:
                place.look_after()
        end = time.monotonic() + OWN_END_S
        while any(place.alive for place in self._places) and time.monotonic() < end:
            time.sleep(POLL_S)
        for signal in ("terminate", "terminate", "kill"):  # the second signal ends it without asking the run
            running = [place for place in self._places if place.alive]
            for place in running:
                place.signal(signal)
            end = time.monotonic() + END_S
            while any(place.alive for place in running) and time.monotonic() < end:
                time.sleep(POLL_S)


class _Place:
    """The devices of one generator."""

    def __init__(self, run: RunAddress, devices: Sequence[int]) -> None:
        self.run, self.devices = run, devices
        self._process: subprocess.Popen[bytes] | None = None
        self._failures, self._start_at, self._started_at = 0, 0.0, 0.0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, how: str) -> None:
        assert self._process is not None, "it is alive"
        getattr(self._process, how)()

    def look_after(self) -> None:
        """Starts the process, again if it has failed; status 0 is that of one that has left, or whose run is over."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._start_at:
                self._start()
        elif status := self._process.poll():
            self._failures = 0 if now - self._started_at > LONGEST_BACKOFF_S else self._failures
            pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**self._failures)
            log.warning("A generator of this node has ended (status %d); it is started again in %g s.", status, pause_s)
            self._process, self._failures, self._start_at = None, self._failures + 1, now + pause_s

    def _start(self) -> None:
        words = [str(Path(sys.executable).with_name("lrl")), "serve", "--join", self.run.url]
        words += ["--devices", ",".join(map(str, self.devices))] if self.devices else []
        own = {TOKEN_VARIABLE: self.run.token, CERTIFICATE_VARIABLE: self.run.certificate}
        self._process = subprocess.Popen(
            bound_to_this_process(words),
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        self._started_at = time.monotonic()


def wait_joined(fleet: Fleet, generators: int, deadline_s: float, interrupted: Callable[[], None]) -> None:
    """Waits until the generators of the other nodes have joined, or says at the deadline how many have not.

    Args:
        fleet: Where they join.
        generators: How many.
        deadline_s: Seconds to wait.
        interrupted: Called at every look; raises to end the wait.
    """
    end = time.monotonic() + deadline_s
    while (joined := len(fleet.rollouts.pending)) < generators:
        interrupted()
        if time.monotonic() > end:
            log.warning(
                "Only %d of %d generators of the other nodes have joined within server.start_timeout_s=%g; the run "
                "begins. Their nodes' output says why.",
                *(joined, generators, deadline_s),
            )
            return
        time.sleep(POLL_S)
