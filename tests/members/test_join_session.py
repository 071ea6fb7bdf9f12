"""A member outlives an outage of the run, and never the run itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from lrl.errors import NotRunning
from lrl.members import join_session
from lrl.members.join_session import LocalOverrides
from lrl.members.member import Kind, Member
from tests.members.served_run import spec_of

SPEC = spec_of()


class Answers:
    """A client whose run answers, or fails, as it is told."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def register(self, kind: Kind, number: int, run_id: str, **facts: Any) -> Member:
        if self.error is not None:
            raise self.error
        return Member(kind, number)


class Session(join_session.JoinSession):
    kind = Kind.GENERATOR

    def serve(self) -> AbstractContextManager[Any]:
        return nullcontext()


@pytest.mark.parametrize(
    ("error", "limit_s"),
    [
        (ConnectionRefusedError("nobody listens"), join_session.REFUSED_S),
        (TimeoutError("the network is cut"), join_session.SILENT_S),
        (NotRunning("the token is not the run's"), 0.0),
    ],
)
def test_a_member_outlives_an_outage_of_the_run_and_not_its_end(
    error: Exception, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, client = [1000.0], Answers()
    monkeypatch.setattr(join_session.time, "monotonic", lambda: now[0])
    session = Session("", client, SPEC, LocalOverrides())  # type: ignore[arg-type]
    for _ in range(3):
        client.error = error if limit_s else None
        now[0] += 0.9 * limit_s
        session._speak()
        client.error = None
        session._speak()
    client.error = error
    now[0] += 1.1 * limit_s
    with pytest.raises(join_session.JoinEnded, match="the run has ended"):
        session._speak()


def test_a_member_ends_at_once_with_a_run_that_was_killed_on_its_machine() -> None:
    client, killed = Answers(), replace(SPEC, owner=replace(SPEC.owner, started=1))
    client.error = ConnectionRefusedError("nobody listens")
    session = Session("", client, killed, LocalOverrides())  # type: ignore[arg-type]
    with pytest.raises(join_session.JoinEnded, match="the run has ended"):
        session._speak()
