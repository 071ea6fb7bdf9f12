"""The file with the address of a run's registry, and the run's token, for other processes.

A run writes its address into `fleet/run.json` in its folder, for processes of the same user
(`lrl.checkpoints.owner_only_files`): whoever posed as the run would be told its token. The token
itself is in no file. On the run's machine the kernel shows it to the run's own user
(`lrl.members.discovery`); on another machine the user has to bring it, and may give the address
instead of a folder that both machines see.
"""

import os
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lrl.checkpoints.owner_only_files import OwnerOnlyFolder
from lrl.errors import NotRunning
from lrl.members.service import RegistryServer
from lrl.system.auth import given_secret
from lrl.system.config_errors import fault
from lrl.system.endpoint import Location, is_loopback
from lrl.system.process_identity import ProcessIdentity

FOLDER, RUN = "fleet", "run.json"
RUN_TOKEN, RUN_CERTIFICATE = "LRL_TOKEN", "LRL_CERTIFICATE"
"""What a launcher gives to its jobs: the run's token, and the text of its certificate. A run that
is started with the first takes it as its token."""


@dataclass(frozen=True)
class RunFile(Location):
    """The address of a run's registry on its own machine."""

    elsewhere: str = ""
    """Its URL on other machines."""
    owner: ProcessIdentity = field(default_factory=ProcessIdentity)
    """The run's process."""

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # from JSON
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))


def token_of_run() -> str:
    """Returns the token of a new run: `LRL_TOKEN`, which is removed from the environment, or a
    random one.

    Raises:
        ConfigError: It is easily guessed.
    """
    return given_secret(RUN_TOKEN, "stop the run and replace its weights")


def fault_without_token(setting: str, members: str) -> None:
    """Notes a fault: a run whose members others start has no token that they know.

    Args:
        setting: The launcher that leaves their start to others, such as `strategy.launcher is
            Given`.
        members: What they are.
    """
    fault(
        f"{setting}, and {RUN_TOKEN} is not set: whoever starts the {members} needs the run's "
        f"token. Type here and there: export {RUN_TOKEN}=..., the same 32 or more characters by "
        "chance (openssl rand -hex 32)."
    )


def url_elsewhere(server: RegistryServer) -> str:
    """Returns the URL of a registry on other machines.

    If it listens on all addresses, that is the one at which the ranks of several nodes meet, or
    this machine's name.
    """
    if not server.endpoint.is_everywhere:
        return server.location().url
    meeting = os.environ.get("MASTER_ADDR", "")
    return server.location(
        meeting if meeting and not is_loopback(meeting) else socket.gethostname()
    ).url


def write_run_file(run: Path, server: RegistryServer) -> None:
    """Writes the registry's address into the run's folder, replacing an older one; raises
    OSError."""
    files = OwnerOnlyFolder(run / FOLDER)
    files.make()
    files.write(RUN, asdict(RunFile(**vars(server.location()), elsewhere=url_elsewhere(server))))


def read_run_file(run: Path) -> RunFile:
    """Returns what `write_run_file` has written; raises NotRunning if it is not there, or not
    trusted."""
    files = OwnerOnlyFolder(run / FOLDER)
    try:
        return files.read(RUN, RunFile)
    except FileNotFoundError as error:
        raise NotRunning(
            f"{run} is not the folder of a live run (there is no {files.path / RUN}). Give the "
            "folder with the generator-<n>.log of one, on its own machine or on a file system that "
            "both share, or the address that the run has printed."
        ) from error
    except OSError as error:  # not trusted, or not readable
        raise NotRunning(str(error)) from error


def remove_run_file(run: Path) -> None:
    """Removes the file of `write_run_file`; raises OSError if it stays."""
    files = OwnerOnlyFolder(run / FOLDER)
    files.clear()
    files.path.rmdir()
