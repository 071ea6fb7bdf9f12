"""The proxy that breaks a sync, and the check of every token after it."""

from __future__ import annotations

import ast
import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from benchmarks.chaos import sync
from benchmarks.chaos.proxy import Fault, Kind, Proxy, phase_of
from benchmarks.chaos.sync_faults import (
    INIT,
    ON_THE_WAY,
    PROBE,
    SIGNS,
    TEXTS,
    UPDATE,
    Outcome,
    full_memory,
    make_plan,
    short_backoffs,
)
from benchmarks.chaos.token_proof import TokenRecorder
from lrl.errors import GeneratorError
from lrl.generators.client import GENERATE, GeneratorClient
from lrl.system import job_supervisor
from lrl.system.event_loop import LoopThread
from lrl.types import Group, Prompt, Rollout
from lrl.weights.shared_memory import SharedMemory
from lrl.weights.staged_file import checksum
from tests.leftovers import wait_for

LATE_S = 2.0
ROOT = Path(__file__).parents[2]


class Behind:
    """A server with a proxy before it, and what reached it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.files: list[dict[str, torch.Tensor]] = []
        self.loop = LoopThread()
        port = self.loop.wait(self._start(), 60.0, "starting")
        self.proxy = Proxy(f"http://127.0.0.1:{port}", LATE_S)
        self.client = GeneratorClient(self.proxy.url, "generator 0", "secret")

    async def _start(self) -> int:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return int(self.runner.addresses[0][1])

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.seen.append((request.path_qs, request.headers.get("Authorization")))
        if body and "update_info" in body:
            self.files.append(load_file(body["update_info"]["file"]))
            assert checksum(body["update_info"]["file"]) == body["update_info"]["checksum"], (
                "damaged"
            )
        return web.json_response({"did": request.path})

    def post(self, route: str, body: Any = None, deadline_s: float = 60.0) -> Any:
        return self.loop.wait(self.client.post(route, body, deadline_s=deadline_s), 61.0, route)

    def close(self) -> None:
        self.loop.wait(self.client.close(), 60.0, "closing")
        self.proxy.close()
        self.loop.wait(self.runner.cleanup(), 60.0, "closing")
        self.loop.close()


@pytest.fixture
def behind() -> Iterator[Behind]:
    scene = Behind()
    yield scene
    scene.close()


def test_a_proxy_forwards_query_token_and_response(behind: Behind) -> None:
    assert behind.post("/pause?mode=keep") == {"did": "/pause"}
    assert behind.seen == [("/pause?mode=keep", "Bearer secret")]


@pytest.mark.parametrize(
    ("kind", "reaches", "says"),
    [
        ("cut", 0, "failed"),
        ("refused", 0, "answered 503"),
        ("silent", 0, "did not answer within"),
        ("unanswered", 1, "failed"),
        ("lie", 0, None),
    ],
)
def test_each_kind_breaks_one_request_of_its_phase_and_no_other(
    behind: Behind, kind: Kind, reaches: int, says: str | None
) -> None:
    behind.proxy.fault = fault = Fault("/pause", kind)
    behind.post("/resume")
    if says is None:
        assert behind.post("/pause?mode=keep") == {}
    else:
        with pytest.raises(GeneratorError, match=says):
            behind.post("/pause?mode=keep", deadline_s=0.2 if kind == "silent" else 60.0)
    assert [path for path, _ in behind.seen] == ["/resume", *["/pause?mode=keep"] * reaches]
    assert behind.post("/pause?mode=keep") == {"did": "/pause"} and len(fault.hits) == 1


def test_a_late_request_reaches_the_server_when_the_client_has_gone(behind: Behind) -> None:
    behind.proxy.fault = Fault("/pause", "late")
    with pytest.raises(GeneratorError, match="did not answer within"):
        behind.post("/pause", deadline_s=0.1)
    assert behind.seen == []

    async def arrived() -> None:
        while not behind.seen:
            await asyncio.sleep(0.02)

    behind.loop.wait(arrived(), 60.0, "the late request")


@pytest.mark.parametrize("kind", ["damaged", "replaced"])
def test_only_a_damaged_file_has_the_wrong_checksum_and_the_file_itself_stays(
    behind: Behind, kind: Kind, tmp_path: Path
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"a": torch.ones(2, 2), "b": torch.ones(3)}, file)
    behind.proxy.fault = Fault("/update_weights", kind)
    body = {"update_info": {"file": str(file), "checksum": checksum(file)}}
    if kind == "damaged":
        with pytest.raises(GeneratorError, match="answered 500"):
            behind.post("/update_weights", body)
    else:
        behind.post("/update_weights", body)
    (arrived,) = behind.files
    assert any(not torch.equal(arrived[name], tensor) for name, tensor in load_file(file).items())
    wait_for(
        lambda: list(tmp_path.iterdir()) == [file],
        60.0,
        "the removal of the copy, behind the answer",
    )
    assert checksum(file) == body["update_info"]["checksum"]


def test_only_a_probe_is_a_probe() -> None:
    bodies = {"probe-3": PROBE, "warm-up": GENERATE, "7": GENERATE}
    for salt, phase in bodies.items():
        assert phase_of(GENERATE, json.dumps({"cache_salt": salt}).encode()) == phase
    assert phase_of("/pause", b"") == "/pause"


def test_the_plan_has_every_phase_of_a_sync_with_every_kind() -> None:
    planned = [(fault.phase, fault.kind, fault.stays) for fault in make_plan()]
    assert len(set(planned)) == len(planned)
    assert {(phase, kind, False) for phase in [INIT, *UPDATE] for kind in ON_THE_WAY} < set(planned)
    assert {
        (phase, kind, False)
        for phase in ("/resume", PROBE)
        for kind in ("cut", "refused", "silent", "lie")
    } < set(planned)


@pytest.mark.parametrize("notice", [True, False])
def test_a_full_memory_has_no_room_for_weights_and_leaves_nothing(notice: bool) -> None:
    transport = SharedMemory()
    transport._name = "lrl-run-0-"
    with full_memory(notice), pytest.raises(OSError, match="free|No space left"):
        transport.stage(lambda: iter([("head", torch.ones(2**20))]), False)
    mounts = Path("/proc/mounts").read_text()
    assert "lrl-full-" not in mounts


@pytest.mark.parametrize(
    ("file", "text"), [(file, text) for file, texts in TEXTS.items() for text in texts]
)
def test_lrl_still_writes_the_texts_by_which_a_fault_is_recognised(file: str, text: str) -> None:
    nodes = list(ast.walk(ast.parse((ROOT / file).read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    written = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    assert any(text in part for part in written if isinstance(part, str)), (
        f"{file} has no message with {text!r}"
    )


def test_the_file_of_every_text_is_known() -> None:
    assert set(SIGNS) <= {text for texts in TEXTS.values() for text in texts}


def test_a_lost_generator_is_replaced_after_the_shortest_backoff() -> None:
    longest = job_supervisor.LONGEST_BACKOFF_S
    with short_backoffs():
        assert job_supervisor.LONGEST_BACKOFF_S == job_supervisor.FIRST_BACKOFF_S < longest
    assert longest == job_supervisor.LONGEST_BACKOFF_S


class Fixed(torch.nn.Module):
    """Gives every token the same distribution; one parameter decides which."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([first, 0.0]))

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, 2))


