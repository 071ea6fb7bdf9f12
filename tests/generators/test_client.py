"""The client against a small server of the same routes; frames, and the version of each token."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.errors import GeneratorError, GeneratorTimeout, RequestRejected
from lrl.generators.client import (
    FLUSH,
    WRITE,
    GeneratorClient,
    Part,
    ResponseStream,
    line,
    pack,
    size,
)
from lrl.types import Rollout, Sampling

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
GENERATE = "/inference/v1/generate"
Spans = list[tuple[str, int, int]] | None


def frame(number: int, tokens: list[int], finish: str | None = None, spans: Spans = None) -> bytes:
    """Returns a frame with tokens of one response."""
    return pack([Part(number, tokens, [-0.5 * token for token in tokens], finish, spans)])


def at_server(
    handler: Handler, work: Callable[[GeneratorClient], Awaitable[T]], seen: list[Any] | None = None
) -> T:
    """Returns the result of `work` with a client of a server that answers every request by
    `handler`; paths and bodies of the requests are added to `seen`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((request.path, await request.json()))
        return await handler(request)

    async def scene() -> T:
        async with RawTestServer(answer) as server:
            client = GeneratorClient(f"http://127.0.0.1:{server.port}", "generator 7", "secret")
            try:
                return await work(client)
            finally:
                await client.close()

    return asyncio.run(scene())


def answers(status: int, text: str) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text, content_type="application/json")

    return handler


