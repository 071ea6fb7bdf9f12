"""The registry of a run, on rank 0: its members of all kinds, and the HTTP by which they speak.

A process that joins claims a number, then keeps reporting where its server is and reads its status
in the answer. `lrl.members.run_members` changes that status.

POST /run/<call>         one of `RegistryServer.calls`; takes and returns JSON
GET  /run/model/<name>   a file of the run's model
"""

import contextlib
import http.client
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from aiohttp import web

from lrl.errors import NoAnswer, NotRunning
from lrl.system.auth import TokenServer, bearer
from lrl.system.endpoint import Endpoint, Location, connect, is_loopback
from lrl.system.processes import ProcessIdentity

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds of silence after which a member has ended; it speaks twice a second."""
END_S = 2.0
"""Seconds that a run waits at its end until its members have heard of it."""
RUN = "/run"
MODEL = f"{RUN}/model"
LONGEST_NODE = 64
DEADLINE_S = 10.0
PIECE_BYTES = 2**20
"""Bytes of a file that are sent, or written, at once."""


class Kind(StrEnum):
    """The work of a member."""

    GENERATOR = "generator"
    WORKER = "worker"
    """Runs the user's code (`lrl.workers`); one member has several."""


class Status(StrEnum):
    """The status of a member.

        STARTING ── admitted ──▶ PENDING ── a sync ──▶ SERVING ── asked to leave ──▶ LEFT
            │                       │                     │
            └──── cannot serve ─────┤                     └── silent, or at fault ──▶ LOST
                                    ▼                                                  │
                                 REFUSED                      a worker speaks again ◀──┘
                                                   (STARTING)

    A worker is never PENDING, and may come back. Every member that is not over
    becomes ENDED with the run.
    """

    STARTING = "starting"
    """Its server starts, or has not answered the run yet."""
    PENDING = "pending"
    """It waits for a sync, and to be proved."""
    SERVING = "serving"
    LEFT = "left"
    """It has left at the request of a user or a signal."""
    LOST = "lost"
    REFUSED = "refused"
    """It has never served, and cannot."""
    ENDED = "ended"

    @property
    def over(self) -> bool:
        """Whether it is no longer a member of the run."""
        return self in (Status.LEFT, Status.LOST, Status.REFUSED, Status.ENDED)


@dataclass(frozen=True)
class JoinSpec:
    """The settings that a member must share with its run; travels as JSON."""

    model: str
    """Folder or hub name."""
    settings: dict[str, Any]
    """The fields of `ServerSettings`."""
    transport: str
    """One of `lrl.weights.TRANSPORTS`."""
    run_id: str
    on_cpu: bool
    generators: int
    """Number of generators that the run started; joining ones are numbered from there."""
    seed: int = 0
    """The run's (`lrl.generators.server.run_seed`)."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that all ends of a transfer must have alike (`Transport.common_environment`)."""
    serves_model: bool = False
    """Whether `model` is a folder, whose files the run gives to other machines."""
    owner: ProcessIdentity = field(default_factory=ProcessIdentity)
    """The run's process."""

    def __post_init__(self) -> None:
        if isinstance(self.owner, dict):  # from JSON
            object.__setattr__(self, "owner", ProcessIdentity(**self.owner))


@dataclass(frozen=True)
class Member:
    """A process that others started and that registers at rank 0, as its run sees it; travels as
    JSON."""

    kind: Kind
    number: int
    """Unique among the members of its kind; never used twice in a run."""
    location: Location = field(default_factory=Location)
    """Its URL is empty while its server starts."""
    node: str = ""
    """The name of its machine."""
    workers: int = 0
    """Processes of a member with workers."""
    heard: float = 0.0
    """When it last spoke, on rank 0's monotonic clock; its lease ends `LEASE_S` later."""
    status: Status = Status.STARTING
    version: int = -1
    """A generator's policy version when it came to its status."""
    why: str = ""
    """The reason of its status."""
    leaving: bool = False
    """Whether a request to leave is pending."""
    by_itself: bool = False
    """Whether its own process asked to leave, at a signal: a launcher's job is then replaced."""
    leave_refusal: str = ""
    """Why the run rejected the last request to leave."""

    @property
    def name(self) -> str:
        """Its name in errors and logs."""
        return f"{self.kind} {self.number}"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Member":
        kind, status = Kind(fields["kind"]), Status(fields["status"])
        typed = {"kind": kind, "status": status, "location": Location(**fields["location"])}
        return cls(**fields | typed)


