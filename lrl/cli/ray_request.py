"""The options of `lrl ray`. Without an import of ray, so that its help needs none."""

from dataclasses import dataclass, field

from lrl.system.config_errors import above, at_least


@dataclass(frozen=True)
class RayRequest:
    """The nodes that a run wants from Ray, and how long it waits.

    Args:
        nodes: Nodes; sets trainer.num_nodes.
        gpus: GPUs of each node (trainer.devices; none on a CPU).
        cpus: CPU cores of each, as Ray counts them.
        resources: Ray's own resources of each, such as '{"h100": 1}'.
        address: The cluster's, host:port; auto is the one of this machine.
        wait_s: Longest wait for the nodes, in seconds.
        grace_s: Longest wait for a run that saves and ends, in seconds.

    Raises:
        ConfigError: A number is too small.
    """

    nodes: int
    gpus: int | None = None
    cpus: float = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    address: str = "auto"
    wait_s: float = 1800.0
    grace_s: float = 600.0

    def __post_init__(self) -> None:
        at_least(0, "ray", gpus=self.gpus)
        above(0, "ray", nodes=self.nodes, cpus=self.cpus, wait_s=self.wait_s, grace_s=self.grace_s)
        above(0, "ray.resources", **self.resources)

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of each node."""
        asked = {"CPU": self.cpus, "GPU": float(self.gpus or 0), **self.resources}
        return {name: amount for name, amount in asked.items() if amount}