def logprob(first: float, temperature: float = 1.0) -> float:
    return first / temperature - math.log(math.exp(first / temperature) + 1.0)


def recorded_tokens(*rollouts: Rollout, step: int = 2) -> TokenRecorder:
    """Versions 0, 1, 2 give token 0 the logit 0, 1, 2."""
    tokens = TokenRecorder()
    tokens.weights = {version: Fixed(float(version)).state_dict() for version in range(3)}
    prompt = Prompt(id=4, token_ids=[1, 1], text="")
    tokens.groups = [(step, Group(index=0, prompt=prompt, rollouts=list(rollouts)))]
    return tokens


def rollout(logprobs: list[float], versions: list[int]) -> Rollout:
    return Rollout(
        token_ids=[0] * len(logprobs), logprobs=logprobs, versions=versions, finish_reason="stop"
    )


def test_tokens_agree_with_the_version_they_name_and_not_with_the_one_before() -> None:
    responses = rollout([logprob(0.0), logprob(1.0)], [0, 1]), rollout([logprob(2.0)], [2])
    proof = recorded_tokens(*responses).verify(Fixed(0.0), 1.0)
    assert (
        proof.tokens == 3
        and proof.difference < 1e-5
        and proof.largest_lag == 2
        and proof.missing == 0
    )
    assert proof.under_the_version_before == pytest.approx(logprob(1.0) - logprob(0.0), abs=1e-5)


