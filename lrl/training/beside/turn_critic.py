"""The critic of turns: twin values of the state before a turn, and of the turn in it."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.advantages import discounted, rewards_by_action
from lrl.errors import ConfigError
from lrl.training.beside.critic import Critic, apply_head
from lrl.training.collate import Numbers
from lrl.training.logprobs import last_hidden
from lrl.training.sharding import own_part
from lrl.types import Group, MicroBatch, Rollout, TurnValues

FIRST_SPREAD = 0.1
"""Standard deviation of the first values of a `TurnCritic`, over states of unit size. Twins that
began at 0 would stay equal, because they learn from equal targets."""


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
        self._count(now[:, :2].amin(1), to_go[:, 0], loss)
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