class Registry:
    """The members of a run, which must meet `spec`. Any thread may call any method."""

    def __init__(self, spec: JoinSpec) -> None:
        self.spec = spec
        self._members: dict[tuple[Kind, int], Member] = {}
        # The run's own generators have the numbers before.
        self._first = {Kind.GENERATOR: spec.generators, Kind.WORKER: 0}
        self._numbers = dict(self._first)
        self._lock = threading.Lock()

    def claim(self, kind: Kind) -> int:
        """Returns a number that no member of this kind has had."""
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
            self._members[kind, number] = Member(kind, number, heard=time.monotonic())
            return number

    def register(
        self, kind: Kind, number: int, location: Location, node: str = "", workers: int = 0
    ) -> Member:
        """Renews the lease of a member, and returns the run's record of it.

        Raises:
            LookupError: Nobody has claimed that number.
        """
        with self._lock:
            if not self._first[kind] <= number < self._numbers[kind]:
                raise LookupError(f"nobody has taken the number {number} for a {kind} that joins")
            status = self._record(kind, number).status
            # A worker that was cut off holds no weights that could be old.
            if status is Status.LOST and kind is Kind.WORKER:
                status = Status.STARTING
            now = time.monotonic()
            words = {"location": location, "node": node, "workers": workers, "status": status}
            return self._change(kind, number, heard=now, **words)

    def withdraw(self, kind: Kind, number: int, why: str = "") -> None:
        """Notes the end of a member's process; one that has not served and gives a reason is
        refused."""
        with self._lock:
            member = self._change(kind, number, heard=0.0)
            if why and member.status in (Status.STARTING, Status.PENDING):
                refusal = f"{member.name.capitalize()} on {member.node} cannot serve: {why}"
                log.warning("%s", refusal)
                self._change(kind, number, status=Status.REFUSED, why=refusal)

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> None:
        """Notes a request that a member leaves, `by_itself` if its own process asks, at a signal.

        The run's own generators have entries from then on.
        """
        with self._lock:
            self._change(kind, number, leaving=True, leave_refusal="", by_itself=by_itself)

    def view(self, kind: Kind, number: int) -> Member:
        with self._lock:
            return self._record(kind, number)

    def joined(self, kind: Kind) -> list[int]:
        """Returns the numbers of the members of this kind that the run has admitted."""
        admitted = (Status.PENDING, Status.SERVING)
        return [each.number for each in self._joining(kind) if each.status in admitted]

    def alive(self, kind: Kind) -> dict[int, Member]:
        """Returns the members with a lease and an address, by number."""
        now = time.monotonic()
        return {
            each.number: each
            for each in self._joining(kind)
            if now - each.heard < LEASE_S and each.location.url
        }

    def leaving(self, kind: Kind) -> list[int]:
        """Returns the numbers of the members that must leave."""
        return [each.number for each in self._all() if each.kind is kind and each.leaving]

    def refusal(self, kind: Kind) -> str:
        """Returns the reason of the last refusal; empty without one."""
        found = [each.why for each in self._joining(kind) if each.status is Status.REFUSED]
        return found[-1] if found else ""

    def set_status(
        self, kind: Kind, number: int, status: Status, version: int = -1, why: str = ""
    ) -> None:
        """Notes the status of a member; one that has ended with the run stays so."""
        with self._lock:
            if self._record(kind, number).status is not Status.ENDED:
                self._change(kind, number, status=status, version=version, why=why)

    def answer_leave(self, kind: Kind, number: int, refusal: str = "") -> None:
        """Answers a member's request to leave: the reason to reject it, or empty if it has left."""
        with self._lock:
            self._change(kind, number, leaving=False, leave_refusal=refusal)

    def end(self) -> None:
        """Tells all members that the run ends, and waits a moment until they know."""
        with self._lock:
            announced_s = time.monotonic()
            for member in list(self._members.values()):
                if not member.status.over:
                    self._change(member.kind, member.number, status=Status.ENDED)
        while any(announced_s - LEASE_S < each.heard <= announced_s for each in self._all()):
            if time.monotonic() - announced_s > END_S:
                return
            time.sleep(0.05)

    def _all(self) -> list[Member]:
        with self._lock:
            return list(self._members.values())

    def _joining(self, kind: Kind) -> list[Member]:
        """All of this kind that have ever joined, in the order of their numbers."""
        first = self._first[kind]
        return [each for each in self._all() if each.kind is kind and each.number >= first]

    def _record(self, kind: Kind, number: int) -> Member:
        return self._members.get((kind, number), Member(kind, number))

    def _change(self, kind: Kind, number: int, **fields: Any) -> Member:
        changed = replace(self._record(kind, number), **fields)
        self._members[kind, number] = changed
        return changed


