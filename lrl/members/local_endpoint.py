"""The address at which a member of this machine listens: the run's, or one that the run reaches from its machine."""

from typing import Any

from lrl.generators.endpoint import is_loopback, own_address_towards
from lrl.generators.settings import ServerSettings
from lrl.members.registry import JoinSpec


def settings_here(spec: JoinSpec, own: dict[str, Any], url: str) -> ServerSettings:
    """Returns the run's settings, with this machine's address and TLS; raises ValueError if they cannot work.

    Args:
        spec: The run's requirements.
        own: The fields of `Endpoint` that were given for this machine.
        url: The run's; a member on another machine than the run's listens on the address by which that is reached,
            unless `own` says where.
    """
    if spec.owner.here:
        return ServerSettings(**spec.settings | own)
    endpoint = {"host": own.get("host") or own_address_towards(url)} | own
    if is_loopback(host := endpoint["host"]) or host in ("0.0.0.0", "::"):
        raise ValueError(
            f"--host {host}: the run is on another machine. Give the address by which it reaches this one, with "
            "--tls_cert and --tls_key, or --insecure if nobody else is on that network."
        )
    return ServerSettings(**spec.settings | endpoint)