def test_a_token_by_half_updated_weights_is_found_with_its_version() -> None:
    proof = recorded_tokens(rollout([logprob(0.0), logprob(0.5)], [0, 1])).verify(Fixed(0.0), 1.0)
    assert (
        proof.difference == pytest.approx(logprob(1.0) - logprob(0.5), abs=1e-5)
        and proof.worst_version == 1
    )


def test_only_a_carried_response_may_be_by_a_newer_version_than_it_names() -> None:
    proof = recorded_tokens(rollout([logprob(2.0)], [1])).verify(Fixed(0.0), 1.0)
    assert proof.difference == pytest.approx(logprob(2.0) - logprob(1.0), abs=1e-5)


def test_a_carried_response_may_be_by_a_newer_version_and_by_no_older_one() -> None:
    for written_by, within in ((2.0, True), (0.0, False)):
        carried = rollout([logprob(written_by)], [1])
        tokens = recorded_tokens(carried)
        tokens._carried.append(carried)
        proof = tokens.verify(Fixed(0.0), 1.0)
        assert (proof.carried, proof.difference) == (1, 0.0)
        assert (proof.carried_difference < 1e-5) is within


def test_a_prompt_that_is_trained_twice_or_left_out_is_missing() -> None:
    tokens = recorded_tokens(rollout([logprob(2.0)], [2]))
    group = tokens.groups[0][1]
    tokens.groups.append((2, group))
    assert tokens.verify(Fixed(0.0), 1.0).missing == 2  # place 0 is there twice, place 1 never


def recorded(**fault: Any) -> dict[str, Any]:
    proof = recorded_tokens(rollout([logprob(2.0)], [2])).verify(Fixed(0.0), 1.0).record()
    usual = {
        "phase": "/pause",
        "kind": "cut",
        "stays": False,
        "version": 1,
        "hits": 1,
        "detected_by": "connection",
    }
    usual |= {"detected_s": 0.04, "outcome": "retried", "sync_s": 0.5, "said": "..."}
    return {
        "not_met": 0,
        "steps": 3,
        "seconds": 1.0,
        "proof": proof,
        "faults": [Outcome(**usual | fault).record()],
    }


def test_the_table_has_an_outcome_in_the_row_of_its_phase_and_the_column_of_its_kind() -> None:
    (row,) = [
        line for line in sync.tables(recorded()).splitlines() if line.startswith("| `/pause`")
    ]
    assert row.split(" | ")[1:3] == ["retried (connection, 0.0 s)", ""]


def test_a_run_is_wrong_when_a_fault_is_not_noticed_or_a_token_is_by_no_version() -> None:
    assert sync.verdict(recorded()) == []
    assert sync.verdict(recorded(detected_by=None)) == ["cut at /pause was not noticed"]
    wrong = recorded()
    wrong["proof"]["difference"] = 0.3
    assert "0.3 nats" in sync.verdict(wrong)[0]
