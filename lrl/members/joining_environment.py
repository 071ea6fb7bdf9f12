"""An environment that joins a run: its processes on this machine."""

from typing import Any

from lrl.environments.environment_server import EnvironmentServer
from lrl.environments.worker import WorkerSpec
from lrl.members.joining_workers import JoiningWorkers
from lrl.members.member import Kind
from lrl.system.endpoint import Endpoint


class JoiningEnvironment(JoiningWorkers):
    """See `JoiningWorkers`."""

    kind = Kind.ENVIRONMENT
    remedy = (
        "It imports the environment's module by itself: put that on its machine, installed or in "
        "the folder where `lrl join` starts."
    )

    def make_server(self, terms: dict[str, Any], endpoint: Endpoint) -> EnvironmentServer:
        """See `JoiningWorkers.make_server`."""
        return EnvironmentServer(
            WorkerSpec.from_json(terms), self.overrides.workers, endpoint, self.client.token
        )
