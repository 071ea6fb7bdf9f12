"""The members of a run: generators and reward hosts that other processes start, for the run or by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.generators.endpoint import is_loopback
from lrl.generators.fleet import Fleet
from lrl.generators.launchers import Launcher
from lrl.generators.settings import ServerSettings
from lrl.membership.admission import admit_others
from lrl.membership.keeper import Keeper
from lrl.membership.node_generators import wait_joined
from lrl.membership.registry import JoinSpec, Registry
from lrl.membership.reward_hosts import RewardHosts
from lrl.membership.run_file import remove_run_file, url_elsewhere, write_run_file
from lrl.membership.service import RegistryServer
from lrl.runtime.best_effort import best_effort


class Members:
    """Has others join a run, from `open` to `close`.

    Args:
        fleet: Where generators go.
        hosts: The reward hosts.
        launcher: What starts generators; None if nothing does.
        settings: Those of all generators.
        folder: The run's.
    """

    def __init__(
        self, fleet: Fleet, hosts: RewardHosts, launcher: Launcher | None, settings: ServerSettings, folder: Path
    ) -> None:
        self.fleet, self.hosts, self.launcher = fleet, hosts, launcher
        self.settings, self.folder = settings, folder
        self.server: RegistryServer | None = None
        """Where they join; None before `open`."""
        self._keeper: Keeper | None = None

    def open(self, spec: JoinSpec, token: str, port: int) -> RegistryServer:
        """Opens the registry and has reward hosts start.

        Args:
            spec: What generators must share with the run's own.
            token: The run's.
            port: Of `settings.host`; 0 for a free one.

        Raises:
            ConfigError: The port is taken.
        """
        self.server = server = RegistryServer(
            Registry(spec), self.settings.endpoint, token, port, more=self.hosts.routes
        )
        with best_effort("The address for joining generators", self.folder):
            write_run_file(self.folder, server)
        if not is_loopback(self.settings.host) or (self.launcher is not None and not self.launcher.starts):
            rank_zero_info(f"Other generators join by: lrl serve --join {url_elsewhere(server)}")
        self.hosts.launch(server, self.fleet, self.folder)
        return server

    def admit(self, devices: Sequence[int], of_nodes: int, interrupted: Callable[[], None]) -> None:
        """Admits whoever joins from now on, and waits for the generators that the run has asked for.

        Args:
            devices: CUDA indices of each generator of the launcher among those that it sees; empty on a CPU.
            of_nodes: Generators that the nodes of other ranks start.
            interrupted: Called at every look; raises to end the wait.

        Raises:
            ServerError: None of the launcher's has joined within `server.start_timeout_s`.
        """
        server, deadline_s = self.server, self.settings.start_timeout_s
        assert server is not None, "opened before"
        admit_others(self.fleet, server.registry, server.token, self.settings, self.folder)
        if self.launcher is not None:
            self._launch(self.launcher, server, devices, interrupted)
        if of_nodes:
            wait_joined(self.fleet, of_nodes, deadline_s, interrupted)
        self.hosts.wait_joined(deadline_s, interrupted)

    def _launch(
        self, launcher: Launcher, server: RegistryServer, devices: Sequence[int], interrupted: Callable[[], None]
    ) -> None:
        keeper = self._keeper = Keeper.of_run(launcher, server, devices, self.folder)
        self.fleet.run_in_background(keeper.keep_forever())
        where, kind = url_elsewhere(server), type(launcher).__name__
        rank_zero_info(f"Waiting until {launcher.jobs} generator(s) of {kind} have joined at {where}.")
        pool = self.fleet.rollouts
        keeper.wait_joined(lambda: len(pool.pending), self.settings.start_timeout_s, interrupted)

    def close(self) -> None:
        """Tells all that the run is over, ends the launchers' jobs that do not end by themselves, and closes the
        registry."""
        if self.server is None:
            return
        self.hosts.end()
        self.server.registry.end()
        for jobs in (self._keeper, self.hosts):
            if jobs is not None:
                jobs.stop()
        self.server.close()
        with best_effort("The end of the run", self.folder):
            remove_run_file(self.folder)
