"""`lrl leave`: has a member leave a live run."""

import argparse
import sys
from collections.abc import Sequence

from lrl.cli.join import add_member
from lrl.errors import NotRunning
from lrl.members.registry import Kind


def main(argv: Sequence[str] | None = None) -> int:
    """Asks the run, and waits for its answer.

    Args:
        argv: The words after `lrl leave`.

    Returns:
        Exit status: 2 if the command is wrong, or the member must stay.
    """
    parser = argparse.ArgumentParser(
        prog="lrl leave",
        description="Have a generator or workers leave a live run.",
    )
    add_member(parser, "the member (the last that joined)")
    args = parser.parse_args(argv)
    from lrl.members.join import leave

    try:
        return leave(args.run, Kind(args.kind), args.number, args.run_cert)
    except NotRunning as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2
