"""The critics (`model.critic`): a value head on the last hidden state of the policy or of a model of
its own.

Values are computed when a rollout's group reaches its step. The weights are a parameter group of
the policy's optimizer, because Lightning counts the steps of every optimizer, and a version of the
policy is one step. They are neither sent to generators nor exported.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.advantages import discounted, gae, of_tokens, rewards_by_action
from lrl.errors import ConfigError, above, at_least
from lrl.system.ranks import Ranks
from lrl.training.collate import Numbers
from lrl.training.logprobs import decoder_of, last_hidden
from lrl.training.model import ModelSource, open_on_ranks
from lrl.training.sharding import own_part
from lrl.training.trials import Shared, shared_by_responses
from lrl.types import Group, MicroBatch, Rollout, TurnValues

FIRST_SPREAD = 0.1
"""Standard deviation of the first values of a `TurnCritic`, over states of unit size. Twins that
began at 0 would stay equal, because they learn from equal targets."""


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

    responses_share = Shared(rows=True, prefixes=True)
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
        self.sums = ValueSums()
        self.trunk: PreTrainedModel | None = None
        """The decoder of the model of its own; None before it is opened, and without one."""

    @property
    def kind(self) -> str:
        """The kind of critic that a checkpoint must have been made with."""
        return "a head on the policy" if self.model is None else "a model of its own"

    @property
    def trunks(self) -> list[PreTrainedModel]:
        """The opened decoders of its own."""
        return [] if self.trunk is None else [self.trunk]

    def open(
        self,
        policy: PreTrainedModel,
        source: ModelSource,
        device: torch.device,
        ranks: Ranks,
        in_parts: bool = False,
    ) -> PreTrainedModel | None:
        """Opens the model, if there is one, as `source` but from its own folder (`open_on_ranks`),
        and makes the head. Returns the decoder with its weights, if this rank has them."""
        if self.model is None:
            self._add_head(policy)
            return None
        own = replace(source, folder=self.model)
        network, whole = open_on_ranks(own, device, ranks, in_parts)
        if whole is not None:
            self.responses_share = shared_by_responses(whole)
        self.responses_share = ranks.share(self.responses_share).under(network)
        self.trunk = decoder_of(network)
        self._add_head(network)
        return None if whole is None else decoder_of(whole)

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
        self.sums.add(now, returns, loss, tokens=len(now))
        return loss

    def end_step(self) -> None:
        """Is called after each optimizer step."""


def apply_head(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns the numbers of a value head: float32 [n, outputs], of hidden states [n, H]."""
    # In float32, also under autocast: a value is a difference of rewards.
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())


class ValueSums:
    """Sums of values, returns and errors over the trained tokens (of `lrl.TurnCritic`: turns) of
    one step, gathered micro-batch by micro-batch."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(8, dtype=torch.float64, device=device)
        """Tokens, weighted losses, and of the values that are learnt: their number, values,
        returns, squared returns, errors, squared errors."""

    @property
    def tokens(self) -> float:
        """Tokens so far."""
        return self.sums[0].item()

    @torch.no_grad()
    def add(self, values: Tensor, returns: Tensor, loss: Tensor, tokens: int) -> None:
        """Adds one micro-batch: n values and their returns, float32 [n] each, NaN where there is
        none; the sum of its weighted losses, float32 []; and its trained tokens."""
        learns = returns.isfinite()
        values, returns = (torch.where(learns, numbers, 0.0) for numbers in (values, returns))
        errors = returns - values
        each = torch.stack(
            [learns.to(values), values, returns, returns.square(), errors, errors.square()]
        )
        whole = torch.stack([torch.full_like(loss, tokens), loss]).double()
        self.sums = self.sums.to(values.device) + torch.cat([whole, each.double().sum(1)])

    def result(self, divisor: int) -> dict[str, float]:
        """Returns the step's metrics; empty if it had no value.

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


# ---- of turns


