"""Members on the nodes of a Ray cluster."""

import json
import shlex
from importlib.util import find_spec

from lrl.errors import ConfigError
from lrl.members.launchers.base import Command, Launcher
from lrl.system.config_errors import above

GRACE_S = 10.0
"""Seconds that a member has to leave when its node is lost: it may be the last one, which stays."""


class Ray(Command):
    """Starts each job by `lrl ray`, as an actor of a Ray cluster.

    Needs `pip install lrl[ray]`, here and on each node.

    Args:
        jobs: How many.
        address: The cluster's, `host:port`; `auto` for the one that RAY_ADDRESS names or this
            machine belongs to.
        cpus: CPU cores of each, as Ray counts them; workers have a process for each. The GPUs of a
            generator are `server.tensor_parallel_size`, none on a CPU.
        resources: Ray's custom resources of each, such as `{"h100": 1}`.

    Raises:
        ConfigError: There are no jobs, or a number is not above 0.
    """

    def __init__(
        self,
        jobs: int,
        address: str = "auto",
        cpus: float = 1.0,
        resources: dict[str, float] | None = None,
    ) -> None:
        super().__init__(jobs, "lrl ray {join}")
        above(0, "Ray", cpus=cpus)
        self.address = address
        self.cpus = cpus
        self.resources = resources or {}
        self.cores = max(1, int(cpus))

    def prepare(self, gpus: int, setting: str = Launcher.setting) -> None:
        """See `Launcher.prepare`."""
        super().prepare(gpus, setting)
        if find_spec("ray") is None:
            raise ConfigError(
                f"{setting} is Ray, and the package ray is not installed: pip install lrl[ray]."
            )

    def line(self) -> str:
        """See `Command.line`."""
        asked = {
            "--gpus": str(self.gpus),
            "--cpus": str(self.cpus),
            "--resources": json.dumps(self.resources),
            "--address": self.address,
            "--grace_s": str(GRACE_S),
        }
        options = shlex.join(word for option in asked.items() for word in option)
        return f"lrl ray {options} {{join}}"
