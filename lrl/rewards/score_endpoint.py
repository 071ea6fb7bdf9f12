"""A reward model behind vLLM's pooling routes: its scores of one input, and the tokens of a text."""

import math
from typing import Any

from lrl.errors import RewardModelError
from lrl.rewards.model_endpoint import ModelEndpoint


class ScoreEndpoint(ModelEndpoint[list[float]]):
    """The route that classifies; see `ModelEndpoint`. Its answer has one number for each label."""

    owner = "RewardModel"
    kind = "reward_model"
    error = RewardModelError
    route = "/classify"
    answers_with = "list of scores"
    remedies = {
        400: "See whether the input is longer than the model's context, and RewardModel.reads",
        401: "Set the key in the environment variable that RewardModel.api_key_env names",
        403: "Set a key with access in the variable that RewardModel.api_key_env names",
        404: "See RewardModel.url: the server must be vLLM's, with a model of sequence "
        "classification (--runner pooling)",
        413: "The input is longer than the model's context",
        422: "See RewardModel.reads",
    }

    def read(self, found: Any) -> list[float]:
        (only,) = found["data"]
        scores = [float(number) for number in only["probs"]]
        if not scores or not all(map(math.isfinite, scores)):
            raise ValueError(f"{scores} are no finite numbers")
        return scores


class TokenizeEndpoint(ModelEndpoint[list[int]]):
    """The route that makes tokens of a text; see `ModelEndpoint`."""

    owner = "RewardModel"
    kind = "reward_model"
    error = RewardModelError
    route = "/tokenize"
    answers_with = "list of tokens"
    remedies = {404: "Without that route RewardModel.reads cannot be tokens"}

    def read(self, found: Any) -> list[int]:
        return [int(token) for token in found["tokens"]]
