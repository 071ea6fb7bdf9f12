"""A judge and a reward model: what they ask, how they read the answer, and that a failure is never
a 0. The endpoints are real servers."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lrl.errors import ConfigError, CountedError
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.rewards import Judge, RewardModel, RewardPool
from lrl.types import Chat, Prompt
from tests.rewards import odd_rewards
from tests.rewards.judge_server import (
    CLOSE,
    HANG,
    TEMPLATE,
    ScoreServer,
    fails,
    gives,
    says,
    served,
)
from tests.rewards.scenes import counted, scored, started
from tests.tiny_policies import byte_tokenizer, tiny_reward_model

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


def score(reward, response="r", prompt="p", **columns):
    return asyncio.run(reward(prompt, response, prompt_messages=None, **columns))


def failure(reward, response="r"):
    with pytest.raises(CountedError) as caught:
        score(reward, response)
    return caught.value


def answer_files(folder):
    return sorted(folder.glob("*/*.json"))


def verdict(score):
    return says(json.dumps({"reason": "It has 3 faults.", "score": score}))


SCORES = [
    ('{"reason": "It has 3 faults, 8/10.", "score": 7}', 0.7), ('{"score": 2.5, "reason": ""}\n', 0.25),
    ('{"reason": "", "score": 2.5e0}', 0.25), ('{"reason": "", "score": 10}', 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SCORES)
def test_a_response_is_worth_the_score_that_has_the_form(server, text, expected):
    server.replies["r"] = [says(text)]
    assert score(judge_at(server.url)) == expected
    schema = server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert set(schema["required"]) == {"reason", "score"}


def test_the_judge_gets_the_messages_and_parameters_that_are_set_and_no_others(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = judge_at(
        server.url + "/v1/",
        template='{{"of": {level}, "notes": {notes}}}\n{prompt} {answer}\n{response}',
        system="You know {answer}.",
        max_tokens=None,
        parameters={"seed": 3, "response_format": {"type": "json_object"}},
        api_key_env="JUDGE_KEY",
    )
    score(judge, response="{x} é", prompt="{level}?", answer="72", level=0.00005, notes=["é", 1])
    asked = (
        '{"of": 0.00005, "notes": ["é", 1]}\n{level}? 72\n{x} é\n\nAnswer with JSON and nothing else: '
        '{"reason": "one sentence", "score": X}, where X is a number from 0 to 10.'
    )
    messages = [{"role": "system", "content": "You know 72."}, {"role": "user", "content": asked}]
    expected = {"model": "judge", "temperature": 0.0, "seed": 3, "messages": messages}
    assert server.bodies == [expected | {"response_format": {"type": "json_object"}}]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_url_keeps_its_query_and_has_no_password():
    whole = judge_at("https://host/v1/chat/completions?version=2")._endpoint
    short = judge_at("https://host/v1?version=2")._endpoint
    assert whole.url == short.url == "https://host/v1/chat/completions?version=2"
    with pytest.raises(ValueError, match="not shown") as raised:
        judge_at("https://me:secret@host")
    assert "secret" not in str(raised.value)


def test_what_passes_by_itself_is_asked_again_until_it_answers(server):
    failures = [fails(429, Retry_After="0"), fails(500), fails(503, Retry_After="soon")]
    server.replies["r"] = [*failures, CLOSE, HANG, verdict(7)]
    assert score(judge_at(server.url, retries=5, timeout_s=1.5)) == 0.7
    assert server.asked["r"] == 6


@pytest.mark.parametrize(("reply", "named"), [(fails(500, "oh"), "oh"), (HANG, "in time")])
def test_after_the_last_retry_the_failure_says_what_came_last(server, reply, named):
    server.replies["r"] = [reply]
    found = failure(judge_at(server.url, retries=2, timeout_s=0.1 if reply is HANG else 30))
    assert found.kind == "judge_failed" and named in found.message
    assert "retries 2" in found.message and server.asked["r"] == 3


NO_SCORE = [
    None, "It is good.", "7", '{"score": 3}', '{"reason": "", "score": "7"}', '{"reason": "", "score": true}',
    '{"reason": 7, "score": 7}', '{"reason": "", "score": NaN}', '{"reason": "", "score": 7, "max": 9}',
    '{"reason": "", "score": 7} 8', '[["reason", ""], ["score", 7]]', "[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "kind", "named"),
    [
        *((says(text), "no_score", "") for text in NO_SCORE),
        *((verdict(score), "no_score", "not in 0 to 10") for score in (10.5, -1, 10**400)),
        (says('{"reason": "It', "length"), "no_score", "Judge.max_tokens"),
        (fails(401, f"bad key {KEY}"), "refused", "bad key ***"),
        (verdict(7)._replace(body="<html>hello"), "refused", "<html>hello"),
        (verdict(7)._replace(body='{"choices": []}'), "refused", "cannot read its answer"),
        (verdict(7)._replace(status=404, body="plain"), "refused", "404"),
    ],
)
def test_an_answer_in_another_form_and_a_refusal_are_failures_never_scores_and_not_asked_again(
    server, tmp_path, monkeypatch, reply, kind, named
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.replies["r"] = [reply]
    found = failure(judge_at(server.url, api_key_env="JUDGE_KEY", cache=str(tmp_path)))
    assert found.kind == f"judge_{kind}" and server.asked["r"] == 1
    assert named in found.message and (kind == "no_score" or server.url in found.message)
    assert KEY not in found.message and len(found.message) < 400
    assert answer_files(tmp_path) == []


def test_a_request_gets_no_more_than_what_is_left_of_the_deadline(server, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.5)
    server.replies["r"] = [fails(500), HANG]
    score(judge_at(server.url), "loads the client")
    found = failure(judge_at(server.url, timeout_s=3.0, deadline_s=3.0))
    assert "no answer in time" in found.message and server.asked["r"] == 2


def test_the_key_is_in_no_object_text_or_file(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = judge_at(server.url, api_key_env="JUDGE_KEY", cache=str(tmp_path))
    score(judge)
    kept = [pickle.dumps(judge), repr(judge).encode()]
    kept += [file.read_bytes() for file in answer_files(tmp_path)]
    assert len(kept) == 3 and all(KEY.encode() not in one for one in kept)


def test_a_machine_without_the_key_sends_nothing(server):
    found = failure(judge_at(server.url, api_key_env="JUDGE_KEY"))
    assert found.kind == "judge_refused" and "api_key_env" in found.message and not server.asked


def test_no_key_and_nothing_of_openais_is_sent_without_being_named(server, monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID"):
        monkeypatch.setenv(name, KEY)
    score(judge_at(server.url))
    assert not {"Authorization", "OpenAI-Organization"} & set(server.headers[0])
    assert KEY not in str(server.headers)


def test_a_judge_behind_the_environments_proxy_is_asked_through_it(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert score(judge_at("http://judge.invalid")) == 0.7
    assert server.headers[0]["Host"] == "judge.invalid"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_this_machine_is_not_asked_through_a_proxy(server, monkeypatch, host):
    monkeypatch.setenv("http_proxy", URL)
    assert score(judge_at(server.url.replace("127.0.0.1", host))) == 0.7


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
    with served() as other:
        other.replies["r"] = [verdict(2)]
        assert score(judge_at(other.url, cache=str(tmp_path))) == 0.2, "another endpoint's own"


def test_in_a_worker_a_group_is_judged_at_once_and_each_failure_has_its_name(server):
    server.replies = {
        "worst": [verdict(0)],
        "mute": [says("I cannot say.")],
        "high": [verdict(11)],
        "long": [fails(400, "too long")],
        "down": [fails(500)],
    }
    server.together = 6  # it answers none before all have come
    judge = judge_at(server.url, retries=0, timeout_s=60, deadline_s=60)
    with started([judge, odd_rewards.torch_is_loaded], 1, timeout_s=90.0, max_failures=1.0) as pool:
        rollouts = scored(pool, "fine", "worst", "mute", "high", "long", "down")
        assert [rollout.reward for rollout in rollouts] == [0.7, 0.0, None, None, None, None]
        failed = {"judge_no_score": 2, "judge_refused": 1, "judge_failed": 1}
        assert counted(pool) == {"scored": 2, "zero": 1, "retried": 4} | failed
        assert server.asked == dict(fine=1, worst=1, mute=2, high=2, long=2, down=2)


def test_a_pool_that_would_end_a_judge_before_its_deadline_is_refused():
    with pytest.raises(ConfigError, match="data.reward_timeout_s is 120.* after 120 s"):
        RewardPool([judge_at(URL)], timeout_s=120.0)
    RewardPool([judge_at(URL)], timeout_s=121.0)
    assert RewardPool([judge_at(URL)]).workers.spec.timeout_s == 150.0, "by itself long enough"


def test_names_of_the_template_are_columns_or_facts_of_the_response_which_is_one():
    judge = judge_at(URL, template="{prompt}{response}{num_tokens}{answer}", system="{rubric}")
    judge.check_row({"answer": 5, "rubric": ["short"]})
    with pytest.raises(ValueError, match="column `answer`: None"):
        judge.check_row({"answer": None, "rubric": "short"})
    with pytest.raises(ValueError, match="no column `answer`"):
        score(judge, rubric="short", num_tokens=1)


# ---- a reward model


@pytest.fixture
def score_server():
    with served(ScoreServer()) as made:
        yield made


def test_a_reward_model_reads_all_messages_of_a_chat_or_the_prompt_as_the_users(score_server):
    reward = RewardModel(url=score_server.url)
    assert score(reward) == 0.5
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
    assert score_server.bodies == [{"messages": messages, "use_activation": False}]
    system = {"role": "system", "content": "Be short."}
    prompt = Prompt(id=0, token_ids=[5, 6], text="2+2?", chat=Chat([system]))
    with started([reward], 1, timeout_s=150.0, first=prompt):
        assert score_server.bodies[1]["messages"] == [system, {"role": "assistant", "content": "0"}]


def test_the_score_is_that_of_the_label(score_server):
    score_server.replies["r"] = [gives(-3.0, 0.25)]
    assert score(RewardModel(url=score_server.url, label=1)) == 0.25
    assert score(RewardModel(url=score_server.url, label=0)) == -3.0
    for label in (None, 2, -1):
        found = failure(RewardModel(url=score_server.url, label=label))
        assert found.kind == "reward_model_refused"
        assert f"gives 2 numbers, and RewardModel.label is {label}" in found.message


ODD = [gives(1.0)._replace(body="<html>no"), gives(float("inf")), gives(), fails(400, "too long")]


@pytest.mark.parametrize("reply", ODD)
def test_what_has_no_finite_number_is_a_failure_and_never_a_score(score_server, reply):
    score_server.replies["r"] = [reply]
    assert failure(RewardModel(url=score_server.url)).kind == "reward_model_refused"


class PoolingServer(Server):
    """`vllm serve MODEL --runner pooling`."""

    def command(self):
        words = ["--model", self.model, "--runner", "pooling", "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--dtype", "float32", "--max-model-len", "256"]
        words += ["--gpu-memory-utilization", "0.1"]  # of the memory, whatever else is in it
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


def test_in_vllm_scores_are_those_of_transformers_and_no_input_is_cut(tmp_path):
    tiny_reward_model(tmp_path / "model")
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()

    def own_score(response):
        messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": response}]
        token_ids = byte_tokenizer().apply_chat_template(messages, return_dict=False)
        with torch.no_grad():
            return network(torch.tensor([token_ids])).logits

    async def scores(reward, texts):
        return await asyncio.gather(*(reward("p", text, prompt_messages=None) for text in texts))

    texts = [f"What is {number} + {number}?" * (1 + number % 5) for number in range(32)]
    own = torch.cat([own_score(text) for text in texts]).squeeze()
    settings = ServerSettings(kv_cache_gib=0.1)
    server = PoolingServer(str(tmp_path / "model"), settings, "", [], tmp_path, 0)
    server.start()
    try:
        server.wait_ready()
        reward = RewardModel(url=server.url)
        assert asyncio.run(scores(reward, texts)) == pytest.approx(own.tolist(), abs=1e-4)
        squashed = RewardModel(url=server.url, activation=True)
        assert score(squashed, texts[0]) == pytest.approx(own[0].sigmoid().item(), abs=1e-4)
        assert own.min() > 1, "an activation would put them between 0 and 1"
        found = failure(reward, "4" * 300)
        assert found.kind == "reward_model_refused" and "256" in found.message
    finally:
        server.stop()
