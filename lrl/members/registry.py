"""The registry of a run, on rank 0: its members of all kinds, and the HTTP by which they speak.

A process that joins claims a number, then keeps reporting where its server is and reads its status
in the answer. `lrl.members.run_members` changes that status.

POST /run/<call>         a method of `Registry` that `CALLS` names; takes and returns JSON
GET  /run/model/<name>   a file of the run's model
"""

import contextlib
import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from aiohttp import web

from lrl.checkpoints.run_folder import OwnerOnlyFolder
from lrl.errors import ConfigError, NoAnswer, NotRunning
from lrl.system.auth import TokenServer, bearer
from lrl.system.endpoint import Endpoint, Location, connect
from lrl.system.processes import ProcessIdentity

log = logging.getLogger(__name__)

FOLDER, RUN = "fleet", "run.json"
RUN_TOKEN, RUN_CERTIFICATE = "LRL_TOKEN", "LRL_CERTIFICATE"
"""What a launcher gives to its jobs: the run's token, and the text of its certificate. A run that
is started with the first takes it as its token."""

ANSWER_S = 10.0
LEASE_S = 10.0
"""Seconds of silence after which a member has ended; it speaks twice a second."""
PIECE_BYTES = 2**20
"""Of a file, sent or written at once."""


class Kind(StrEnum):
    GENERATOR = "generator"
    WORKER = "worker"
    """A member has several, which run the user's code (`lrl.workers`)."""


class Status(StrEnum):
    """The status of a member.

        STARTING ── admitted ──▶ PENDING ── a sync ──▶ SERVING ── asked to leave ──▶ LEFT
            │                       │                     │
            └──── cannot serve ─────┤                     └── silent, or at fault ──▶ LOST
                                    ▼                                                  │
                                 REFUSED                      a worker speaks again ◀──┘
                                                   (STARTING)

    A worker is never PENDING. Every member that is not over becomes ENDED with the run.
    """

    STARTING = "starting"
    """Its server starts, or has not answered the run yet."""
    PENDING = "pending"
    """It waits for a sync, and to be proved."""
    SERVING = "serving"
    LEFT = "left"
    LOST = "lost"
    REFUSED = "refused"
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
    """One of `lrl.weights.transport.TRANSPORTS`."""
    run_id: str
    on_cpu: bool
    generators: int
    """Number of generators that the run started; joining ones are numbered from there."""
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that all ends of a transfer must have alike (`Transport.common_environment`)."""
    serves_model: bool = False
    """Whether `model` is a folder, whose files the run gives to other machines."""
    terms: dict[str, Any] = field(default_factory=dict)
    """What workers run, for each pool of the run; empty if it takes none."""
    owner: ProcessIdentity = field(default_factory=ProcessIdentity)
    """The run's process."""


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
    """Its processes that run the user's code."""
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

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def alive(self) -> bool:
        """Whether it has a lease and an address."""
        return bool(self.location.url) and time.monotonic() - self.heard < LEASE_S


def _member(fields: dict[str, Any]) -> Member:
    typed = {name: WORDS[name](fields[name]) for name in ("kind", "status", "location")}
    return Member(**fields | typed)


CALLS: dict[str, Callable[[Any], Any]] = {
    "spec": lambda fields: JoinSpec(**fields | {"owner": ProcessIdentity(**fields["owner"])}),
    "model": dict,
    "joined": list,
    "claim": int,
    "view": _member,
    "register": _member,
    "withdraw": _member,
    "ask_to_leave": _member,
}
"""The methods of `Registry` that members call, and what reads each one's answer."""
WORDS: dict[str, Callable[[Any], Any]] = {
    "kind": Kind,
    "status": Status,
    "number": int,
    "workers": int,
    "node": str,
    "location": lambda fields: Location(**fields),
}
"""What reads the arguments of a call."""


