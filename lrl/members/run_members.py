"""All members of a run, from the opened registry to the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.errors import ServerError
from lrl.generators.fleet import Fleet
from lrl.generators.settings import ServerSettings
from lrl.members.admission import GeneratorAdmission, poll_forever
from lrl.members.join_spec import JoinSpec
from lrl.members.launchers import Launcher
from lrl.members.member import Kind
from lrl.members.registry import Registry
from lrl.members.run_file import remove_run_file, url_elsewhere, write_run_file
from lrl.members.service import RegistryServer
from lrl.members.worker_admission import WorkerAdmission
from lrl.system.best_effort import best_effort
from lrl.system.endpoint import is_loopback
from lrl.system.remote_workers import RemotePool

if TYPE_CHECKING:
    from lrl.members.launched import LaunchedMembers

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Jobs of each slot that may fail before a run gives up at its start."""
POLL_S = 0.1


@dataclass
class RunMembers:
    """Lets members join a run, from `open` to `close`.

    Args:
        fleet: Where generators go.
        pools: Where the members without weights go, by the kinds that the run takes.
        launchers: What starts members of a kind; without one they come by themselves.
        settings: Those of all generators.
        folder: The run's.
    """

    fleet: Fleet
    pools: Mapping[Kind, RemotePool[Any]]
    launchers: dict[Kind, Launcher]
    settings: ServerSettings
    folder: Path

    def __post_init__(self) -> None:
        self.server: RegistryServer | None = None
        """Where they join; None before `open`."""
        self.launched: dict[Kind, LaunchedMembers] = {}

    def open(self, spec: JoinSpec, token: str, port: int) -> RegistryServer:
        """Opens the registry, and starts the members without weights.

        Args:
            spec: What members must share with the run.
            token: The run's.
            port: Of `settings.host`; 0 for a free one.

        Raises:
            ConfigError: The port is taken.
        """
        terms = {kind: pool.terms for kind, pool in self.pools.items()}
        self.server = server = RegistryServer(
            Registry(spec), self.settings.endpoint, token=token, port=port, terms=terms
        )
        with best_effort("The address for joining members", self.folder):
            write_run_file(self.folder, server)
        for kind in Kind:
            self._say_how_to_join(kind, url_elsewhere(server))
        for kind, pool in self.pools.items():
            admission = WorkerAdmission(kind, pool, server.registry, token)
            self.fleet.run_in_background(poll_forever(admission.poll))
            self._launch(kind)
        return server

    def admit(self, of_nodes: int, interrupted: Callable[[], None]) -> None:
        """Admits generators from now on, and waits for the requested members.

        Args:
            of_nodes: Generators that the nodes of other ranks start.
            interrupted: Called at every look; raises to end the wait.

        Raises:
            ServerError: None of a launcher's has joined within `server.start_timeout_s`.
        """
        server = self.server
        assert server is not None, "opened before"
        admission = GeneratorAdmission(
            self.fleet,
            server.registry,
            token=server.token,
            settings=self.settings,
            folder=self.folder,
        )
        self.fleet.run_in_background(poll_forever(admission.poll))
        self._launch(Kind.GENERATOR)
        if of_nodes:
            self.wait_joined(Kind.GENERATOR, of_nodes, interrupted)
        for kind, launched in self.launched.items():
            name, where = type(launched.launcher).__name__, url_elsewhere(server)
            rank_zero_info(
                f"Waiting until {launched.launcher.jobs} {kind}(s) of {name} have joined at "
                f"{where}."
            )
            self.wait_joined(kind, launched.launcher.jobs, interrupted)

    def wait_joined(self, kind: Kind, wanted: int, interrupted: Callable[[], None]) -> None:
        """Waits until members have joined, for `server.start_timeout_s` at most.

        Args:
            kind: Theirs.
            wanted: How many.
            interrupted: Called at every look; raises to end the wait.

        Raises:
            ServerError: A launcher was to start them, and none has joined by then, or each job has
                failed several times.
        """
        assert self.server is not None, "opened before"
        deadline_s = self.settings.start_timeout_s
        end = time.monotonic() + deadline_s
        while (joined := len(self.server.registry.joined(kind))) < wanted:
            interrupted()
            self.raise_if_all_failed(kind)
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

    def raise_if_all_failed(self, kind: Kind) -> None:
        """Raises ServerError if all jobs of a launcher have failed several times, and none
        serves."""
        assert self.server is not None, "opened before"
        launched = self.launched.get(kind)
        if launched is None or launched.supervisor.fewest_failures < ATTEMPTS:
            return
        if not self.server.registry.joined(kind):
            raise self._no_member_error(kind, f"in {ATTEMPTS} attempts")

    def close(self) -> None:
        """Announces the end of the run, ends the launchers' jobs, and closes the registry."""
        if self.server is not None:
            for pool in self.pools.values():
                pool.close()
            self.server.registry.end()
            for launched in self.launched.values():
                launched.stop()
            self.server.close()
            with best_effort("The end of the run", self.folder):
                remove_run_file(self.folder)
        for launcher in self.launchers.values():
            launcher.close()

    def _say_how_to_join(self, kind: Kind, url: str) -> None:
        launcher = self.launchers.get(kind)
        for_others = not is_loopback(self.settings.host) or (
            launcher is not None and not launcher.starts
        )
        if for_others and (kind.has_weights or kind in self.pools):
            rank_zero_info(f"Other {kind}s join by: lrl join {url} --kind {kind}")

    def _launch(self, kind: Kind) -> None:
        if (launcher := self.launchers.get(kind)) is None:
            return
        # Here: most runs have no launcher.
        from lrl.members.launched import LaunchedMembers, RunAddress

        assert self.server is not None, "opened before"
        self.launched[kind] = LaunchedMembers(
            launcher,
            kind,
            roster=self.server.registry,
            address=RunAddress.of(self.server),
            folder=self.folder,
        )
        self.launched[kind].start()

    def _no_member_error(self, kind: Kind, when: str) -> ServerError:
        assert self.server is not None, "opened before"
        launched = self.launched[kind]
        words = self.server.registry.refusal(kind) or launched.last_words
        cause = f" The last one ended with:\n{words}" if words else ""
        launcher = f"{launched.launcher.setting} {type(launched.launcher).__name__}"
        return ServerError(f"{launcher}: no {kind} has joined {when}.{cause}")
