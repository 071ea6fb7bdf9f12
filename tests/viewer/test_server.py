"""The server of `lrl view`, over real HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from lrl.system.endpoint import Endpoint
from lrl.viewer import server as viewer_server
from lrl.viewer.rollout_file import append
from lrl.viewer.server import FILES, PAGE, Viewer
from tests.http_call import call
from tests.viewer.made_run import episode, lines, rollout

TOKEN = "a token of this test"
HOSTILE = "<script>alert(1)</script>\u202e\u0007"


class Served:
    """A viewer of a file, and requests to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = Viewer(path, "a run").serve(Endpoint(), TOKEN, port=0)

    def ask(self, path: str, token: str | None = TOKEN) -> tuple[int, bytes]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return call(self.server.location().url, "GET", path, headers)

    def json(self, path: str) -> Any:
        status, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    path = tmp_path / "rollouts.jsonl"
    append(path, lines(0, 0, [rollout("12", 1.0), rollout("9", None, failure="nan: it is NaN")]))
    append(path, lines(1, 1, [episode("6*7", "=42", HOSTILE), rollout("7", 0.0)], HOSTILE))
    found = Served(path)
    yield found
    found.server.close()


def test_without_the_token_nobody_reads_a_rollout_and_no_path_leads_out_of_the_page(
    served: Served,
) -> None:
    for path in ("/api/run", "/api/groups", "/api/group?step=0&index=0", "/api/", "/none"):
        for token in (None, "", TOKEN[:-1], TOKEN + "x"):
            status, body = served.ask(path, token)
            assert status == 401 and b"12" not in body
    for path in FILES:
        assert served.ask(path, None)[0] == 200
    for path in ("/../server.py", "/%2e%2e/server.py", "/view.js/../../server.py", "/server.py"):
        assert served.ask(path)[0] == 404


def test_a_folder_that_has_moved_away_is_named_and_found_again(served: Served) -> None:
    away = served.path.with_name("away")
    served.path.rename(away)
    for path in ("/api/run", "/api/groups", "/api/group?step=0&index=0"):
        status, body = served.ask(path)
        assert status == 404 and f"{served.path} cannot be read".encode() in body
    away.rename(served.path)
    assert served.json("/api/run")["groups"] == 2


def test_the_overview_counts_rewards_and_failures_by_kind(served: Served) -> None:
    found = served.json("/api/run")
    assert (found["name"], found["groups"], found["responses"]) == ("a run", 2, 4)
    assert found["steps"] == [[0, 1.0], [1, 0.75]]
    assert (found["least_reward"], found["most_reward"]) == (0.0, 1.5)
    assert found["failures"] == {"nan": 1} and found["finish_reasons"] == {"stop": 3, "failed": 1}


def test_a_group_has_its_turns_and_what_the_environment_wrote_is_context(served: Served) -> None:
    group = served.json("/api/group?step=1&index=1")
    first = group["responses"][0]
    assert group["prompt"]["text"] == HOSTILE
    assert "".join(first["texts"]) == first["text"] == "6*7=42" + HOSTILE
    assert first["versions"] == [[0, 3], [None, 3], [0, len(HOSTILE.encode())]]
    assert first["trained"] == [[True, 3], [False, 3], [True, len(HOSTILE.encode())]]
    assert first["turn_rewards"] == [0.5, 1.0] and first["turn_ends"][0] == 3
    failed = served.json("/api/group?step=0&index=0")["responses"][1]
    assert failed["failure"] == "nan: it is NaN" and failed["advantages"] is None


def test_a_list_comes_in_parts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer_server, "MOST_ROWS", 1)
    pages = [served.json(f"/api/groups?order=oldest&offset={offset}") for offset in (0, 1, 2)]
    assert [page["total"] for page in pages] == [2, 2, 2]
    assert [[row["step"] for row in page["rows"]] for page in pages] == [[0], [1], []]
    assert served.json("/api/groups?failure=nan&first_step=&prompt=")["total"] == 1


def test_a_wrong_request_is_answered_with_its_fault(served: Served) -> None:
    for fault in ("order=odd", "colour=red", "first_step=x", "offset=-1"):
        assert served.ask(f"/api/groups?{fault}")[0] == 400
    assert served.ask("/api/group?step=0")[0] == 400
    assert served.ask("/api/group?step=0&index=9")[0] == 404


def test_a_broken_line_is_an_answer_that_says_so_and_the_rest_is_shown(served: Served) -> None:
    with served.path.open("a") as file:
        file.write(lines(2, 2, [rollout("11")]).replace('"logprobs": [', '"logprobs": '))
    assert served.json("/api/groups")["total"] == 3
    status, body = served.ask("/api/group?step=2&index=2")
    assert status == 422 and f"{served.path} is no JSON" in body.decode()


def test_a_live_run_is_seen_to_grow_by_whole_groups(served: Served) -> None:
    before = served.json("/api/run")["revision"]
    assert served.json(f"/api/run?revision={before}") == {"revision": before}
    text = lines(2, 2, [rollout("11")])
    with served.path.open("a") as file:
        file.write(text[:-20])
    assert served.json("/api/run")["groups"] == 2
    with served.path.open("a") as file:
        file.write(text[-20:])
    assert served.json(f"/api/run?revision={before}")["groups"] == 3


def test_the_page_asks_nobody_else_and_never_makes_html_of_a_text() -> None:
    texts = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert set(texts) == set(FILES.values())
    for text in texts.values():
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    makes_html = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc"
    )
    assert not re.search(makes_html, texts["view.js"])
    assert not re.search(r"<script>|\son\w+=|style=", texts["index.html"])


def test_a_browser_takes_no_response_for_a_page(served: Served) -> None:
    for path in ("/", "/api/group?step=1&index=1"):
        asked = Request(
            served.server.location().url + path, headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urlopen(asked, timeout=60) as answer:
            headers = answer.headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers.get_content_type() == "application/json"