class Registry:
    """The members of a run, which must meet `spec`. Any thread may call any method."""

    def __init__(self, spec: JoinSpec) -> None:
        self._spec = spec
        self._members: dict[tuple[Kind, int], Member] = {}
        # The run's own generators have the numbers before.
        self._first = {Kind.GENERATOR: spec.generators, Kind.WORKER: 0}
        self._numbers = dict(self._first)
        self._lock = threading.RLock()

    def spec(self) -> JoinSpec:
        return self._spec

    def model(self) -> dict[str, int]:
        """Returns the bytes of the files at the top of the model's folder, by name; none if the
        model is a hub name."""
        entries = Path(self._spec.model).iterdir() if self._spec.serves_model else ()
        return {path.name: path.stat().st_size for path in entries if path.is_file()}

    def claim(self, kind: Kind) -> int:
        """Returns a number that no member of this kind has had."""
        with self._lock:
            number = self._numbers[kind]
            self._numbers[kind] += 1
            self.change(kind, number, heard=time.monotonic())
            return number

    def register(
        self, kind: Kind, number: int, location: Location, node: str = "", workers: int = 0
    ) -> Member:
        """Renews the lease of a member; raises LookupError if nobody has claimed that number."""
        with self._lock:
            if not self._first[kind] <= number < self._numbers[kind]:
                raise LookupError(f"nobody has taken the number {number} for a {kind} that joins")
            # A worker that was cut off holds no weights that could be old.
            if kind is Kind.WORKER and self.view(kind, number).status is Status.LOST:
                self.change(kind, number, status=Status.STARTING)
            said = {"location": location, "node": node, "workers": workers}
            return self.change(kind, number, heard=time.monotonic(), **said)

    def withdraw(self, kind: Kind, number: int, why: str = "") -> Member:
        """Notes the end of a member's process; one that has not served and gives a reason is
        refused."""
        with self._lock:
            member = self.change(kind, number, heard=0.0)
            if why and member.status in (Status.STARTING, Status.PENDING):
                refusal = f"{member.name.capitalize()} on {member.node} cannot serve: {why}"
                log.warning("%s", refusal)
                member = self.change(kind, number, status=Status.REFUSED, why=refusal)
            return member

    def ask_to_leave(self, kind: Kind, number: int, by_itself: bool = False) -> Member:
        """Notes a request that a member leaves, `by_itself` if its own process asks, at a signal.

        The run's own generators have entries from then on.
        """
        return self.change(kind, number, leaving=True, leave_refusal="", by_itself=by_itself)

    def view(self, kind: Kind, number: int) -> Member:
        with self._lock:
            return self._members.get((kind, number), Member(kind, number))

    def change(self, kind: Kind, number: int, **fields: Any) -> Member:
        """Changes fields of a member; one that has ended with the run stays ENDED."""
        with self._lock:
            before = self.view(kind, number)
            if before.status is Status.ENDED:
                fields["status"] = Status.ENDED
            self._members[kind, number] = after = replace(before, **fields)
            return after

    def members(self, kind: Kind) -> list[Member]:
        """Returns all of this kind that have ever come or were asked to leave, in their order."""
        with self._lock:
            return [each for each in self._members.values() if each.kind is kind]

    def joined(self, kind: Kind) -> list[int]:
        """Returns the numbers of those that the run has admitted."""
        admitted = (Status.PENDING, Status.SERVING)
        return [each.number for each in self.members(kind) if each.status in admitted]

    def end(self) -> None:
        """Tells all members, as they speak, that the run ends."""
        for member in (each for kind in Kind for each in self.members(kind)):
            if not member.status.over:
                self.change(member.kind, member.number, status=Status.ENDED)


