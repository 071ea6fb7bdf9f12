"""All members of a run, from the opened registry to the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.errors import ServerError
from lrl.generators.fleet import Fleet
from lrl.generators.settings import ServerSettings
from lrl.members.admission import GeneratorAdmission, WorkerAdmission, poll_forever
from lrl.members.launchers import Launcher
from lrl.members.registry import JoinSpec, Kind, Registry
from lrl.members.run_file import remove_run_file, write_run_file
from lrl.members.service import RegistryServer
from lrl.system.best_effort import best_effort
from lrl.system.endpoint import is_loopback
from lrl.workers.pool import Members

if TYPE_CHECKING:
    from lrl.members.launched import LaunchedMembers

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Jobs of each slot that may fail before a run gives up at its start."""
POLL_S = 0.1


@dataclass
class RunMembers:
    """Lets members join a run, from `open` to `close`."""

    fleet: Fleet
    workers: Members | None
    """Members with workers; None if the run takes none."""
    launchers: dict[Kind, Launcher]
    """What starts members of a kind; without one they come by themselves."""
    settings: ServerSettings
    folder: Path
    server: RegistryServer | None = field(default=None, init=False)
    """Where they join; None before `open`."""
    launched: dict[Kind, LaunchedMembers] = field(default_factory=dict, init=False)

    @property
    def registry(self) -> Registry:
        """The members; from `open` on."""
        assert self.server is not None, "opened before"
        return self.server.registry

    def open(self, spec: JoinSpec, token: str, port: int) -> RegistryServer:
        """Opens the registry at `port` (0 for a free one), and admits the members without weights.

        Raises:
            ConfigError: The port is taken.
        """
        workers = self.workers
        terms = {} if workers is None else {Kind.WORKER: workers.terms}
        self.server = server = RegistryServer(
            Registry(spec), self.settings.endpoint, token=token, port=port, terms=terms
        )
        with best_effort("The address for joining members", self.folder):
            write_run_file(self.folder, server)
        for kind in (Kind.GENERATOR, *terms):
            launcher = self.launchers.get(kind)
            by_others = launcher is not None and not launcher.starts
            if by_others or not is_loopback(self.settings.host):
                rank_zero_info(
                    f"Other {kind}s join by: lrl join {server.elsewhere.url} --kind {kind}"
                )
        if workers is not None:
            admission = WorkerAdmission(workers, server.registry, token)
            self.fleet.run_in_background(poll_forever(admission.poll))
            self._launch(Kind.WORKER, server)
        return server

    def admit(self, of_nodes: int, interrupted: Callable[[], None]) -> None:
        """Admits generators from now on, and waits for the requested members.

        Args:
            of_nodes: Generators that the nodes of other ranks start.
            interrupted: Called at every look; raises to end the wait.

        Raises:
            ServerError: None of a launcher's has joined within `server.start_timeout_s`.
        """
        assert self.server is not None, "opened before"
        admission = GeneratorAdmission(
            self.fleet,
            self.registry,
            token=self.server.token,
            settings=self.settings,
            folder=self.folder,
        )
        self.fleet.run_in_background(poll_forever(admission.poll))
        self._launch(Kind.GENERATOR, self.server)
        if of_nodes:
            self.wait_joined(Kind.GENERATOR, of_nodes, interrupted)
        for kind, launched in self.launched.items():
            rank_zero_info(
                f"Waiting until {launched.launcher.jobs} {kind}(s) of "
                f"{type(launched.launcher).__name__} have joined at {self.server.elsewhere.url}."
            )
            self.wait_joined(kind, launched.launcher.jobs, interrupted)

    def wait_joined(self, kind: Kind, wanted: int, interrupted: Callable[[], None]) -> None:
        """Waits until so many members have joined, for `server.start_timeout_s` at most; calls
        `interrupted`, which may raise, at every look.

        Raises:
            ServerError: A launcher was to start them, and none has joined by then, or each job has
                failed several times.
        """
        deadline_s = self.settings.start_timeout_s
        end = time.monotonic() + deadline_s
        while (joined := len(self.registry.joined(kind))) < wanted:
            interrupted()
            self.raise_if_all_failed()
            if time.monotonic() > end:
                if not joined and kind in self.launched:
                    raise self._no_member_error(
                        kind, f"within server.start_timeout_s={deadline_s:g}"
                    )
                log.warning(
                    "Only %d of %d %ss have joined within server.start_timeout_s=%g; the run "
                    "begins. Their output says why.",
                    *(joined, wanted, kind, deadline_s),
                )
                return
            time.sleep(POLL_S)

    def raise_if_all_failed(self) -> None:
        """Raises ServerError if all jobs of a launcher have failed several times, and none
        serves."""
        for kind, launched in self.launched.items():
            if launched.fewest_failures >= ATTEMPTS and not self.registry.joined(kind):
                raise self._no_member_error(kind, f"in {ATTEMPTS} attempts")

    def close(self) -> None:
        """Announces the end of the run, ends the launchers' jobs, and closes the registry."""
        if self.server is not None:
            if self.workers is not None:
                self.workers.close()
            self.registry.end()
            for launched in self.launched.values():
                launched.stop()
            self.server.close()
            with best_effort("The end of the run", self.folder):
                remove_run_file(self.folder)
        for launcher in self.launchers.values():
            launcher.close()

    def _launch(self, kind: Kind, server: RegistryServer) -> None:
        if (launcher := self.launchers.get(kind)) is None:
            return
        # Here: most runs have no launcher.
        from lrl.members.launched import LaunchedMembers

        self.launched[kind] = LaunchedMembers(
            launcher,
            kind,
            server.registry,
            location=server.elsewhere,
            token=server.token,
            folder=self.folder,
        )
        self.launched[kind].start()

    def _no_member_error(self, kind: Kind, when: str) -> ServerError:
        launched = self.launched[kind]
        words = self.registry.refusal(kind) or launched.last_words
        cause = f" The last one ended with:\n{words}" if words else ""
        launcher = f"{launched.launcher.setting} {type(launched.launcher).__name__}"
        return ServerError(f"{launcher}: no {kind} has joined {when}.{cause}")