class RegistryServer(TokenServer):
    """Serves a registry; see `TokenServer`.

    `terms` returns what workers must know, as JSON; None if the run takes none.
    """

    def __init__(
        self,
        registry: Registry,
        endpoint: Endpoint,
        token: str,
        port: int = 0,
        terms: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self.registry = registry
        self._terms_of_workers = terms
        self.calls: dict[str, Callable[..., Any]] = {
            "spec": lambda: registry.spec,
            "terms": self._terms,
            "model": lambda: {path.name: path.stat().st_size for path in self._model_files()},
            "joined": registry.joined,
            "claim": self._claim,
            "view": registry.view,
            "register": self._register,
            "withdraw": registry.withdraw,
            "ask_to_leave": registry.ask_to_leave,
        }
        routes = [
            web.post(f"{RUN}/{{call:{'|'.join(self.calls)}}}", self._answer),
            web.get(MODEL + "/{name}", self._file),
        ]
        super().__init__(endpoint, token, routes, port)

    @property
    def elsewhere(self) -> Location:
        """Its location for other machines.

        A server that listens on all addresses is reached where the ranks of several nodes meet, or
        by this machine's name.
        """
        if not self.endpoint.is_everywhere:
            return self.location()
        meeting = os.environ.get("MASTER_ADDR", "")
        named = meeting and not is_loopback(meeting)
        return self.location(meeting if named else socket.gethostname())

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            words = await request.json()
            for name, typed in (("kind", Kind), ("number", int)):
                if name in words:
                    words[name] = typed(words[name])
            answer = self.calls[request.match_info["call"]](**words)
        except (TypeError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"malformed call: {error!r}") from error
        except LookupError as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.Response(
            text=json.dumps(answer, default=asdict), content_type="application/json"
        )

    def _terms(self, kind: Kind) -> dict[str, Any]:
        if kind is not Kind.WORKER or self._terms_of_workers is None:
            raise LookupError(f"the run takes no {kind}s")
        return self._terms_of_workers()

    def _claim(self, kind: Kind) -> int:
        if kind is Kind.WORKER:
            self._terms(kind)
        return self.registry.claim(kind)

    def _register(
        self, kind: Kind, number: int, run: str, location: Any, node: str, workers: int
    ) -> Member:
        if run != self.registry.spec.run_id:
            raise LookupError("that number is another run's")
        if not str(node).isprintable() or len(str(node)) > LONGEST_NODE:
            raise ValueError("the name of the machine is not printable, or too long")
        where = Location(**location)
        return self.registry.register(kind, number, where, node=str(node), workers=int(workers))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        for path in self._model_files():
            if path.name == name:
                return web.FileResponse(path, chunk_size=PIECE_BYTES)
        raise web.HTTPNotFound(text=f"the model of the run has no file {name!r}")

    def _model_files(self) -> list[Path]:
        """The files at the top of the model's folder; none if the model is a hub name."""
        spec = self.registry.spec
        entries = Path(spec.model).iterdir() if spec.serves_model else ()
        return sorted(path for path in entries if path.is_file())


class RunClient:
    """The registry of the live run at `location`, from another process; see `Registry` for its
    methods.

    Every method raises NoAnswer if the run does not answer within `DEADLINE_S`, and NotRunning if
    it rejects the request.
    """

    def __init__(self, location: Location, token: str) -> None:
        self.location = location
        self.token = token
        self._trust = location.context()

    def spec(self) -> JoinSpec:
        return JoinSpec(**self._ask("spec"))

    def terms(self, kind: Kind) -> dict[str, Any]:
        return dict(self._ask("terms", kind=kind))

    def joined(self, kind: Kind) -> list[int]:
        return list(self._ask("joined", kind=kind))

    def claim(self, kind: Kind) -> int:
        return int(self._ask("claim", kind=kind))

    def view(self, kind: Kind, number: int) -> Member:
        return Member.from_json(self._ask("view", kind=kind, number=number))

    def register(
        self, kind: Kind, number: int, run_id: str, location: Location, workers: int = 0
    ) -> Member:
        """See `Registry`; for a member on this machine, of the run `run_id`."""
        words = {"run": run_id, "location": asdict(location), "workers": workers}
        node = socket.gethostname()[:LONGEST_NODE]
        return Member.from_json(self._ask("register", kind=kind, number=number, node=node, **words))

    def withdraw(self, kind: Kind, number: int, why: str = "") -> None:
        self._ask("withdraw", kind=kind, number=number, why=why)

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> None:
        """See `Registry`; `view` has the answer."""
        self._ask("ask_to_leave", kind=kind, number=number, by_itself=by_itself)

    def fetch_model(self, folder: Path, interrupted: Callable[[], None] = lambda: None) -> None:
        """Copies the run's model into `folder`; `interrupted` may raise between pieces."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in self._ask("model").items():
            with (
                self._request("GET", f"{MODEL}/{name}") as response,
                (folder / Path(name).name).open("wb") as file,
            ):
                while piece := response.read(PIECE_BYTES):
                    file.write(piece)
                    interrupted()
                if file.tell() != size:
                    raise OSError(f"{name} broke off after {file.tell()} of {size} bytes")

    def _ask(self, call: str, **words: Any) -> Any:
        with self._request("POST", f"{RUN}/{call}", json.dumps(words)) as response:
            return json.loads(response.read())

    @contextlib.contextmanager
    def _request(
        self, method: str, route: str, body: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        url = self.location.url
        headers = {"Authorization": bearer(self.token), "Content-Type": "application/json"}
        with contextlib.closing(connect(url, self._trust, DEADLINE_S)) as connection:
            try:
                connection.request(method, route, body, headers)
                response = connection.getresponse()
                if response.status != http.client.OK:
                    why = response.read().decode(errors="replace")
                    raise NotRunning(f"{url} responded {response.status} on {route}: {why}")
                yield response
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(
                    f"The run does not answer at {url} ({error!r}). It may have ended, or this "
                    "machine does not reach it there: strategy.server.host must be an address that "
                    "other machines reach."
                ) from error