class RegistryServer(TokenServer):
    def __init__(self, registry: Registry, endpoint: Endpoint, token: str, port: int = 0) -> None:
        self.registry = registry
        routes = [
            web.post(f"/run/{{call:{'|'.join(CALLS)}}}", self._answer),
            web.get("/run/model/{name}", self._file),
        ]
        super().__init__(endpoint, token, routes, port)

    @property
    def elsewhere(self) -> Location:
        """Its location for other machines."""
        return self.location(self.endpoint.elsewhere)

    async def _answer(self, request: web.Request) -> web.Response:
        run_id = self.registry.spec().run_id
        try:
            words = await request.json()
            if words.pop("run", run_id) != run_id:
                raise LookupError("that number is another run's")
            read = {name: WORDS.get(name, lambda same: same)(word) for name, word in words.items()}
            answer = getattr(self.registry, request.match_info["call"])(**read)
        except (TypeError, ValueError, AttributeError) as error:
            raise web.HTTPBadRequest(text=f"malformed call: {error!r}") from error
        except LookupError as error:
            raise web.HTTPConflict(text=str(error)) from error
        return web.json_response(text=json.dumps(answer, default=asdict))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self.registry.model():
            raise web.HTTPNotFound(text=f"the model of the run has no file {name!r}")
        path = Path(self.registry.spec().model) / name
        return web.FileResponse(path, chunk_size=PIECE_BYTES)


@dataclass
class RunClient:
    """The registry of a live run, from another process: has the methods of `CALLS`, whose arguments
    are given by name. They raise what `request` does."""

    location: Location
    token: str = field(repr=False)

    def __getattr__(self, call: str) -> Callable[..., Any]:
        if call not in CALLS:
            raise AttributeError(call)

        def ask(**words: Any) -> Any:
            with self.request("POST", f"/run/{call}", words) as response:
                return CALLS[call](json.loads(response.read()))

        return ask

    @contextlib.contextmanager
    def request(
        self, method: str, route: str, body: Any = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Opens the response to a request with this JSON; raises NoAnswer if nothing is sent for
        `ANSWER_S`, and NotRunning for another status than 200."""
        url, headers = self.location.url, {"Authorization": bearer(self.token)}
        headers["Content-Type"] = "application/json"
        with contextlib.closing(connect(self.location, ANSWER_S)) as connection:
            try:
                connection.request(method, route, json.dumps(body, default=asdict), headers)
                response = connection.getresponse()
                if response.status != http.client.OK:
                    why = response.read().decode(errors="replace")
                    raise NotRunning(f"The run, {url}, responded {response.status}: {why}")
                yield response
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswer(
                    f"The run does not answer at {url} ({error!r}). It may have ended, or this "
                    "machine does not reach it there: strategy.server.host must be an address that "
                    "other machines reach."
                ) from error

    def fetch_model(self, folder: Path, interrupted: Callable[[], None] = lambda: None) -> None:
        """Copies the run's model into `folder`; `interrupted` may raise between pieces."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, size in self.model().items():
            with (
                self.request("GET", f"/run/model/{name}") as response,
                (folder / Path(name).name).open("wb") as file,
            ):
                while piece := response.read(PIECE_BYTES):
                    file.write(piece)
                    interrupted()
                if file.tell() != size:
                    raise OSError(f"{name} broke off after {file.tell()} of {size} bytes")


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


def fault_without_token(setting: str, members: str) -> None:
    raise ConfigError(
        f"{setting}, and {RUN_TOKEN} is not set: whoever starts the {members} needs the run's "
        f"token. Type here and there: export {RUN_TOKEN}=..., the same 32 or more characters by "
        "chance (openssl rand -hex 32)."
    )


def write_run_file(run: Path, server: RegistryServer) -> None:
    """Writes the registry's address into the run's folder; raises OSError."""
    files = OwnerOnlyFolder(run / FOLDER)
    files.make()
    files.write(RUN, asdict(RunFile(**vars(server.location()), elsewhere=server.elsewhere.url)))


def remove_run_file(run: Path) -> None:
    files = OwnerOnlyFolder(run / FOLDER)
    files.clear()
    files.path.rmdir()
