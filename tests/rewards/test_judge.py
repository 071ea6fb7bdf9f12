"""A judge: what it asks, how it reads the answer, and that a failure is never a 0. The endpoint is a
real server.

Covers lrl/rewards/model_endpoint.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import multiprocessing
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from lrl.errors import ConfigError, JudgeError
from lrl.rewards import Judge, RewardFailuresError, RewardPool
from tests.rewards import odd_rewards
from tests.rewards.judge_server import CLOSE, HANG, TEMPLATE, fails, judged, says, served
from tests.rewards.scenes import counted, scored, started

URL = "http://127.0.0.1:9"
KEY = "sk-0123456789abcdef"


@pytest.fixture
def server():
    with served() as judge_server:
        yield judge_server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def judge_at(url, **settings):
    defaults = {"model": "judge", "template": TEMPLATE, "lowest": 0, "highest": 10}
    return Judge(url=url, **(defaults | settings))


def score(judge, response="r", prompt="", **columns):
    return asyncio.run(judge(prompt, response, **columns))


def failure(judge, response="r"):
    with pytest.raises(JudgeError) as caught:
        score(judge, response)
    return caught.value


def calls_in(folder):
    return len((folder / "calls").read_bytes())


def answer_files(folder):
    return sorted(folder.glob("*/*.json"))


def verdict(score):
    return says(json.dumps({"reason": "It has 3 faults.", "score": score}))


SCORES = [
    ("json", '{"reason": "It has 3 faults, 8/10.", "score": 7}', 0.7),
    ("json", '{"score": 2.5, "reason": ""}\n', 0.25),
    ("json", '{"reason": "", "score": 2.5e0}', 0.25), ("json", '{"reason": "", "score": 10}', 1.0),
    ("line", "Score: 9, at first.\nScore: 8", 0.8), ("line", "Score: 0", 0.0),
    ("line", "5/10?\n\nScore: 4.5\n", 0.45),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), SCORES)
def test_a_response_is_worth_the_score_that_has_the_form(server, form, text, expected):
    server.replies["r"] = [says(text)]
    assert score(judge_at(server.url, form=form)) == expected


def test_the_judge_is_asked_for_the_form_that_is_read(server):
    server.replies["r"] = [verdict(7), says("Score: 7")]
    for form in ("json", "line"):
        assert score(judge_at(server.url, form=form, lowest=-1, highest=7.5)) == 8 / 8.5
    by_schema, by_line = server.bodies
    asked = by_schema["messages"][-1]["content"].rpartition("\n\n")[2]
    assert '"score": X' in asked and "from -1 to 7.5" in asked
    schema = by_schema["response_format"]["json_schema"]["schema"]
    assert set(schema["required"]) == {"reason", "score"} and not schema["additionalProperties"]
    assert "Score: X, where X is a number from -1 to 7.5." in by_line["messages"][-1]["content"]
    assert "response_format" not in by_line


NO_SCORE = [
    None, "", "It is good.", "7", "Score: **8**.", "8/10", "1e-1", "2.5e-1", "\u22121", "7 of 10", "7,5",
    "8 out of a possible 10", "4 on a scale of 1 to 5", "4 (of 5)", '{"score": 3, "max": 5}', '{"score": 3}',
    "Score: 1e-1", "Score: \u22121", "Score: 7 of 10", "Score: 5/10", "Score: 7, as", "Score: \u0667", "Score: 7%",
    "Score: 7\nIt is good.", '{"reason": "", "score": "7"}', '{"reason": "", "score": true}',
    '{"reason": "", "score": [7]}', '{"reason": 7, "score": 7}',
    '{"reason": "", "score": NaN}', '{"reason": "", "score": 7, "max": 9}', '{"reason": "", "score": 7} 8',
    '{"reason": "", "score": 9, "score": 7}', '[["reason", ""], ["score", 7]]', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("form", ["json", "line"])
@pytest.mark.parametrize("text", NO_SCORE)
def test_an_answer_in_another_form_is_a_failure_and_never_a_score(server, tmp_path, text, form):
    server.replies["r"] = [says(text)]
    found = failure(judge_at(server.url, cache=str(tmp_path), form=form))
    assert found.kind == "judge_no_score" and len(found.message) < 300
    assert server.asked["r"] == 1 and answer_files(tmp_path) == []


def test_the_judge_gets_the_messages_and_parameters_that_are_set_and_no_others(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = judge_at(
        server.url + "/v1/",
        template='{{"of": {level}, "notes": {notes}}}\n{prompt} {answer}\n{response}',
        system="You know {answer}.",
        max_tokens=None,
        parameters={"seed": 3},
        api_key_env="JUDGE_KEY",
        form="line",
    )
    server.replies["{x} é"] = [says("Score: 7")]
    score(judge, response="{x} é", prompt="{level}?", answer="72", level=0.00005, notes=["é", 1])
    asked = (
        '{"of": 0.00005, "notes": ["é", 1]}\n{level}? 72\n{x} é\n\nEnd your answer with a line that '
        "has nothing but Score: X, where X is a number from 0 to 10."
    )
    messages = [{"role": "system", "content": "You know 72."}, {"role": "user", "content": asked}]
    expected = {"model": "judge", "temperature": 0.0, "seed": 3, "messages": messages}
    assert server.bodies == [expected]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_what_passes_by_itself_is_asked_again_until_it_answers(server):
    failures = [fails(429, Retry_After="0"), fails(500), fails(503, Retry_After="soon")]
    server.replies["r"] = [*failures, CLOSE, HANG, verdict(7)]
    assert score(judge_at(server.url, retries=5, timeout_s=3.0)) == 0.7
    assert server.asked["r"] == 6


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (fails(429, "slow down"), "slow down"),
        (fails(500, "oh"), "oh"),
        (CLOSE, "RemoteProtocolError"),
        (HANG, "no answer within 0.1 s"),
    ],
)
def test_after_the_last_retry_the_failure_says_what_came_last(server, reply, named):
    server.replies["r"] = [reply]
    found = failure(judge_at(server.url, retries=2, timeout_s=0.1 if reply is HANG else 30))
    assert found.kind == "judge_failed" and named in found.message
    assert "3 requests (Judge.retries is 2)" in found.message and server.asked["r"] == 3


@pytest.mark.parametrize(
    ("reply", "kind", "named"),
    [
        (verdict(10.5), "no_score", "not in 0 to 10"),
        (verdict(-1), "no_score", "not in 0 to 10"),
        (verdict(10**400), "no_score", "not in 0 to 10"),
        (says('{"reason": "It', "length"), "no_score", "Judge.max_tokens"),
        (fails(401, f"bad key {KEY}"), "refused", "bad key ***"),
        (fails(307, Location="http://127.0.0.1:9/"), "refused", "307"),
        (verdict(7)._replace(body="<html>hello"), "refused", "<html>hello"),
        (verdict(7)._replace(body='{"choices": []}'), "refused", "cannot read its answer"),
        (verdict(7)._replace(status=404, body="plain"), "refused", "404"),
    ],
)
def test_a_score_out_of_bounds_and_a_refusal_are_failures_and_are_not_asked_again(
    server, monkeypatch, reply, kind, named
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.replies["r"] = [reply]
    found = failure(judge_at(server.url, api_key_env="JUDGE_KEY"))
    assert found.kind == f"judge_{kind}" and server.asked["r"] == 1
    assert named in found.message and (kind == "no_score" or server.url in found.message)
    assert KEY not in found.message and len(found.message) < 400


def test_no_request_is_sent_before_the_time_that_the_server_asks_for(server):
    server.replies["r"] = [fails(429, Retry_After="600"), verdict(7)]
    found = failure(judge_at(server.url))
    assert found.kind == "judge_failed" and server.asked["r"] == 1


def test_a_request_gets_no_more_than_what_is_left_of_the_deadline(server, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.5)
    server.replies["r"] = [fails(500), HANG]
    score(judge_at(server.url), "loads the client")
    found = failure(judge_at(server.url, timeout_s=3.0, deadline_s=3.0))
    assert "no answer within 3 s in all" in found.message and server.asked["r"] == 2


def test_a_judge_gets_nothing_that_the_environment_has_for_openai(server, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, KEY)
    score(judge_at(server.url))
    assert KEY not in str(server.headers) and "Authorization" not in server.headers[0]


def test_the_key_is_in_no_object_text_or_file(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = judge_at(server.url, api_key_env="JUDGE_KEY", cache=str(tmp_path))
    score(judge)
    kept = [pickle.dumps(judge), repr(judge).encode()]
    kept += [file.read_bytes() for file in answer_files(tmp_path)]
    assert len(kept) == 3 and all(KEY.encode() not in one for one in kept)


def test_a_machine_without_the_key_says_which_variable_is_not_set(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = judge_at(server.url, api_key_env="JUDGE_KEY")
    monkeypatch.delenv("JUDGE_KEY")
    found = failure(judge)
    assert found.kind == "judge_refused" and "JUDGE_KEY" in found.message and not server.asked


def test_a_judge_behind_the_environments_proxy_is_asked_through_it(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert score(judge_at("http://judge.invalid")) == 0.7
    assert server.headers[0]["Host"] == "judge.invalid"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_this_machine_is_not_asked_through_a_proxy(server, monkeypatch, caplog, host):
    monkeypatch.setenv("http_proxy", URL)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    url = server.url.replace("127.0.0.1", host)
    assert score(judge_at(url, api_key_env="JUDGE_KEY")) == 0.7
    assert "anyone able to read" not in caplog.text


def test_an_answer_is_asked_once_while_nothing_that_decides_it_changes(server, tmp_path):
    def asks(response="r", **settings):
        before = server.asked.total()
        score(judge_at(server.url, cache=str(tmp_path), **settings), response)
        return server.asked.total() - before

    assert asks() == 1
    assert [asks(), asks(retries=0), asks(weight=2.0)] == [0, 0, 0]
    others = [
        {"response": "other"}, {"model": "other"}, {"template": "Other. " + TEMPLATE}, {"highest": 20},
        {"system": "Be strict."}, {"temperature": 0.5}, {"max_tokens": 100}, {"parameters": {"seed": 1}},
    ]  # fmt: skip
    assert [asks(**other) for other in others] == [1] * 8
    assert [asks(**other) for other in others] == [0] * 8
    assert calls_in(tmp_path) == 9
    with served() as other:
        other.replies["r"] = [verdict(2)]
        assert score(judge_at(other.url, cache=str(tmp_path))) == 0.2, "another endpoint's own"


@pytest.mark.parametrize("damage", ["", '{"text": 1, "finish_reason": "stop"}', "\udcff"])
def test_a_damaged_answer_is_asked_again_and_said(server, tmp_path, caplog, damage):
    judge = judge_at(server.url, cache=str(tmp_path))
    score(judge)
    (file,) = answer_files(tmp_path)
    file.write_bytes(damage.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert score(judge) == 0.7
    assert f"{file} is damaged" in caplog.text
    assert score(judge) == 0.7 and server.asked["r"] == 2


def test_an_answer_that_cannot_be_kept_has_its_score_all_the_same(server, tmp_path, caplog):
    """A response had none on a full disk, although its answer was paid for."""
    judge = judge_at(server.url, cache=str(tmp_path))
    score(judge)
    (file,) = answer_files(tmp_path)
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("in the place of the folder")
    with caplog.at_level(logging.WARNING):
        assert score(judge) == 0.7
    assert server.asked["r"] == 2 and "An answer of the judge cannot be written" in caplog.text


def test_a_budget_holds_over_processes_that_count_at_once_and_over_resumes(server, tmp_path):
    settings = {"url": server.url, "model": "m", "template": TEMPLATE, "highest": 10}
    settings |= {"cache": str(tmp_path), "max_calls": 40}
    jobs = [[f"{job} {number}" for number in range(20)] for job in range(3)]
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as processes:
        found = list(processes.map(judged, [settings] * 3, jobs))
    scores = [one for some, _ in found for one in some]
    assert (scores.count(0.7), scores.count("judge_budget"), len(scores)) == (40, 20, 60)
    assert (server.asked.total(), calls_in(tmp_path), len(answer_files(tmp_path))) == (40, 40, 40)
    assert not any(loaded for _, loaded in found)
    # A resume asks nothing more, and still has what was answered.
    again, _ = judged(settings, jobs[0] + jobs[1] + jobs[2])
    assert again == scores and server.asked.total() == 40
    assert not [file for file in tmp_path.rglob(".*") if file.is_file()]


def test_every_request_counts_also_those_that_fail(server, tmp_path):
    server.replies["r"] = [fails(500)]
    judge = judge_at(server.url, cache=str(tmp_path), max_calls=3, retries=5)
    assert failure(judge).kind == "judge_budget"
    assert server.asked["r"] == calls_in(tmp_path) == 3


def test_a_machine_with_another_folder_does_not_begin_a_budget_of_its_own(server, tmp_path):
    judge = judge_at(server.url, cache=str(tmp_path), max_calls=3)
    (tmp_path / "calls").unlink()
    found = failure(judge)
    assert found.kind == "judge_budget" and "share" in found.message and not server.asked


def test_a_count_that_another_process_holds_is_not_waited_for_without_an_end(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr("lrl.rewards.judge.LONGEST_HOLD_S", 0.1)
    judge = judge_at(server.url, cache=str(tmp_path))
    with (tmp_path / "calls").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = failure(judge)
        assert found.kind == "judge_failed" and "holds the file calls" in found.message
    assert not server.asked


def test_a_budget_ends_the_run_whatever_share_of_failures_is_allowed(server, tmp_path):
    judge = judge_at(server.url, cache=str(tmp_path), max_calls=2, timeout_s=30, deadline_s=30)
    with started([judge], workers=1, timeout_s=60.0, max_failures=1.0) as pool:
        scored(pool, "a", "b")
        with pytest.raises(RewardFailuresError, match="Judge.max_calls is 2.*Raise"):
            scored(pool, "c")
        assert counted(pool) == {"scored": 2, "retried": 1, "judge_budget": 1}


def test_in_a_worker_a_group_is_judged_at_once_and_each_failure_has_its_name(server):
    server.replies = {
        "worst": [verdict(0)],
        "mute": [says("I cannot say.")],
        "high": [verdict(11)],
        "long": [fails(400, "too long")],
        "down": [fails(500)],
    }
    server.together = threading.Barrier(6)
    judge = judge_at(server.url, retries=0, timeout_s=60, deadline_s=60)
    with started([judge, odd_rewards.torch_is_loaded], 1, timeout_s=90.0, max_failures=1.0) as pool:
        # The server answers none of the six before all have come; second tries come one by one.
        server.together = threading.Barrier(6, action=lambda: setattr(server, "together", None))
        rollouts = scored(pool, "fine", "worst", "mute", "high", "long", "down")
        assert [rollout.reward for rollout in rollouts] == [0.7, 0.0, None, None, None, None]
        assert [str(rollout.reward_failure).partition(":")[0] for rollout in rollouts[2:]] == [
            "judge_no_score",
            "judge_no_score",
            "judge_refused",
            "judge_failed",
        ]
        assert counted(pool) == {
            "scored": 2,
            "zero": 1,
            "retried": 4,
            "judge_no_score": 2,
            "judge_refused": 1,
            "judge_failed": 1,
        }
        assert server.asked == dict(fine=1, worst=1, mute=2, high=2, long=2, down=2)


def test_a_pool_that_would_end_a_judge_before_its_deadline_is_refused():
    with pytest.raises(ConfigError, match="data.reward_timeout_s is 120.*'judge'.* 120 s"):
        RewardPool([judge_at(URL)], timeout_s=120.0)
    RewardPool([judge_at(URL)], timeout_s=121.0)
    assert RewardPool([judge_at(URL)]).workers.spec.timeout_s == 150.0, "by itself long enough"


def test_names_of_the_template_are_columns_or_facts_of_the_response():
    judge = judge_at(URL, template="{prompt}{response}{num_tokens}{answer}", system="{rubric}")
    judge.check_row({"answer": 5, "rubric": ["short"]})
    with pytest.raises(ValueError, match="column `answer`: None"):
        judge.check_row({"answer": None, "rubric": "short"})
    with pytest.raises(ValueError, match="no column `answer`"):
        score(judge, rubric="short", num_tokens=1)


BROKEN = [
    ({"url": "judge:8000"}, "Judge.url is 'judge:8000'"),
    ({"url": f"https://me:{KEY}@h/v1"}, "Judge.api_key_env"),
    ({"template": "{prompt}"}, "Write {response}"),
    ({"template": '{"a": 1} {response}'}, "write {prompt}, {response}"),
    ({"system": "{level:.2f}"}, "{level:.2f}"),
    ({"api_key_env": KEY}, "may be the key itself"),
    ({"api_key_env": "abcdef0123456789"}, "may be the key itself"),
    ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not set"),
    ({"api_key_env": "EMPTY_KEY"}, "EMPTY_KEY, which is not set"),
    ({"max_calls": 5}, "Judge.cache is not set"),
]


@pytest.mark.parametrize(("settings", "named"), BROKEN)
def test_a_setting_that_cannot_work_is_refused_by_name(monkeypatch, settings, named):
    monkeypatch.setenv("EMPTY_KEY", "")
    with pytest.raises(ConfigError) as caught:
        judge_at(**({"url": URL} | settings))
    message = str(caught.value)
    assert named in message and "\n" not in message
    assert KEY not in message and "abcdef0123456789" not in message


def test_a_key_over_plain_http_is_warned_of_unless_it_stays_on_the_machine(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    for url in ("http://127.0.0.1:1", "https://judge/v1"):
        judge_at(url, api_key_env="JUDGE_KEY")
    judge_at("http://judge/v1")
    assert not caplog.records
    judge_at("http://judge/v1", api_key_env="JUDGE_KEY")
    assert "anyone able to read that network sees the key" in caplog.text


def test_no_reward_imports_the_client_before_its_first_request():
    code = "import sys, lrl.rewards; lrl.rewards.Judge; print('openai' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "False\n", ran.stderr
