"""The reward hosts of a run: the jobs of `data.reward_launcher`, and the way that others join, with or without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.generators.endpoint import is_loopback
from lrl.generators.fleet import Fleet
from lrl.generators.launchers import Launcher
from lrl.membership.keeper import REWARD_HOSTS, Keeper, environment_of
from lrl.membership.registry import MemberStatus
from lrl.membership.run_file import url_elsewhere
from lrl.membership.service import RegistryServer
from lrl.rewards.host_route import route_of
from lrl.rewards.hosts import Hosts

if TYPE_CHECKING:
    import lightning as L


class RewardHosts:
    """The reward hosts of a run, as its strategy starts and ends them.

    Args:
        hosts: Those of the reward pool.
        launcher: What starts them; None if nothing does.
        heartbeat_s: Seconds between two pings of a host.
    """

    def __init__(self, hosts: Hosts, launcher: Launcher | None, heartbeat_s: float) -> None:
        self.hosts, self.launcher = hosts, launcher
        self.routes: Sequence[web.RouteDef] = [route_of(hosts)]
        """What rank 0's server must answer."""
        hosts.heartbeat_s = heartbeat_s
        self._keeper: Keeper | None = None

    @classmethod
    def of_run(cls, trainer: L.Trainer, heartbeat_s: float) -> RewardHosts:
        """Returns the hosts of a run. None may join one that does not train: rank 0 scores its evaluations."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        trains = trainer.state.fn == "fit"
        made = cls(data.reward_pool.hosts, data.reward_launcher if trains else None, heartbeat_s)
        made.routes = made.routes if trains else ()
        return made

    def claim(self) -> int:
        """See `lrl.membership.keeper.Roll`."""
        return self.hosts.claim()

    def status(self, number: int) -> MemberStatus | None:
        """See `lrl.membership.keeper.Roll`."""
        status = self.hosts.status(number)
        return status and MemberStatus(status.state, why=status.why)

    @property
    def refusal(self) -> str:
        """See `lrl.membership.keeper.Roll`."""
        return self.hosts.refusal

    def launch(self, server: RegistryServer, fleet: Fleet, folder: Path) -> None:
        """Has the launcher start its hosts, if there is one; they are watched on the loop of `fleet`."""
        words = ["score", "--join", url_elsewhere(server)]
        for_others = not is_loopback(server.endpoint.host) or (self.launcher is not None and not self.launcher.starts)
        if self.routes and for_others:
            rank_zero_info(f"Reward hosts join by: lrl {' '.join(words)}")
        if self.launcher is None:
            return
        words += [] if self.launcher.cores is None else ["--workers", str(self.launcher.cores)]
        self._keeper = Keeper(self.launcher, self, words, environment_of(server), folder, REWARD_HOSTS)
        fleet.run_in_background(self._keeper.keep_forever())

    def raise_if_in_vain(self) -> None:
        """Raises ServerError if the launcher's hosts have failed again and again, and none has joined."""
        if self._keeper is not None and not self.hosts.ready:
            self._keeper.raise_if_in_vain()

    def wait_joined(self, deadline_s: float, interrupted: Callable[[], None]) -> None:
        """Waits until the launcher's hosts have joined; see `Keeper.wait_joined`."""
        if self._keeper is None:
            return
        kind = type(self._keeper.launcher).__name__
        rank_zero_info(f"Waiting until {self._keeper.launcher.jobs} reward host(s) of {kind} have joined.")
        self._keeper.wait_joined(lambda: len(self.hosts.ready), deadline_s, interrupted)

    def end(self) -> None:
        """Tells all hosts that the run is over."""
        self.hosts.end()

    def stop(self) -> None:
        """Ends the jobs that do not end by themselves."""
        if self._keeper is not None:
            self._keeper.stop()
        if self.launcher is not None:
            self.launcher.close()
