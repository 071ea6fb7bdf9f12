"""The messages between rank 0 and a reward host, over one websocket that the host opens at `ROUTE`.

    rank 0  -- `Welcome` (JSON) ------------------------------------------------------->  host
    rank 0  <-- {"ready": WORKERS} or {"refused": WHY} ---------------------------------  host
    rank 0  -- a job: its number, how many responses, and these pickled (binary) ------->  host
    rank 0  <-- {"job": NUMBER, "outcomes": [...], "replaced": WORKERS SINCE THE START} -  host
    rank 0  -- {"end": true} ---------------------------------------------------------->  host

Rank 0 unpickles nothing: whoever has the run's token may send it anything, and only what is an outcome counts.
"""

import json
import math
import struct
from base64 import b64decode, b64encode
from dataclasses import asdict
from typing import Any, NamedTuple

from lrl.rewards.failure_stats import KINDS
from lrl.rewards.job import Job, WorkerSpec
from lrl.rewards.job_state import Outcome, Scored

ROUTE = "/run/rewards"
LONGEST_REPORT = 2**26
"""Bytes of a message of a host: far more than the outcomes of a large group."""
_HEAD = struct.Struct(">QI")


class BadReportError(ValueError):
    """A message of a host that is none of the above."""


class Welcome(NamedTuple):
    """Rank 0's first message to a host."""

    run: str
    """A random name of the run: a number of another run's host is not this one's."""
    heartbeat_s: float
    """Seconds between two pings; a host that hears nothing for twice as long has lost the connection."""
    number: int
    """The host's, among those of the run."""
    spec: WorkerSpec
    """The rewards, which the workers unpickle, and their limits."""
    trial: Job | None
    """A response that the host scores before it gets jobs."""


def welcome(message: Welcome) -> str:
    """Returns it as a message."""
    spec, trial = message.spec, message.trial
    fields = {
        "run": message.run,
        "heartbeat_s": message.heartbeat_s,
        "number": message.number,
        "spec": asdict(spec) | {"rewards": b64encode(spec.rewards).decode()},
        "trial": None if trial is None else b64encode(pack(0, trial)).decode(),
    }
    return json.dumps(fields)


def read_welcome(fields: dict[str, Any]) -> Welcome:
    """Returns it, from the JSON of a message."""
    spec, trial = fields["spec"], fields["trial"]
    spec |= {"rewards": b64decode(spec["rewards"]), "names": tuple(spec["names"])}
    trial = None if trial is None else unpack(b64decode(trial))[1]
    return Welcome(fields["run"], fields["heartbeat_s"], fields["number"], WorkerSpec(**spec), trial)


def pack(number: int, job: Job) -> bytes:
    """Returns a job as a message."""
    return _HEAD.pack(number, job.count) + job.packed


def unpack(message: bytes) -> tuple[int, Job]:
    """Returns a job and its number."""
    number, count = _HEAD.unpack_from(message)
    return number, Job(count, message[_HEAD.size :])


def report(number: int, outcomes: list[Outcome], replaced: int) -> str:
    """Returns the outcomes of a job as a message."""
    values = [list(each) if isinstance(each, Scored) else each for each in outcomes]
    return json.dumps({"job": number, "outcomes": values, "replaced": replaced})


def read_outcomes(values: Any, count: int) -> list[Outcome]:
    """Returns the outcomes in a report about `count` responses.

    Raises:
        BadReportError: They are not that many, or one is no outcome.
    """
    if not isinstance(values, list) or len(values) != count:
        raise BadReportError(f"no list of {count} outcomes")
    return [_outcome(value) for value in values]


def _outcome(value: Any) -> Outcome:
    match value:
        case None:
            return None
        case str() if value.partition(":")[0] in KINDS:
            return value
        case [reward, dict() as parts, str() as gave_up] if all(map(_is_number, [reward, *parts.values()])):
            return Scored(float(reward), {name: float(part) for name, part in parts.items()}, gave_up)
    raise BadReportError(f"{str(value)[:80]!r} is no outcome of a response")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
