"""Finds a live run by its folder or its address, and gets its token.

The token is in no file: on the run's machine its generators have it, elsewhere somebody types it.
"""

import contextlib
import getpass
import os
from pathlib import Path
from urllib.parse import urlsplit

from lrl.errors import NotRunning
from lrl.members.client import RunClient
from lrl.members.discovery import find_generators
from lrl.members.run_file import RUN_CERTIFICATE, RUN_TOKEN, read_run_file
from lrl.system.endpoint import Location, first_certificate


def find_run(run: str, certificate: str | None = None) -> RunClient:
    """Returns the live run in the folder `run` or at the URL `run`.

    Args:
        run: Folder or URL.
        certificate: The PEM file by which to know a URL's server; without it the text in
            `RUN_CERTIFICATE`, or else the system's CAs.

    Raises:
        NotRunning: There is no live run, its file is not trusted, or nobody gave the token.
    """
    if "://" in run:
        return RunClient(_location_of(run, certificate), _typed_token(run))
    found = read_run_file(Path(run))
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
    text = first_certificate(certificate) if certificate else os.environ.get(RUN_CERTIFICATE, "")
    return Location(url, "certificate", text) if text else Location(url, "system")


def _token_here(run: Path) -> str:
    if found := find_generators(run):
        return next(iter(found.values())).token
    if token := os.environ.pop(RUN_TOKEN, ""):
        return token
    raise NotRunning(
        f"{run}: the run's token is its generators', and none of them is running here at this "
        "moment. They may be starting: try again in a minute, as the user who started the run. If "
        f"the run was started with {RUN_TOKEN}, set it here, too."
    )


def _typed_token(run: str) -> str:
    shown = "on its machine, `lrl prompt FOLDER` shows it as OPENAI_API_KEY"
    token = os.environ.pop(RUN_TOKEN, "")
    # A batch job has no keyboard; the error below gives the remedy.
    with contextlib.suppress(EOFError):
        token = token or getpass.getpass(f"The run's token ({shown}): ")
    if not token:
        raise NotRunning(
            f"{run}: its run is on another machine, and no token was typed. Without a keyboard, in "
            f"a pipe or a batch job, put it in the variable {RUN_TOKEN}; {shown}."
        )
    return token
