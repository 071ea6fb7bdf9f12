"""The file with the address of a run's registry, and the run's token, for other processes.

A run writes its address into `fleet/run.json` in its folder, for processes of the same user
(`lrl.checkpoints.owner_only_files`): whoever posed as the run would be told its token. The token
itself is in no file. On the run's machine the kernel shows it to the run's own user
(`lrl.members.discovery`); on another machine the user has to bring it, and may give the address
instead of a folder that both machines see.
"""

import contextlib
import getpass
import os
import secrets
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lrl.checkpoints.owner_only_files import OwnerOnlyFolder
from lrl.errors import NotRunning
from lrl.members.client import RunClient
from lrl.members.discovery import find_generators
from lrl.members.service import RegistryServer
from lrl.system.config_errors import fault
from lrl.system.endpoint import Location, first_certificate, is_loopback
from lrl.system.process_identity import ProcessIdentity

FOLDER, RUN = "fleet", "run.json"
TOKEN_VARIABLE, CERTIFICATE_VARIABLE = "LRL_TOKEN", "LRL_CERTIFICATE"
"""What a launcher gives to its jobs: the run's token, and the text of its certificate. A run that
is started with the first takes it as its token."""
SHORTEST_TOKEN = 16


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
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if token and len(token) < SHORTEST_TOKEN:
        fault(
            f"{TOKEN_VARIABLE} has {len(token)} characters: whoever guesses it can stop the run "
            f"and replace its weights. Give {SHORTEST_TOKEN} or more: export "
            f"{TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )
    return token or secrets.token_urlsafe(32)


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


def remove_run_file(run: Path) -> None:
    """Removes the file of `write_run_file`; raises OSError if it stays."""
    files = OwnerOnlyFolder(run / FOLDER)
    files.clear()
    files.path.rmdir()


def find_run(run: str, certificate: str | None = None) -> RunClient:
    """Returns the live run in the folder `run` or at the URL `run`.

    Args:
        run: Folder or URL.
        certificate: The PEM file by which to know a URL's server; without it the text in
            `CERTIFICATE_VARIABLE`, or else the system's CAs.

    Raises:
        NotRunning: There is no live run, its file is not trusted, or nobody gave the token.
    """
    if "://" in run:
        return RunClient(_location_of(run, certificate), _typed_token(run))
    found = _read(Path(run))
    if found.owner.ended:
        raise NotRunning(f"{run}: its run has ended, by a signal that left it no time to say so.")
    if found.owner.here:
        return RunClient(found, _token_here(Path(run)))
    return RunClient(Location(found.elsewhere, found.trust, found.certificate), _typed_token(run))


def _location_of(url: str, certificate: str | None) -> Location:
    address = urlsplit(url)
    if (
        address.scheme not in ("http", "https")
        or not address.hostname
        or address.port is None
        or address.path
    ):
        raise NotRunning(
            f"{url} is no address of a run: give https://ADDRESS:PORT, as the run has printed it."
        )
    if address.scheme == "http":
        return Location(url)
    text = (
        first_certificate(certificate) if certificate else os.environ.get(CERTIFICATE_VARIABLE, "")
    )
    return Location(url, "certificate", text) if text else Location(url, "system")


def _read(run: Path) -> RunFile:
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


def _token_here(run: Path) -> str:
    if found := find_generators(run):
        return next(iter(found.values())).token
    if token := os.environ.pop(TOKEN_VARIABLE, ""):
        return token
    raise NotRunning(
        f"{run}: the run's token is its generators', and none of them is running here at this "
        "moment. They may be starting: try again in a minute, as the user who started the run. If "
        f"the run was started with {TOKEN_VARIABLE}, set it here, too."
    )


def _typed_token(run: str) -> str:
    shown = "on its machine, `lrl prompt FOLDER` shows it as OPENAI_API_KEY"
    token = os.environ.pop(TOKEN_VARIABLE, "")
    # A batch job has no keyboard; the error below gives the remedy.
    with contextlib.suppress(EOFError):
        token = token or getpass.getpass(f"The run's token ({shown}): ")
    if not token:
        raise NotRunning(
            f"{run}: its run is on another machine, and no token was typed. Without a keyboard, in "
            f"a pipe or a batch job, put it in the variable {TOKEN_VARIABLE}; {shown}."
        )
    return token
