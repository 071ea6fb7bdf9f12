"""Whether responses that are trained together see each other, found by trying it on the model that will be trained.

Attention that knows where a response begins (transformers tells it from `position_ids`) keeps responses of one row
apart. Recurrent layers, convolutions and positions that are counted along the row do not, nor do some kinds of
attention, and no config says so. So a few sequences go through the model three times:

    alone      each by itself, without padding: the truth
    one a row  each in a row of its own, with padding behind it
    packed     two in a row, in rows of the same length

One a row may differ from alone by rounding, since every shape is another one; by more, and the model is refused. Packed
may differ from one a row by no more than that; by more, and each response gets a row of its own. Log-probs and the
gradient of the first layer are compared. The gradient's gap is relative: it shows a leak also where small weights make
all log-probs alike.

What is smaller than rounding is not seen, nor what begins only behind the length that is tried.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.runtime.config_errors import ConfigError
from lrl.training.collate import Sequence, fill_rows
from lrl.training.model import decoder_of, label_logprobs, runs
from lrl.types import Rollout

log = logging.getLogger(__name__)

LENGTHS = (33, 13, 17, 9, 7)
"""Tokens of each sequence. The first one is as long as every row."""
NOISE = 2
"""How much more two layouts of equal row length may differ than rounding makes two of different length differ."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the same sequences are apart in two layouts."""

    nats: float
    """Largest difference of a log-prob."""
    gradient: float
    """L2 norm of the difference of the first layer's gradient, over the norm of the gradient."""

    def within(self, most: Gap) -> bool:
        """Whether both are numbers, and at most these."""
        return self.nats <= most.nats and self.gradient <= most.gradient

    def __str__(self) -> str:
        return f"{self.nats:.2g} nats in a log-prob, {self.gradient:.1%} in the gradient of the first layer"


ROUNDING = {torch.float32: Gap(1e-3, 1e-2), torch.bfloat16: Gap(0.25, 0.1)}
"""The most that other shapes may change by rounding. Seen on a CPU: 1e-6 nats and 3e-6 of the gradient in float32; in
bfloat16 0.05 and 0.03, at 48 layers of random weights four times their usual size."""
LEAST = Gap(1e-4, 1e-4)
"""What two layouts of equal row length may differ in any case."""


def check_rows(network: PreTrainedModel) -> None:
    """One response a row, several rows of different lengths in a batch: each as if it were alone.

    Raises:
        ValueError: They are not.
    """
    _Trial(network).check_rows()


def may_share_rows(network: PreTrainedModel) -> bool:
    """Whether several responses in one row are as if each were alone; logs a warning if they are not.

    Raises:
        ValueError: Not even one response a row is.
    """
    trial = _Trial(network)
    rounding = trial.check_rows()
    packed = _gap(trial.found(_PACKED), trial.one_a_row)
    if packed.within(Gap(max(LEAST.nats, NOISE * rounding.nats), max(LEAST.gradient, NOISE * rounding.gradient))):
        return True
    rank_zero_only(log.warning)(
        "model=%r: in %s, responses that share a row see each other (%s). Each gets a row of its own, padded to the "
        "longest in its micro-batch: rollouts/padding is what that costs.",
        *(network.name_or_path, type(network).__name__, packed),
    )
    return False


class _Found(NamedTuple):
    """What a layout gives; sequences always come in the same order."""

    logprobs: Tensor
    """float32 [labels]."""
    gradient: Tensor
    """float32 [numbers in the first layer]."""


_Layout = list[list[list[int]]]
"""Micro-batches of rows of sequences, by their number."""
_ALONE: _Layout = [[[0]], [[1]], [[2]], [[3]], [[4]]]
_ONE_A_ROW: _Layout = [[[0], [1], [2], [3], [4]]]
_PACKED: _Layout = [[[0], [1, 2], [3, 4]]]


class _Trial:
    """One network, and what it makes of the sequences."""

    def __init__(self, network: PreTrainedModel) -> None:
        self._network = network
        self._layer = _first_layer(network)
        ends = network.get_input_embeddings(), network.get_output_embeddings()
        vocabulary = min(len(end.weight) for end in ends)  # some have tokens that are only read
        self._sequences = _sequences(vocabulary, getattr(network.config.get_text_config(), "pad_token_id", None))
        self.one_a_row = self.found(_ONE_A_ROW)

    def check_rows(self) -> Gap:
        """What rounding does; see `check_rows` below."""
        gap = _gap(self.one_a_row, self.found(_ALONE))
        if gap.within(ROUNDING[self._network.dtype]):
            return gap
        raise ConfigError(
            f"model={self._network.name_or_path!r}: {type(self._network).__name__} gives a response that is padded, or "
            f"in a batch with others, other log-probs than alone ({gap}). It cannot be trained: take another model"
            f"{f', or another attention than {attention!r}' if (attention := self._attention) else ''}."
        )

    @property
    def _attention(self) -> str | None:
        return self._network.config._attn_implementation

    def found(self, layout: _Layout) -> _Found:
        """Log-probs and the gradient of a sum of them; leaves no gradient and no random state behind."""
        logprobs, gradient = list[Tensor](), torch.zeros(())
        for rows in layout:
            micro = fill_rows([[self._sequences[number] for number in row] for row in rows], temperature=1.0)
            micro = micro.to(self._network.device)
            with runs(self._network), torch.random.fork_rng(_seeded(self._network.device)), torch.enable_grad():
                found = label_logprobs(self._network, micro, chunk_tokens=sum(LENGTHS))
                parts = torch.autograd.grad((micro.advantages * found).sum(), self._layer, materialize_grads=True)
            logprobs.append(found.detach()[micro.mask])
            gradient = gradient.to(micro.mask.device) + torch.cat([part.flatten().float() for part in parts])
        return _Found(torch.cat(logprobs), gradient)


def _seeded(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _gap(one: _Found, other: _Found) -> Gap:
    nats = (one.logprobs - other.logprobs).abs().max().item()
    norm = other.gradient.norm().clamp_min(torch.finfo(torch.float32).tiny)
    return Gap(nats, ((one.gradient - other.gradient).norm() / norm).item())


def _first_layer(network: PreTrainedModel) -> list[nn.Parameter]:
    """The weights of the first of the decoder's layers."""
    for module in decoder_of(network).modules():
        if isinstance(module, nn.ModuleList) and len(module):
            weights = [weight for weight in module[0].parameters() if weight.requires_grad]
            if weights:
                return weights
    raise ConfigError(f"model={network.name_or_path!r}: {type(network).__name__} has no list of layers to train.")


def _sequences(vocabulary: int, padding: int | None) -> list[Sequence]:
    """Random tokens, always the same; every one but the first is a label, with a weight of its own.

    None is the token for padding: many models embed it as zeros, and those that attend to the best few tokens find them
    all equally good for it.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = [token for token in range(vocabulary) if token != padding]
    found = []
    for number, length in enumerate(LENGTHS):
        first, *rest = [tokens[at] for at in torch.randint(len(tokens), (length,), generator=draw)]
        rollout = Rollout(token_ids=rest, logprobs=[0.0] * len(rest), versions=[0] * len(rest))
        found.append(Sequence(number, [first], rollout, torch.linspace(-1, 1, len(rest)), [True] * len(rest)))
    return found