class TurnCritic(Critic):
    """Twin values of the state before a turn (V1, V2) and of the turn in it (Q1, Q2): ArCHer's
    critic (2402.19446), for `lrl.advantages.ArCHer`.

    V is read before the turn's first token, Q behind its last one. A slow copy of the weights, the
    target, says what each learns, so older groups (`data.replay`) teach it, too. With r the turn's
    reward and s' the state before the next turn:

        Q_i: r + gamma V_i_target(s')      V_i: Q_i_target(s, a)

    where V_target is 0 behind the last turn, and a is the turn that the episode has. The loss of
    each is half its squared error; in the sum of the step a turn counts as one token does.

    Args:
        model: As of `lrl.Critic`. A model of its own has a slow copy of all of its weights, heads
            on the policy of themselves alone.
        lr: As of `lrl.Critic`.
        gamma: Discount of a turn, in [0, 1].
        tau: Share of the new weights in the target after each step, above 0 and at most 1.
        value_only_steps: As of `lrl.Critic`; many, because a reward takes about 1 / `tau` steps to
            get one turn further back.
        max_grad_norm: As of `lrl.Critic`.
    """

    of_turns = True
    outputs = 4

    def __init__(
        self,
        model: str | None = None,
        lr: float = 1e-5,
        gamma: float = 1.0,
        tau: float = 0.1,
        value_only_steps: int = 100,
        max_grad_norm: float | None = 1.0,
    ) -> None:
        super().__init__(model, lr, value_only_steps=value_only_steps, max_grad_norm=max_grad_norm)
        if not 0 <= gamma <= 1:
            raise ConfigError(f"model.critic.gamma is {gamma}; it must be in [0, 1].")
        if not 0 < tau <= 1:
            raise ConfigError(f"model.critic.tau is {tau}; it must be above 0 and at most 1.")
        self.gamma = gamma
        self.tau = tau
        self.target_trunk: PreTrainedModel | None = None
        """The slow copy of `trunk`; None without one."""

    @property
    def kind(self) -> str:
        return f"{super().kind}, of turns"

    @property
    def trunks(self) -> list[PreTrainedModel]:
        return super().trunks + ([] if self.target_trunk is None else [self.target_trunk])

    def _add_head(self, network: PreTrainedModel) -> None:
        super()._add_head(network)
        weight = self.head.weight
        # The same numbers on every rank.
        numbers = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            weight.copy_(numbers * FIRST_SPREAD / weight.shape[1] ** 0.5)
        self.target_head = copy.deepcopy(self.head).requires_grad_(False)
        if self.trunk is not None:
            self.target_trunk = copy.deepcopy(self.trunk).requires_grad_(False)

    def forward(self, hidden: Tensor | None, micro: MicroBatch) -> Tensor:
        """Returns for each label V1 and V2 before it, and Q1 and Q2 behind it; without gradient
        also those four of the target: float32 [R, L, 4 or 8], 0 outside the mask."""
        state = self._hidden(hidden, micro)
        found = _twins(self.head, state, micro)
        if not torch.is_grad_enabled():
            if self.target_trunk is not None:
                state = last_hidden(self.target_trunk, micro)
            found = torch.cat([found, _twins(self.target_head, state, micro)], 1)
        return micro.at_labels(found)

    def fill(self, group: Group, found: Numbers) -> None:
        """Sets `turn_values` of every scored rollout of a group that has a token; a replayed group
        gets new ones, of the critic as it is now."""
        for rollout, values in found:
            if rollout.reward is not None:
                rollout.turn_values = self._turn_values(rollout, values)

    def _turn_values(self, rollout: Rollout, found: Tensor) -> list[TurnValues]:
        """Returns what `forward` says, float32 [tokens, 8], of each turn of a scored rollout."""
        turns = rollout.turns
        rewards = rewards_by_action(rollout, turns)
        before = found[[turn.start for turn in turns]]
        behind = found[[turn.stop - 1 for turn in turns]]
        next_state = torch.cat([before[1:, 4:6], torch.zeros(1, 2)])
        of_action = torch.tensor(rewards)[:, None] + self.gamma * next_state
        of_state = behind[:, 6:8]
        return [
            TurnValues(state, action, (v1, v2, q1, q2), to_go)
            for state, action, (v1, v2, q1, q2), to_go in zip(
                before[:, :2].amin(1).tolist(),
                behind[:, 2:4].amin(1).tolist(),
                torch.cat([of_state, of_action], 1).tolist(),
                discounted(rewards, self.gamma),
                strict=True,
            )
        ]

    def loss(self, values: Tensor, micro: MicroBatch, weights: Tensor) -> Tensor:
        """Returns the weighted sum of the losses of a micro-batch's turns, and counts them; a value
        whose label is not trained is left out."""
        assert micro.turn_targets is not None, "every group passes `fill` before it is packed"
        now = micro.of_labels(values)
        targets, to_go = micro.of_labels(micro.turn_targets).split([4, 1], dim=1)
        errors = torch.where(targets.isfinite(), now - targets.nan_to_num(), 0.0)
        loss = (weights[:, None] * errors.square() / 2).sum()
        self.sums.add(now[:, :2].amin(1), to_go[:, 0], loss, tokens=len(now))
        return loss

    @torch.no_grad()
    def end_step(self) -> None:
        """Moves the target by `tau` towards the weights."""
        for target, module in (self.target_head, self.head), (self.target_trunk, self.trunk):
            if target is not None and module is not None:
                for slow, weight in zip(target.parameters(), module.parameters(), strict=True):
                    own_part(slow).lerp_(own_part(weight), self.tau)


def _twins(head: nn.Linear, state: Tensor, micro: MicroBatch) -> Tensor:
    """Returns V1 and V2 before each trained label, Q1 and Q2 behind it: float32 [n, 4].

    A label is the token at the next place of its row, so the state there has read it.
    """
    states, places = state.flatten(0, 1), micro.index.places
    before = apply_head(head, states.index_select(0, places))
    behind = apply_head(head, states.index_select(0, places + 1))
    return torch.cat([before[:, :2], behind[:, 2:]], 1)
