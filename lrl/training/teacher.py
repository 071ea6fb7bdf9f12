"""The teacher: a frozen model that the policy learns to be like, on what the policy itself writes."""

from torch import Tensor

from lrl.objectives.base import Tokens, clamp_log_ratio
from lrl.system.config_errors import above
from lrl.training.reference import Reference


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
        model: Hub name or folder of the teacher, with the policy's tokenizer.
        coefficient: Worth of a nat, in units of the advantage.

    Raises:
        ConfigError: `coefficient` is not above 0.
    """

    rewards_tokens = True

    def __init__(self, model: str, coefficient: float = 1.0) -> None:
        super().__init__(model=model)  # which only measures the KL to it
        above(0, "model.reference", coefficient=coefficient)
        self.worth = coefficient

    def advantages(self, tokens: Tokens) -> Tensor:
        """See `Reference.advantages`."""
        assert tokens.reference_logprobs is not None, (
            "every group passes `fill` before it is packed"
        )
        nearer = clamp_log_ratio(tokens.reference_logprobs - tokens.logprobs.detach())
        return tokens.advantages + self.worth * nearer
