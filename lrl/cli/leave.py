"""`lrl leave`: has a member leave a live run."""

import argparse
from collections.abc import Sequence

from lrl.cli.join import add_member
from lrl.members.registry import Kind


def main(argv: Sequence[str]) -> int:
    """Runs `lrl leave`: asks the run, and waits for its answer; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl leave", description="Have a generator or workers leave a live run."
    )
    add_member(parser, "the member (the last that joined)")
    args = parser.parse_args(argv)
    from lrl.members.join import leave

    return leave(args.run, Kind(args.kind), args.number, args.run_cert)
