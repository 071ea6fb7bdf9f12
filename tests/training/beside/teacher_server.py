"""A teacher's server that a test can break: every token that it is asked for has the same
log-prob."""

from __future__ import annotations

import json
from typing import Any

from tests.rewards.judge_server import JudgeServer, Reply, fails
from tests.tiny_policies import byte_tokenizer

LOGPROB = -1.5
Positions = list[dict[str, Any] | None]


def positions(text: list[int], logprob: float = LOGPROB) -> Positions:
    """vLLM's `prompt_logprobs` of a text: none of its first token."""
    entries = [{str(token): {"logprob": logprob, "rank": 1}} for token in text[1:]]
    return [None, *entries]


def gives(*texts: Positions) -> Reply:
    """What vLLM's route for completions answers."""
    choices = [
        {"index": index, "text": "a", "prompt_logprobs": text} for index, text in enumerate(texts)
    ]
    return Reply(200, json.dumps({"choices": choices[::-1]}), {})


class TeacherServer(JudgeServer):
    """Use: `with served(TeacherServer()) as server`."""

    def __init__(self, context: int = 1024) -> None:
        super().__init__()
        self.context = context
        self.script: list[Reply | None] = []
        """Replies to the requests for log-probs, in their order; None for the usual one, and the
        last one stays."""

    def reply_to(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        if path == "/tokenize":
            tokens = byte_tokenizer().encode(body["prompt"], add_special_tokens=False)
            found = {"tokens": tokens, "count": len(tokens), "max_model_len": self.context}
            return Reply(200, json.dumps(found), {})
        if path != "/v1/completions":
            return fails(404, f"no route {path}")
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            reply = self.script[0] if self.script else None
            if len(self.script) > 1:
                self.script.pop(0)
        return reply or gives(*(positions(text) for text in body["prompt"]))
