"""The requirements of a run for its joining members."""

from dataclasses import dataclass, field
from typing import Any

from lrl.generators.settings import ServerSettings
from lrl.system.endpoint import is_loopback, own_address_towards
from lrl.system.process_identity import ProcessIdentity


@dataclass(frozen=True)
class JoinSpec:
    """Requirements of a member that joins the run; travels as JSON."""

    model: str
    """Folder or hub name."""
    settings: dict[str, Any]
    """The fields of `ServerSettings`."""
    transport: str
    """One of `lrl.weights.TRANSPORTS`."""
    run_id: str
    on_cpu: bool
    generators: int
    """Number of generators that the run started; joining ones are numbered from there."""
    seed: int = 0
    """The run's (`lrl.generators.seeds.run_seed`)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that all ends of a transfer must have alike (`Transport.common_environment`)."""
    serves_model: bool = False
    """Whether `model` is a folder, whose files the run gives to other machines."""
    owner: ProcessIdentity = field(default_factory=ProcessIdentity)
    """The run's process."""

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # from JSON
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))

    def settings_here(self, overrides: dict[str, Any], url: str) -> ServerSettings:
        """Returns the run's settings, with this machine's address and TLS.

        A member on another machine than the run's listens on the address by which the run is
        reached, unless `overrides` says where.

        Args:
            overrides: The fields of `Endpoint` that were given for this machine.
            url: The run's.

        Raises:
            ValueError: They cannot work.
        """
        if self.owner.here:
            return ServerSettings(**self.settings | overrides)
        endpoint = {"host": overrides.get("host") or own_address_towards(url)} | overrides
        if is_loopback(host := endpoint["host"]) or host in ("0.0.0.0", "::"):
            raise ValueError(
                f"--host {host}: the run is on another machine. Give the address by which it "
                "reaches this one, with --tls_cert and --tls_key, or --insecure if nobody else is "
                "on that network."
            )
        return ServerSettings(**self.settings | endpoint)
