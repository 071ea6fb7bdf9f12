"""`lrl view`: the rollouts of a run, finished or live, in the browser."""

import argparse
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from lrl.errors import ConfigError
from lrl.system.endpoint import LOOPBACK, Endpoint
from lrl.viewer.rollout_file import FILE


def main(argv: Sequence[str]) -> int:
    """Runs `lrl view` until Ctrl-C; returns the exit status."""
    args = parser().parse_args(argv)
    from lrl.viewer.server import Viewer  # aiohttp: not for --help

    path = rollouts_of(args.run)
    token = secrets.token_urlsafe(32)
    viewer = Viewer(path, "/".join(args.run.resolve().parts[-2:]))
    try:
        endpoint = Endpoint(args.host, args.tls_cert, args.tls_key, insecure=args.insecure)
        endpoint.check()
        server = viewer.serve(endpoint, token, args.port)
    except ConfigError as error:  # `Endpoint` names the settings of a run
        text = str(error).replace("strategy.join_port", "--port")
        raise ConfigError(text.replace("strategy.server.", "--")) from error
    here = socket.gethostname() if endpoint.is_everywhere else ""
    try:
        sys.stdout.write(
            f"{len(viewer.index.groups):,} groups of {args.run}. Ctrl-C ends this.\n\n"
            f"    {endpoint.url(server.port, here)}/#token={token}\n"
        )
        sys.stdout.flush()
        threading.Event().wait()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        server.close()
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the settings of the command."""
    words = argparse.ArgumentParser(
        prog="lrl view", allow_abbrev=False, description="Look at a run's rollouts in the browser."
    )
    add = words.add_argument
    add("run", metavar="RUN", type=Path, help=f"the run's folder, with {FILE}")
    add("--port", type=int, default=0, help="(a free one)")
    host = "an address of this machine, or 0.0.0.0 (%(default)s)"
    add("--host", default=LOOPBACK, help=host)
    add("--tls_cert", metavar="FILE", help="certificate, PEM")
    add("--tls_key", metavar="FILE", help="its key, PEM")
    plain = "plain HTTP at an address that others reach"
    add("--insecure", action="store_true", help=plain)
    return words


def rollouts_of(run: Path) -> Path:
    """Returns the file of rollouts of a run; raises ConfigError with the remedy if there is none."""
    if (path := run / FILE).is_file():
        return path
    inside = sorted(run.rglob(FILE), key=lambda file: file.stat().st_mtime)
    if inside:
        raise ConfigError(f"{run} is no run. The newest in it is {inside[-1].parent}")
    raise ConfigError(
        f"{run} has no {FILE}. Give the folder of a run, such as runs/quickstart/version_0; a run "
        "writes it at the end of its first step, if trainer.callbacks has lrl.callbacks.RolloutFile."
    )