def stream_handler(frames: list[bytes], cut: bool = False) -> Handler:
    """Returns a handler that streams `frames`, and then breaks the connection if `cut`."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for one in frames:
            await response.write(one)
        if cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


def write(client: GeneratorClient, *rollouts: Rollout, version: int = 4, **more: Any) -> Any:
    sampling = Sampling(n=2, max_tokens=9, temperature=0.7, stop_tokens=(2, 7))
    how: dict[str, Any] = {"version": lambda: version, "priority": 17, "deadline_s": 60.0}
    return client.write([1, 2, 3], rollouts, sampling, **how | more)


def test_a_request_has_version_priority_and_all_sampling_parameters() -> None:
    seen: list[Any] = []
    done = [frame(index, [5], "stop", [("4", 0, 1)]) for index in (0, 1)]
    for _ in ("this run", "another"):
        at_server(stream_handler(done), lambda client: write(client, Rollout(), Rollout()), seen)
    (route, body), (_, other) = seen
    assert body["cache_salt"] != other["cache_salt"], "or they would share keys and values"
    assert route == WRITE and body["token_ids"] == [1, 2, 3] and body["request_id"]
    assert body["cache_salt"].startswith("4-") and body["priority"] == 17
    wanted = {"n": 2, "max_tokens": 9, "temperature": 0.7, "logprobs": 0, "detokenize": False}
    assert body["sampling_params"] == wanted | {"stop_token_ids": [2, 7], "ignore_eos": True}


def test_no_connection_outlives_its_request() -> None:
    def established() -> int:
        return sum(one.status == "ESTABLISHED" for one in psutil.Process().net_connections("tcp"))

    async def two_requests(client: GeneratorClient) -> int:
        before = established()
        await client.post("/resume", deadline_s=60.0)
        await write(client, Rollout())
        return established() - before

    done = [frame(0, [5], "stop", [("4", 0, 1)])]
    answered = [answers(200, "{}"), stream_handler(done)]

    async def handler(request: web.Request) -> web.StreamResponse:
        return await answered.pop(0)(request)

    assert at_server(handler, two_requests) == 0


def test_a_half_written_response_continues_after_its_tokens_and_keeps_them() -> None:
    seen: list[Any] = []
    rollout = Rollout(token_ids=[7, 8], logprobs=[-1.0, -2.0], versions=[1, 3])
    spans = [("4", 0, 2)]
    frames = [frame(0, [5]), frame(0, [6], "length", spans)]
    at_server(stream_handler(frames), lambda client: write(client, rollout), seen)
    ((_, body),) = seen
    assert body["token_ids"] == [1, 2, 3, 7, 8]
    assert body["sampling_params"]["max_tokens"] == 7 and body["sampling_params"]["n"] == 1
    assert rollout == Rollout(
        token_ids=[7, 8, 5, 6],
        logprobs=[-1.0, -2.0, -2.5, -3.0],
        versions=[1, 3, 4, 4],
        finish_reason="length",
    )


def test_received_tokens_stay_when_the_connection_breaks() -> None:
    rollouts = [Rollout(), Rollout()]
    parts = [frame(0, [5]), frame(1, [6]), frame(0, [7, 8])]
    with pytest.raises(GeneratorError, match=f"generator 7: {WRITE}"):
        at_server(stream_handler(parts, cut=True), lambda client: write(client, *rollouts))
    assert [rollout.token_ids for rollout in rollouts] == [[5, 7, 8], [6]]
    assert [rollout.versions for rollout in rollouts] == [[4, 4, 4], [4]]
    assert not any(rollout.finished for rollout in rollouts)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([frame(0, [5]), line({"error": "EngineCore is ill"})], "EngineCore is ill"),
        ([frame(0, [5, 6, 7])[:-3]], "8 bytes|21 bytes"),
        ([b"data: {}\n"], "Expecting value"),
        ([frame(0, [5])], "the stream ended before 1 of its 1 responses did"),
        ([frame(0, [5], "abort")], "finish_reason 'abort'"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error_that_names_the_generator(
    frames: list[bytes], words: str
) -> None:
    with pytest.raises(GeneratorError, match=f"generator 7: .*{words}"):
        at_server(stream_handler(frames), lambda client: write(client, Rollout()))


def test_a_flush_waits_until_every_stream_that_it_names_has_its_mark() -> None:
    rollouts, begun, order = [Rollout(), Rollout()], asyncio.Event(), list[str]()
    names: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == FLUSH:
            await begun.wait()
            order.append("answered")
            return web.json_response({"flushed": 1, "requests": [*names, "gone"]})
        names.append((await request.json())["request_id"])
        response = web.StreamResponse()
        await response.prepare(request)
        begun.set()
        while not order:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        await response.write(frame(0, [5, 6]) + line({"flushed": 1}))
        await asyncio.sleep(0.05)
        last = frame(0, [7], "stop", [("4", 0, 3)]) + frame(1, [8], "stop", [("4", 0, 1)])
        await response.write(last)
        return response

    async def scene(client: GeneratorClient) -> list[int]:
        writing = asyncio.ensure_future(write(client, *rollouts))
        await client.flush(60.0)
        found = list(rollouts[0].token_ids)
        await writing
        await client.flush(60.0)
        return found

    assert at_server(handler, scene) == [5, 6]
    assert [rollout.token_ids for rollout in rollouts] == [[5, 6, 7], [8]]


def test_a_request_that_leaves_ends_at_a_flush_whether_or_not_a_response_ends_behind_it() -> None:
    frames = [
        frame(0, [5, 6]) + line({"flushed": 1}),
        frame(0, [7], "stop", [("4", 0, 3)]) + frame(1, [8], "stop", [("4", 0, 1)]),
    ]
    rollouts = [Rollout(), Rollout()]
    at_server(stream_handler(frames), lambda client: write(client, *rollouts, leaves=lambda: True))
    assert [rollout.token_ids for rollout in rollouts] == [[5, 6], []]
    assert not any(rollout.finished for rollout in rollouts)


def test_a_flush_whose_tokens_do_not_come_ends_at_its_deadline() -> None:
    names: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == FLUSH:
            return web.json_response({"flushed": 1, "requests": names})
        names.append((await request.json())["request_id"])
        return await never(request)

    async def scene(client: GeneratorClient) -> None:
        writing = asyncio.ensure_future(write(client, Rollout(), Rollout()))
        while not names:
            await asyncio.sleep(0.001)
        try:
            await client.flush(0.1)
        finally:
            writing.cancel()

    with pytest.raises(GeneratorTimeout, match=f"{FLUSH}: not all tokens came within 0.1 s"):
        at_server(handler, scene)


def test_prompt_log_probs_are_those_of_the_tokens_after_the_first() -> None:
    entries = [None, {"5": {"logprob": -1.5}}, {"6": {"logprob": -2.5}, "9": {"logprob": -0.1}}]
    seen: list[Any] = []
    found = at_server(
        answers(200, json.dumps({"prompt_logprobs": entries})),
        lambda client: client.prompt_logprobs([4, 5, 6], salt="probe-2", deadline_s=60.0),
        seen,
    )
    assert found == [-1.5, -2.5] and seen[0][1]["cache_salt"].startswith("probe-2-")


async def never(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


def test_a_request_after_the_end_or_in_the_midst_of_it_is_the_generators_failure() -> None:
    """A sync may come to a generator just as an eviction closes its connections."""

    async def close_and_post(client: GeneratorClient) -> None:
        await client.post("/resume", deadline_s=60.0)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(GeneratorError, match="generator 7: /resume was not sent"):
                await client.post("/resume", deadline_s=60.0)
            await closing
            await client.close()

    at_server(answers(200, "{}"), close_and_post)


def post(client: GeneratorClient) -> Any:
    return client.post("/pause", deadline_s=60.0)


def probe(client: GeneratorClient) -> Any:
    return client.prompt_logprobs([1, 2], salt="probe-1", deadline_s=60.0)


@pytest.mark.parametrize(
    ("handler", "call", "kind", "words"),
    [
        (
            never,
            lambda client: write(client, Rollout(), deadline_s=0.05),
            GeneratorTimeout,
            f"{WRITE} did not answer within 0.05 s",
        ),
        (answers(403, "off"), post, RequestRejected, "/pause answered 403: off"),
        (answers(500, "ill"), post, GeneratorError, "/pause answered 500: ill"),
        (answers(200, "{"), post, GeneratorError, "/pause answered no JSON"),
        *(
            (answers(200, text), probe, GeneratorError, f"{GENERATE} answered without the prompt")
            for text in ("[]", '{"prompt_logprobs": [null, {"9": {"logprob": -1.0}}]}')
        ),
    ],
)
def test_a_failed_call_is_the_generators_and_names_it_with_the_route(
    handler: Any, call: Any, kind: type[GeneratorError], words: str
) -> None:
    with pytest.raises(GeneratorError, match=f"generator 7: {words}") as caught:
        at_server(handler, call)
    assert type(caught.value) is kind


def parsed(whole: bytes) -> Any:
    """Returns a frame's first line and its numbers, for `ResponseStream.take`."""
    head, _, numbers = whole.partition(b"\n")
    assert size(json.loads(head)) == len(numbers)
    return json.loads(head), numbers


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=200),
    st.sets(st.integers(0, 200)),
    st.integers(0, 5),
    st.integers(0, 9),
    st.booleans(),
)
def test_a_half_written_responses_versions_are_those_that_wrote_it_however_late_its_frames_are_read(
    syncs: list[int], ends: set[int], before: int, behind: int, knows: bool
) -> None:
    """A model of a generator: token by token, a frame at the places `ends`, read `behind` frames
    later."""
    held = [0]
    rollout = Rollout(token_ids=[1] * before, logprobs=[0.0] * before, versions=[0] * before)
    stream = ResponseStream([rollout], lambda: held[0], lambda: None)
    wrote, sent, late = list[int](), 0, list[Any]()
    for token, more in enumerate(syncs):
        held[0] += more
        wrote.append(held[0])
        if token in ends:
            spans = [(str(version), place, place + 1) for place, version in enumerate(wrote)]
            new = frame(0, list(range(sent, len(wrote))), None, spans if knows else None)
            late.append(parsed(new))
            sent = len(wrote)
        if len(late) > behind:
            stream.take(*late.pop(0))
        recorded = rollout.versions[before:]
        if knows:
            assert recorded == wrote[: len(recorded)]
        assert all(mine <= true for mine, true in zip(recorded, wrote, strict=False)), (
            "a token is too new"
        )


