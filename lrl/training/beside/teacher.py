"""The teacher: a frozen model that the policy learns to be like, on what the policy itself writes.

It is in the trainer, or behind a server that somebody runs: a teacher that has no room beside the
policy. A server is asked as soon as a group is scored, while the policy trains on others.
"""

from torch import Tensor

from lrl.objectives.base import Tokens, clamp_log_ratio
from lrl.system.config_errors import above, fault
from lrl.training.beside.reference import Reference
from lrl.training.collate import whole_samples
from lrl.types import Group

TIMEOUT_S = 300.0
DEADLINE_S = 900.0


class Teacher(Reference):
    """On-policy distillation: a reference whose log-probs are a reward for each token ("On-Policy
    Distillation", Thinking Machines, 2025; the reverse KL of MiniLLM, 2306.08543, and of GKD,
    2306.13649).

    `coefficient` times log pi_teacher - log pi is added to the advantage of each token, and belongs
    to that token alone (discount 0). Its mean is -KL(pi || pi_teacher). The rewards count beside
    it; those of weight 0 leave the teacher alone.

    Log pi is that of the policy in the trainer. For tokens of the newest version that is the
    sampler's; for older ones the sampler's would add the gradient of +KL(pi || mu) to it, which
    drives the policy away from what it was.

    Args:
        model: Hub name or folder of the teacher, with the policy's tokenizer. Null with `url`.
        coefficient: Worth of a nat, in units of the advantage.
        url: Address of a vLLM server with the teacher, which somebody runs: `http://host:port`, or
            with the route. Null for a teacher in the trainer.
        api_key_env: Name of the environment variable with the key of `url`, never the key; null for
            none.
        timeout_s: Seconds for one request to `url`, the log-probs of a group.
        deadline_s: Seconds for the log-probs of a group, all requests and the waits between them.
            Then the run ends: nothing is trained without its teacher.

    Raises:
        ConfigError: A setting cannot work.
    """

    rewards_tokens = True

    def __init__(
        self,
        model: str | None = None,
        coefficient: float = 1.0,
        url: str | None = None,
        api_key_env: str | None = None,
        timeout_s: float = TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        super().__init__(model=model)  # which only measures the KL to it
        above(0, "model.reference", coefficient=coefficient)
        self.worth = coefficient
        if (url is None) == (model is None):
            fault(
                f"model.reference.url is {url!r} and model.reference.model is {model!r}: give one "
                "of them."
            )
        if url is not None:
            from lrl.training.beside.teacher_endpoint import TeacherEndpoint  # most runs have none

            self.endpoint = TeacherEndpoint(url, api_key_env, timeout_s, deadline_s)
            self.url = self.endpoint.completions.url
        elif (api_key_env, timeout_s, deadline_s) != (None, TIMEOUT_S, DEADLINE_S):
            fault(
                "model.reference.api_key_env, timeout_s and deadline_s are for a teacher at "
                "model.reference.url: leave them out."
            )

    async def ask(self, group: Group) -> None:
        """Sets `reference_logprobs` of every rollout of a group to what the server at `url` says,
        unless they are there.

        Raises:
            TeacherError: It has not said all of them; none is set.
        """
        if group.reference_version == self.version:
            return
        rollouts = [rollout for rollout in group.rollouts if rollout.token_ids]
        samples = [sample for rollout in rollouts for sample in whole_samples(group, rollout)]
        texts = [sample.token_ids for sample in samples]
        found = await self.endpoint.logprobs(texts) if texts else []
        filled = {id(rollout): [0.0] * len(rollout.token_ids) for rollout in rollouts}
        for sample, numbers in zip(samples, found, strict=True):
            written = numbers[len(sample.prompt) - 1 :]
            own = [number for number, here in zip(written, sample.trained, strict=True) if here]
            for place, number in zip(sample.trained_places, own, strict=True):
                filled[id(sample.rollout)][place] = number
        for rollout in rollouts:
            rollout.reference_logprobs = filled[id(rollout)]
        group.reference_version = self.version

    def advantages(self, tokens: Tokens) -> Tensor:
        """See `Reference.advantages`."""
        assert tokens.reference_logprobs is not None, "every group passes `fill` first"
        nearer = clamp_log_ratio(tokens.reference_logprobs - tokens.logprobs.detach())
        return tokens.advantages + self.worth * nearer
