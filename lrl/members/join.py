"""`lrl join` and `lrl leave`: adds a member to a live run or removes one, from outside the run."""

import sys
import time

from lrl.errors import NotRunning
from lrl.members.join_session import JoinSession, LocalOverrides, ask
from lrl.members.joining_generator import JoiningGenerator
from lrl.members.joining_workers import JoiningEnvironment, JoiningScorer
from lrl.members.live_run import find_run
from lrl.members.member import Kind

JOINING: dict[Kind, type[JoinSession]] = {
    Kind.GENERATOR: JoiningGenerator,
    Kind.SCORER: JoiningScorer,
    Kind.ENVIRONMENT: JoiningEnvironment,
}
POLL_S = 0.5
ANSWER_S = 120.0
"""Seconds that a run may take to answer a request to leave: a sync goes before."""


def join(run: str, kind: Kind, overrides: LocalOverrides) -> int:
    """Has a member join the run in the folder or at the URL `run`, and serve until its end.

    Returns:
        Exit status: 1 if the run did not admit the member, or evicted it.

    Raises:
        NotRunning: There is no live run, its token is not available, or it takes no such member.
        ValueError: A member on this machine cannot meet the run's requirements.
        RuntimeError: The server did not start, or has ended.
    """
    client = find_run(run, overrides.run_cert)
    spec = ask(client, client.spec)
    return JOINING[kind](run, client, spec, overrides).run()


def leave(run: str, kind: Kind, number: int | None, run_cert: str | None = None) -> int:
    """Asks a run to remove a member; returns exit status 0 when it has.

    Args:
        run: The run's folder, or its URL.
        kind: The member's.
        number: The member's; None for the last of its kind that joined.
        run_cert: The PEM file of a run that is given by its URL.

    Raises:
        NotRunning: There is no live run, it has no such member, or the member must stay.
    """
    client = find_run(run, run_cert)
    if number is None:
        if not (joined := ask(client, lambda: client.joined(kind))):
            hint = (
                " One that the run started leaves by --number N." if kind is Kind.GENERATOR else ""
            )
            raise NotRunning(f"{run}: no {kind} has joined.{hint}")
        number = max(joined)
    leaver = number
    ask(client, lambda: client.ask_to_leave(kind, leaver))
    deadline = time.monotonic() + ANSWER_S
    while (member := ask(client, lambda: client.view(kind, leaver))).leaving:
        if time.monotonic() > deadline:
            raise NotRunning(
                f"{run} has not said within {ANSWER_S:g} s whether {member.name} leaves."
            )
        time.sleep(POLL_S)
    if member.leave_refusal:
        raise NotRunning(f"{run}: {member.leave_refusal}")
    sys.stdout.write(
        f"{member.name} has left {run}; its unfinished responses continue elsewhere.\n"
    )
    return 0