def test_every_token_has_its_log_prob_and_the_version_that_wrote_it() -> None:
    held = [3]
    rollouts = [Rollout(), Rollout(), Rollout()]
    ends: list[int] = []
    stream = ResponseStream(
        rollouts,
        lambda: held[0],
        lambda: ends.append(sum(rollout.finished for rollout in rollouts)),
    )
    parts = [Part(1, [20, 2**31 - 1], [-1.0, -2.0], None, None), Part(2, [], [], None, None)]
    stream.take(*parsed(pack([*parts, Part(0, [10], [-5.0], None, None)])))
    held[0] = 4
    stream.take(*parsed(frame(1, [22], "stop", [("3", 0, 2), ("4", 2, 3)])))
    assert ends == [1]
    stream.take(*parsed(frame(0, [11], "length", [("3", 0, 1), ("4", 1, 2)])))
    stream.take(*parsed(frame(2, [7], "stop", [("4", 0, 1)])))
    stream.end()
    assert [one.versions for one in rollouts] == [[3, 4], [3, 3, 4], [4]]
    assert [one.token_ids for one in rollouts] == [[10, 11], [20, 2**31 - 1, 22], [7]]
    assert [one.logprobs for one in rollouts] == [[-5.0, -5.5], [-1.0, -2.0, -11.0], [-3.5]]
    assert [one.finish_reason for one in rollouts] == ["length", "stop", "stop"]
    assert ends == [1, 2, 3]


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("3", 0, 1)], "2 tokens came with 1 versions"),
        ([("2", 0, 2)], r"versions \[2\] wrote it; the generator held 3 to 3"),
        ([("4", 0, 2)], r"versions \[4\] wrote it; the generator held 3 to 3"),
    ],
)
def test_versions_that_were_never_held_are_an_error(spans: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stream = ResponseStream([Rollout()], lambda: 3, lambda: None)
        stream.take(*parsed(frame(0, [1, 2], "stop", spans)))


def test_a_token_without_log_prob_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="2 tokens came with 1 log-probs"):
        pack([Part(0, [1, 2], [-0.5], None, None)])


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_log_prob_that_cannot_be_trained_with_is_an_error_and_its_token_is_not_kept(
    logprob: float,
) -> None:
    rollout = Rollout()
    new = pack([Part(0, [1, 2], [-0.5, logprob], None, None)])
    with pytest.raises(ValueError, match="a log-prob is infinite or no number"):
        ResponseStream([rollout], lambda: 0, lambda: None).take(*parsed(new))
    assert rollout == Rollout()
