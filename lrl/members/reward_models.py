"""The servers of reward models that a run starts itself, on this machine."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.generators.pooling_server import PoolingServer
from lrl.generators.settings import ServerSettings
from lrl.rewards import Reward
from lrl.rewards.reward_model import RewardModel, RewardModelServer

log = logging.getLogger(__name__)


class RewardModels:
    """The servers; rewards of the same model and settings share one.

    Args:
        folder: The run's folder, for their logs.
        interrupted: Called while one starts; raises to end the wait.
    """

    def __init__(self, folder: Path, interrupted: Callable[[], None]) -> None:
        self.folder = folder
        self.servers: dict[tuple[str, RewardModelServer], PoolingServer] = {}
        self._interrupted = interrupted

    def serve(self, rewards: Iterable[Reward]) -> None:
        """Starts the servers that these rewards need and that do not run yet, and tells each reward
        where its own is.

        Raises:
            ServerError: A server has not started.
        """
        for reward in rewards:
            if isinstance(reward, RewardModel) and reward.model is not None:
                server = self._server(reward.model, reward.server)
                reward.serve_at(server.url, server.token)

    def close(self) -> None:
        """Stops the servers. May be called twice."""
        servers, self.servers = self.servers, {}
        for server in servers.values():
            server.close()

    def _server(self, model: str, settings: RewardModelServer) -> PoolingServer:
        key = (model, settings)
        if key not in self.servers:
            devices = [] if settings.device is None else [settings.device]
            server = PoolingServer(
                model,
                _of_vllm(settings),
                devices=devices,
                folder=self.folder,
                name=f"reward model {len(self.servers)}",
            )
            self.servers[key] = server
            rank_zero_info(f"Starting the server of the reward model {model}.")
            server.open(self._interrupted)
        return self.servers[key]


def _of_vllm(settings: RewardModelServer) -> ServerSettings:
    return ServerSettings(
        max_model_len=settings.max_tokens,
        dtype=settings.dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_gib=settings.kv_cache_gib,
        start_timeout_s=settings.start_timeout_s,
    )
