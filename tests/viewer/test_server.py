"""The server of `lrl view`, over real HTTP, and its page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.request import Request, urlopen

import pytest
from aiohttp import web

from lrl.system.endpoint import Endpoint
from lrl.viewer import server as viewer_server
from lrl.viewer.rollout_file import append
from lrl.viewer.server import FILES, HEADERS, PAGE, Viewer
from tests.http_call import call
from tests.viewer.made_run import branched, episode, lines, rollout

TOKEN = "a-token-of-this-test"
HOSTILE = "<script>document.title = 'taken'</script>\u202e\u0007"


class Served:
    """A viewer of a file, and requests to it."""

    def __init__(self, path: Path, kind: type[Viewer] = Viewer) -> None:
        self.path = path
        self.server = kind(path, "a run").serve(Endpoint(), TOKEN, port=0)

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


READER = """
(async () => {
  const all = (which) => [...document.querySelectorAll(which)];
  const text = (which) => document.querySelector(which)?.textContent ?? "";
  const until = async (what) => {
    for (let left = 400; !what(); left--) {
      if (!left) throw new Error(`never: ${what}`);
      await new Promise((then) => setTimeout(then, 50));
    }
  };
  await until(() => text(".row.chosen").includes("step 599 ") && all(".response").length === 2);
  const seen = { token: location.href.includes("token"), few: all(".row").length < 60 };
  $("list").scrollTop = 1e6;
  await until(() => text(".row:last-child").includes("step 0 "));
  $("list").scrollTop = 0;
  await until(() => text(".row").includes("step 599 "));
  document.querySelector(".row").click();
  await until(() => all(".response").length === 2);
  seen.texts = all("#group pre, .bad, .role").map((one) => one.textContent);
  seen.response = text(".response");
  seen.title = document.title;
  seen.colours = ["version", "log-prob", "mask", "none"].map((name) => {
    const choice = document.querySelector(".head select");
    choice.value = name;
    choice.onchange();
    return new Set(all("[data-token]").map((one) => one.style.background)).size;
  });
  await fetch("view.css?grow=1");
  await until(() => text("#total") === "601 groups");
  document.querySelector(".row").click();
  await until(() => all(".response").length === 1);
  seen.branch = text(".branch");
  const dots = all(".tree circle");
  seen.tree = dots.map((one) => [one.cx.baseVal.value, one.cy.baseVal.value]);
  dots[3].onclick();
  seen.aimed = text(".aimed");
  for (const [words, total] of [["failure=timeout", 1], ["", 601], ["finish_reason=stop", 601]]) {
    $("filters").elements.end.value = words;
    $("filters").oninput();
    await until(() => text("#total") === `${total} groups`);
  }
  return seen;
})().catch(String).then((seen) => fetch(`view.css?seen=${encodeURIComponent(JSON.stringify(seen))}`));
"""
"""What somebody does with the page, added to its script."""


class Read(Viewer):
    """Its page reads itself: it has the run grow by a group, and says what was to be seen."""

    seen: Queue[Any] = Queue()

    async def _file(self, request: web.Request) -> Any:
        if "grow" in request.query:
            append(self.index.path, lines(600, 600, [branched()]))
        elif "seen" in request.query:
            self.seen.put(json.loads(request.query["seen"]))
        elif request.path == "/view.js":
            script = (PAGE / "view.js").read_text() + READER
            return web.Response(text=script, content_type="text/javascript", headers=HEADERS)
        return await super()._file(request)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_browser_shows_a_response_as_text_and_only_the_rows_in_sight(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    text = "".join(lines(step, step, [rollout("12", step % 2)]) for step in range(599))
    group = [episode("6*7", "=42", HOSTILE), rollout("7", None, failure="timeout: 9 s")]
    append(path, text + lines(599, 599, group, HOSTILE))
    server = Read(path, "a run").serve(Endpoint(), TOKEN, port=0)
    words = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    words += ["--window-size=1200,700", f"--user-data-dir={tmp_path / 'browser'}"]
    browser = subprocess.Popen(
        [*words, f"{server.location().url}/#token={TOKEN}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen = Read.seen.get(timeout=120)
    finally:
        browser.terminate()
        browser.wait(60)
        server.close()
    shown = "<script>document.title = 'taken'</script>⟦202E⟧⟦0007⟧"
    turns = ["turn 1 · reward 0.5", "environment", "turn 2 · reward 1"]
    assert seen == {
        "title": "a run · lrl view",
        "token": False,
        "few": True,
        "texts": ["prompt", shown, *turns, "no reward", "timeout: 9 s"],
        "response": f"1.5{3 + len(HOSTILE.encode())} tokens · lag 599 · stop · advantage 0.5"
        f"{turns[0]}6*7environment=42{turns[2]}{shown}",
        "colours": [2, 2, 2, 1],
        "branch": "branch, after what the environment wrote behind turn 1",
        "tree": [[12, 12], [36, 12], [60, 12], [60, 36]],
        "aimed": "or 41",
    }
