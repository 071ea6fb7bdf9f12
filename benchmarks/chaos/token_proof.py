"""A check of every trained token: its behaviour log-prob is computed again under the weights of the
version it names.

A token written by half-updated weights agrees with no version. Responses that moved from one
generator to another are checked apart: the versions of their last chunk are a lower bound
(`lrl.generators.client`), so a newer version may have written a token there, up to the one
that trained it.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch.nn.functional import log_softmax

from lrl.callbacks.base import run_of
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.types import Group, Prompt, Rollout

BATCH = 64
"""Responses in one forward pass."""


@dataclass(frozen=True)
class Proof:
    """The result of the check; differences in nats."""

    tokens: int
    """Trained tokens that were computed again."""
    difference: float
    """The largest under the version a token names, over responses that stayed on one generator."""
    carried: int
    """Tokens of responses that continued on another generator."""
    carried_difference: float
    """The largest among those, under the best version from the one named to the trainer's."""
    under_the_version_before: float
    """The largest of the tokens that stayed, under the version before the one they name: what a
    generator with a missed sync would show."""
    largest_lag: int
    groups: int
    """Groups trained."""
    missing: int
    """Indices in the run's order of prompts, up to that number, that were not trained once."""


class TokenRecorder(L.Callback):
    """Keeps the weights of every version, every trained group, and the responses that moved to
    another generator.

    Put it before `WeightSync`, so that it sees a step's groups before a sync fails.
    """

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.groups: list[tuple[int, Group]] = []
        self._carried: list[Rollout] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module)
        for pool in run_of(trainer).fleet.pools:
            self._listen(pool)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self._keep(trainer, pl_module)
        stream = run_of(trainer).step_stream
        self.groups += [(stream.step, group) for group in stream.groups]

    def _keep(self, trainer: L.Trainer, policy: Any) -> None:
        self.weights[trainer.global_step] = copy.deepcopy(policy.network.state_dict())

    def _listen(self, pool: GeneratorPool) -> None:
        """Wraps the pool's requests: a response that a generator leaves unfinished moves to another
        one."""
        write = pool._write

        async def watched(
            generator: Generator, prompt: Prompt, rollouts: list[Rollout], *more: Any, **how: Any
        ) -> None:
            await write(generator, prompt, rollouts, *more, **how)
            self._carried += [rollout for rollout in rollouts if not rollout.finished]

        pool._write = watched  # type: ignore[method-assign]

    def verify(self, network: torch.nn.Module, temperature: float) -> Proof:
        """Computes every trained token again; `network` is loaded with one version after the
        other."""
        network.eval()
        found = {
            version: self._under(network, version, temperature) for version in sorted(self.weights)
        }
        carried = {id(rollout) for rollout in self._carried}
        stayed, moved, before, lags = [0.0], [0.0], [0.0], []
        for step, rollout in self._rollouts():
            tokens = zip(rollout.logprobs, rollout.versions, strict=True)
            for place, (behaviour, named) in enumerate(tokens):
                lags.append(step - named)
                off = {
                    version: abs(found[version][id(rollout)][place] - behaviour)
                    for version in range(max(0, named - 1), step + 1)
                }
                if id(rollout) in carried:
                    moved.append(min(off[version] for version in off if version >= named))
                else:
                    stayed.append(off[named])
                    before.append(off[max(0, named - 1)])
        places = Counter(group.index for _, group in self.groups)
        return Proof(
            tokens=len(lags),
            difference=max(stayed),
            carried=len(moved) - 1,
            carried_difference=max(moved),
            under_the_version_before=max(before),
            largest_lag=max(lags),
            groups=len(self.groups),
            missing=sum(places[place] != 1 for place in {*places, *range(len(self.groups))}),
        )

    def _rollouts(self) -> list[tuple[int, Rollout]]:
        return [(step, rollout) for step, group in self.groups for rollout in group.rollouts]

    def _under(
        self, network: torch.nn.Module, version: int, temperature: float
    ) -> dict[int, list[float]]:
        """Returns the log-prob of each token in nats, by `id` of the rollout."""
        network.load_state_dict(self.weights[version])
        # Of one length: no padding, whatever the attention makes of it.
        by_length: dict[int, list[tuple[list[int], Rollout]]] = defaultdict(list)
        for step, group in self.groups:
            prompt = group.prompt.token_ids
            for rollout in group.rollouts:
                if rollout.versions and rollout.versions[0] - 1 <= version <= step:
                    by_length[len(prompt) + len(rollout.token_ids)].append((prompt, rollout))
        logprobs: dict[int, list[float]] = {}
        for responses in by_length.values():
            for start in range(0, len(responses), BATCH):
                logprobs |= recomputed(network, responses[start : start + BATCH], temperature)
        return logprobs


@torch.no_grad()
def recomputed(
    network: Any, responses: list[tuple[list[int], Rollout]], temperature: float
) -> dict[int, list[float]]:
    """Returns the log-prob of each token in nats, by `id` of the rollout; prompt and response have
    one total length."""
    ids = torch.tensor([prompt + rollout.token_ids for prompt, rollout in responses])
    logprobs = log_softmax(network(ids).logits[:, :-1].float() / temperature, -1)
    taken = logprobs.gather(2, ids[:, 1:, None])[:, :, 0]  # (responses, tokens - 1)
    pairs = zip(responses, taken.tolist(), strict=True)
    return {id(rollout): row[len(prompt) - 1 :] for (prompt, rollout), row in pairs}
