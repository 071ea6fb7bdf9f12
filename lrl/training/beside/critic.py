"""The critic (`model.critic`): a value head on the last hidden state of the policy or of a model of
its own.

Values are computed when a rollout's group reaches its step. The weights are a parameter group of
the policy's optimizer, because Lightning counts the steps of every optimizer, and a version of the
policy is one step. They are neither sent to generators nor exported.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.advantages import gae, of_tokens
from lrl.errors import ConfigError, above, at_least
from lrl.system.ranks import Ranks
from lrl.training.collate import Numbers
from lrl.training.logprobs import decoder_of, last_hidden
from lrl.training.model import ModelSource, open_on_ranks
from lrl.training.trials import Shared, shared_by_responses
from lrl.types import Group, MicroBatch


class Critic(nn.Module):
    """A value head: one linear layer that begins at 0, and the settings of its learning.

    The loss of a token is (V - R)^2 / 2 for its value V and its return R = V' + the advantage of
    GAE (1506.02438, equation 16) with the critic's own `lam`, where V' is the value with which the
    step began.

    Args:
        model: Hub name or folder of a model of its own under the head; null puts the head on the
            policy's last hidden state.
        lr: Peak learning rate of AdamW for the critic's weights. Its warm-up and schedule are the
            policy's.
        lam: lambda of the returns, in [0, 1]; 1 makes them the response's reward (VC-PPO,
            2503.01491: lambda of the value apart from that of the policy).
        value_only_steps: First steps of a run, in which the critic learns and the policy's learning
            rate is 0 (VC-PPO: value pretraining).
        max_grad_norm: The gradient of the critic's weights is scaled down to this L2 norm; null
            never does.
    """

    responses_share = Shared(packed=True, prefixes=True)
    """What that model lets several responses share."""
    of_turns: bool = False
    """Whether its values are those of whole turns (`lrl.TurnCritic`)."""
    outputs: int = 1
    """Numbers that the head gives for a token."""

    def __init__(
        self,
        model: str | None = None,
        lr: float = 1e-5,
        lam: float = 1.0,
        value_only_steps: int = 10,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__()
        at_least(0, "model.critic", lr=lr, value_only_steps=value_only_steps)
        above(0, "model.critic", max_grad_norm=max_grad_norm)
        if not 0 <= lam <= 1:
            raise ConfigError(f"model.critic.lam is {lam}; it must be in [0, 1].")
        self.model = model
        self.lr = lr
        self.lam = lam
        self.value_only_steps = value_only_steps
        self.max_grad_norm = max_grad_norm
        self.sums = torch.zeros(8, dtype=torch.float64)
        """Of this rank's part of a step: tokens, weighted losses, and of the values that are
        learnt: their number, values, returns, squared returns, errors, squared errors."""
        self.trunk: PreTrainedModel | None = None
        """The decoder of the model of its own; None before it is opened, and without one."""

    @property
    def kind(self) -> str:
        """The kind of critic that a checkpoint must have been made with."""
        return "a head on the policy" if self.model is None else "a model of its own"

    def open(
        self,
        policy: PreTrainedModel,
        source: ModelSource,
        device: torch.device,
        ranks: Ranks,
        in_parts: bool = False,
    ) -> list[tuple[PreTrainedModel, PreTrainedModel | None]]:
        """Opens the model, if there is one, as `source` but from its own folder (`open_on_ranks`),
        and makes the head. Returns its decoders, each with the one that has its weights, if this
        rank does."""
        if self.model is None:
            self._add_head(policy)
            return []
        own = replace(source, folder=self.model)
        network, whole = open_on_ranks(own, device, ranks, in_parts)
        if whole is not None:
            self.responses_share = shared_by_responses(whole)
        self.responses_share = ranks.share(self.responses_share).under(network)
        self.trunk = decoder_of(network)
        self._add_head(network)
        of_file = None if whole is None else decoder_of(whole)
        decoders = (one for one in self.children() if isinstance(one, PreTrainedModel))
        return [(decoder, of_file) for decoder in decoders]

    def _add_head(self, network: PreTrainedModel) -> None:
        output = network.get_output_embeddings().weight
        # Weights that one collective averages have the same dtype; adapters have one of their own.
        dtype = next(one for one in network.parameters() if one.requires_grad).dtype
        device = "cpu" if output.is_meta else output.device
        self.head = nn.Linear(output.shape[1], self.outputs, dtype=dtype, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, hidden: Tensor | None, micro: MicroBatch) -> Tensor:
        """Returns the value before each label: float32 [R, L], 0 outside the mask. `hidden`,
        [R, L, H], is the policy's last hidden state; unused with a model of its own."""
        values = apply_head(self.head, micro.of_labels(self._hidden(hidden, micro)))
        return micro.at_labels(values.squeeze(-1))

    def _hidden(self, hidden: Tensor | None, micro: MicroBatch) -> Tensor:
        """Returns the hidden state under the head, [R, L, H]; no gradient reaches the policy's."""
        if self.trunk is not None:
            return last_hidden(self.trunk, micro)
        assert hidden is not None
        return hidden.detach()

    def fill(self, group: Group, found: Numbers) -> None:
        """Sets `values` and `returns` of every scored rollout of a group that has a token.

        A replayed group keeps its values, which are those of an earlier step: `found` computes
        others only if it is asked.
        """
        written = [rollout for rollout in group.rollouts if rollout.token_ids]
        if any(rollout.values is None for rollout in written):
            for rollout, values in found:
                rollout.values = values.tolist()
        for rollout in written:
            if rollout.reward is not None:
                ahead = gae(rollout, of_tokens(rollout), self.lam)
                rollout.returns = (ahead + torch.tensor(rollout.values)).tolist()

    def loss(self, values: Tensor, micro: MicroBatch, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the losses of a micro-batch's tokens, and counts them.

        `values` are of `forward`; `weights`, float32 [n], is the factor of each trained token.
        """
        assert micro.returns is not None, "every group passes `fill` before it is packed"
        returns, now = micro.of_labels(micro.returns), micro.of_labels(values)
        loss = (weights * (now - returns).square() / 2).sum()
        self._count(now, returns, loss)
        return loss

    @torch.no_grad()
    def _count(self, values: Tensor, returns: Tensor, loss: Tensor) -> None:
        """Adds a micro-batch to the sums: for each of its n trained tokens a value and its return,
        float32 [n], NaN where there is none; and the sum of its weighted losses, float32 []."""
        learns = returns.isfinite()
        tokens = torch.full_like(loss, len(returns))
        values, returns = (torch.where(learns, numbers, 0.0) for numbers in (values, returns))
        errors = returns - values
        each = torch.stack(
            [learns.to(values), values, returns, returns.square(), errors, errors.square()]
        )
        whole = torch.stack([tokens, loss]).double()
        self.sums = self.sums.to(values.device) + torch.cat([whole, each.double().sum(1)])

    @property
    def tokens(self) -> int:
        """Trained tokens of the step so far."""
        return round(self.sums[0].item())

    def metrics(self, divisor: int) -> dict[str, float]:
        """Returns the step's metrics, empty if no value was learnt; `sums` must be added up over
        all ranks by then.

        `loss`: the sum of the weighted losses over `divisor`, as the policy's. `value_mean`,
        `return_mean`: in units of reward. `explained_variance`: 1 - Var(R - V) / Var(R); 1 for
        perfect values, 0 for a constant; left out where all returns are the same.
        """
        _, loss, n, *sums = self.sums.tolist()
        if not n:
            return {}
        value, return_, return_squared, error, error_squared = (one / n for one in sums)
        variance = return_squared - return_**2
        metrics = {"loss": loss / divisor, "value_mean": value, "return_mean": return_}
        if variance > 1e-9:  # below it is rounding
            metrics["explained_variance"] = 1 - (error_squared - error**2) / variance
        return metrics

    def begin_step(self, device: torch.device) -> None:
        """Empties the sums; they gather on `device`."""
        self.sums = torch.zeros(8, dtype=torch.float64, device=device)

    def end_step(self) -> None:
        """Is called after each optimizer step."""


def apply_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns the numbers of a value head: float32 [n, outputs], of hidden states [n, H]."""
    # In float32, also under autocast: a value is a difference of rewards.
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
