"""Trial of whether a model keeps responses apart that are trained together.

Attention that reads from `position_ids` where a response begins keeps responses of one row apart.
Recurrent layers, convolutions, positions counted along the row and some kinds of attention do not,
and no config says so. So a few sequences go through the model three times:

    alone      each by itself, without padding: the truth
    unpacked   each in its own row, padded
    packed     two in a row, in rows of the same length

Responses that share their first tokens in one row (`lrl.training.prefix_tree`) go through it twice:
unpacked, and as a tree of three beside another response. If these differ, or the model takes no
mask, each response carries its own prompt.

Unpacked may differ from alone by rounding, since the shapes differ; if it differs by more, the
model is refused. Packed may differ from unpacked by no more than that; else each response gets its
own row. Where packed fails, it is tried again with a mask of `lrl.training.attention_masks`, which
each micro-batch then carries. Log-probs and the gradient of the first layer are compared. Of the
log-probs not the largest difference counts: in 16 bits it is that of a token which the model takes
for all but impossible. The gap of the gradient is relative, so it shows a leak also if small
weights make all log-probs alike. How far rounding reaches in 16 bits is measured on the model
(`lrl.training.rounding`).

Windows, chunks and top-k sizes reach thousands of tokens, and what is behind them is read otherwise.
So the model is tried with small ones: a model of the same class, of a config in which they are
smaller than the trial's sequences, with the same weights (`narrowed`).

A leak smaller than rounding is not found.
"""

import copy
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrl.errors import ConfigError
from lrl.training.attention_masks import WITH_MASKS, unknown_layers
from lrl.training.collate import fill_rows
from lrl.training.model import decoder_of, label_logprobs, trial_pass
from lrl.training.prefix_tree import PrefixTree, TrainingSample, text_sequence
from lrl.training.rounding import rounding_errors
from lrl.training.sharding import parameters_without_memory

log = logging.getLogger(__name__)

LENGTHS = (33, 13, 17, 9, 7)
"""Tokens of each sequence. The first one is as long as every row."""
PREFIX, BRANCHES = 9, (12, 5, 7)
"""Tokens that the branches of the tree share, and of each branch."""
NARROW = 4
"""Windows, chunks and top-k sizes of the trial, in tokens."""
REACH = re.compile("window|chunk|topk|block_size|local_attention|budget")
"""Names of settings that say how far a token reads, or how many it reads."""
ROUNDING_MULTIPLE = 2
"""Two layouts of equal row length may differ by so many times the rounding between layouts of
different length."""


HIGH_QUANTILE = 0.9
"""The quantile of the differences that counts besides their mean. A leak reaches most tokens of a
response."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference of the same sequences in two layouts."""

    mean: float
    """Mean difference of a log-prob, in nats."""
    high: float
    """The quantile `HIGH_QUANTILE` of the differences, in nats."""
    gradient: float
    """L2 norm of the difference of the first layer's gradient, over the norm of the gradient."""

    def within(self, limit: Self) -> bool:
        """Returns whether all are numbers, and at most these."""
        return (
            self.mean <= limit.mean and self.high <= limit.high and self.gradient <= limit.gradient
        )

    def at_least(self, least: Self, times: float = 1.0) -> "Gap":
        """Returns this many times the gap, in each part at least `least`."""
        return Gap(
            mean=max(least.mean, times * self.mean),
            high=max(least.high, times * self.high),
            gradient=max(least.gradient, times * self.gradient),
        )

    def __str__(self) -> str:
        return (
            f"{self.mean:.2g} nats in a log-prob, {self.gradient:.1%} in the gradient of the first "
            "layer"
        )


MAX_GAP_FLOAT32 = Gap(mean=5e-4, high=1e-3, gradient=1e-2)
"""Limit for rounding between different shapes in float32; measured on a CPU: 1e-6 nats and 3e-6 of
the gradient."""
MIN_GAP_16_BITS = Gap(mean=1e-3, high=2e-3, gradient=2e-2)
"""The same in 16 bits, for a model that hardly rounds."""
ALWAYS_ALLOWED_GAP = Gap(mean=1e-4, high=1e-4, gradient=1e-4)
"""Difference that two layouts of equal row length may always have."""


def check_rows(network: PreTrainedModel) -> None:
    """Raises ValueError unless padded responses in rows of their own are computed as if each were
    alone."""
    _Trial(narrowed(network), _sequences).check_rows()


def narrowed(network: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class and weights, with windows, chunks and top-k sizes that end
    within the trial's sequences."""
    config = copy.deepcopy(network.config)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if type(value) is int and value > NARROW and REACH.search(name):
                setattr(part, name, NARROW)
    attention = network.config._attn_implementation
    with parameters_without_memory():
        narrow = type(network)._from_config(
            config, dtype=network.dtype, attn_implementation=attention
        )
    for own, theirs in zip(network.modules(), narrow.modules(), strict=True):
        theirs._parameters = own._parameters
        learned = own._buffers.keys() - own._non_persistent_buffers_set
        theirs._buffers |= {name: own._buffers[name] for name in learned}
    return narrow.to(network.device)


class Shared(NamedTuple):
    """The things that the responses of a model may share in training: rows and prompts."""

    rows: bool = False
    prefixes: bool = False
    """Their first tokens; only with rows."""
    masks: bool = False
    """Whether they share rows only with a mask of lrl's own."""

    def also(self, other: Self) -> "Shared":
        """Returns what both may share."""
        masks, prefixes = self.masks or other.masks, self.prefixes and other.prefixes
        # A mask holds for whatever may share prefixes.
        rows = self.rows and other.rows and (self.masks == other.masks or prefixes)
        return Shared(rows, rows and prefixes, rows and masks)


def shared_by_responses(network: PreTrainedModel) -> Shared:
    """Returns what responses may share and still be computed as if each were alone: rows, without a
    mask or with one, and their first tokens. Logs a warning for what they may not.

    Raises ValueError if not even responses in rows of their own are.
    """
    network = narrowed(network)
    found = _shared_rows(network)
    return found._replace(prefixes=found.rows and may_share_prefixes(network))


def _shared_rows(network: PreTrainedModel) -> Shared:
    trial = _Trial(network, _sequences)
    allowed = trial.check_rows().at_least(ALWAYS_ALLOWED_GAP, times=ROUNDING_MULTIPLE)
    packed = _gap(trial.packed(), trial.unpacked)
    if packed.within(allowed):
        return Shared(rows=True)
    if not _takes_no_mask(network):
        with suppress(ConfigError):  # the model fails with a mask
            if _gap(trial.packed(masks=True), trial.unpacked).within(allowed):
                return Shared(rows=True, masks=True)
    rank_zero_only(log.warning)(
        "model=%r: in %s, responses that share a row see each other (%s). Each gets a row of its "
        "own, padded to the longest in its micro-batch: rollouts/padding is what that costs.",
        *(network.name_or_path, type(network).__name__, packed),
    )
    return Shared()


def _takes_no_mask(network: PreTrainedModel) -> str:
    """Returns why lrl can make no mask for a network; nothing if it can."""
    attention = network.config._attn_implementation
    if attention not in WITH_MASKS:
        return f"its attention {attention!r} takes no mask"
    kinds = unknown_layers(decoder_of(network).config)
    return f"lrl knows no mask for its layers of {', '.join(sorted(kinds))}" if kinds else ""


def may_share_prefixes(network: PreTrainedModel) -> bool:
    """Returns whether responses that share their first tokens in a row are computed as if each were
    alone; else logs a warning. Call it for a network whose responses may share rows."""
    if why := _takes_no_mask(network):
        _warn_of_copies(network, why)
        return False
    trial = _Trial(network, _branches)
    tree = PrefixTree(trial.samples[:-1], PREFIX - 1)
    try:
        found = trial.run([[[tree, PrefixTree(trial.samples[-1:])]]])
    except ConfigError as error:
        _warn_of_copies(network, str(error))
        return False
    gap = _gap(found, trial.unpacked)
    if gap.within(trial.rounding().at_least(ALWAYS_ALLOWED_GAP, times=ROUNDING_MULTIPLE)):
        return True
    _warn_of_copies(network, f"responses that share their first tokens differ by {gap}")
    return False


@rank_zero_only
def _warn_of_copies(network: PreTrainedModel, why: str) -> None:
    log.warning(
        "model=%r: each response carries its own copy of the prompt through training, because in "
        "%s %s. With long prompts a step takes several times as long.",
        *(network.name_or_path, type(network).__name__, why),
    )


class _Result(NamedTuple):
    """Results of one layout; samples always come in the same order."""

    logprobs: Tensor  # float32 [labels]
    gradient: Tensor  # float32 [numbers in the first layer]


_Layout = list[list[list[PrefixTree]]]
"""Micro-batches of rows of trees."""


class _Trial:
    """One network and the samples of its trial.

    Args:
        network: The network.
        samples: Makes the samples from a source of random tokens.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        samples: Callable[[Callable[[int], list[int]]], list[TrainingSample]],
    ) -> None:
        self._network = network
        self._layer = _first_layer(network)
        ends = network.get_input_embeddings(), network.get_output_embeddings()
        # Some models have tokens that they only read.
        vocabulary = min(len(end.weight) for end in ends)
        padding = getattr(network.config.get_text_config(), "pad_token_id", None)
        self.samples = samples(_random_tokens(vocabulary, padding))
        for sample in self.samples:
            sample.advantages = torch.linspace(-1, 1, len(sample.trained))
        self._alone = [PrefixTree([sample]) for sample in self.samples]
        self.unpacked = self.run([[[tree] for tree in self._alone]])

    def packed(self, masks: bool = False) -> _Result:
        """Returns the result of rows as long as the first sample, with two of the others in each;
        with lrl's own masks or without."""
        first, *others = self._alone
        pairs = [list(pair) for pair in zip(others[::2], others[1::2], strict=True)]
        return self.run([[[first], *pairs]], masks)

    def check_rows(self) -> Gap:
        """Returns the effect of rounding. See the function `check_rows`."""
        gap = _gap(self.unpacked, self.run([[[tree]] for tree in self._alone]))
        if gap.within(self.rounding()):
            return gap
        attention = self._network.config._attn_implementation
        raise ConfigError(
            f"model={self._network.name_or_path!r}: {type(self._network).__name__} gives a "
            "response that is padded, or in a batch with others, other log-probs than alone "
            f"({gap}). It cannot be trained: take another model"
            f"{f', or another attention than {attention!r}' if attention else ''}."
        )

    def rounding(self) -> Gap:
        """Returns the largest gap between layouts of different shapes that rounding explains."""
        if self._network.dtype == torch.float32:
            return MAX_GAP_FLOAT32
        with rounding_errors(self._network, "bfloat16"):
            again = self.run([[[tree] for tree in self._alone]])
        return _gap(again, self.unpacked).at_least(MIN_GAP_16_BITS, times=ROUNDING_MULTIPLE)

    def run(self, layout: _Layout, masks: bool = False) -> _Result:
        """Returns log-probs and the gradient of their weighted sum; leaves gradients and random
        state as they were."""
        device = self._network.device
        logprobs, gradient = list[Tensor](), torch.zeros((), device=device)
        for rows in layout:
            micro = fill_rows(rows, temperature=1.0, masks=masks).to(device)
            seeded = [device] if device.type == "cuda" else []
            with (
                trial_pass(self._network),
                torch.random.fork_rng(seeded),
                torch.enable_grad(),
            ):
                found = label_logprobs(self._network, micro, chunk_tokens=sum(LENGTHS))
                parts = torch.autograd.grad(
                    (micro.advantages * found).sum(), self._layer, materialize_grads=True
                )
            logprobs.append(found.detach()[micro.mask])
            gradient = gradient + torch.cat([part.flatten().float() for part in parts])
        return _Result(torch.cat(logprobs), gradient)


def _gap(one: _Result, other: _Result) -> Gap:
    nats = (one.logprobs - other.logprobs).abs()
    norm = other.gradient.norm().clamp_min(torch.finfo(torch.float32).tiny)
    gradient = ((one.gradient - other.gradient).norm() / norm).item()
    return Gap(nats.mean().item(), nats.quantile(HIGH_QUANTILE).item(), gradient)


def _first_layer(network: PreTrainedModel) -> list[nn.Parameter]:
    for module in decoder_of(network).modules():
        first = next(iter(module), None) if isinstance(module, nn.ModuleList) else None
        if first is not None and (
            weights := [weight for weight in first.parameters() if weight.requires_grad]
        ):
            return weights
    raise ConfigError(
        f"model={network.name_or_path!r}: {type(network).__name__} has no list of layers to train."
    )


def _random_tokens(vocabulary: int, padding: int | None) -> Callable[[int], list[int]]:
    """Returns a source of random tokens, always the same."""
    draw = torch.Generator().manual_seed(0)
    # Many models embed the padding token as zeros. An attention to the best few tokens finds all
    # equally good for it.
    tokens = [token for token in range(vocabulary) if token != padding]

    def drawn(length: int) -> list[int]:
        return [tokens[at] for at in torch.randint(len(tokens), (length,), generator=draw)]

    return drawn


def _sequences(drawn: Callable[[int], list[int]]) -> list[TrainingSample]:
    """Returns sequences of `LENGTHS`; every token but the first is a label."""
    return [text_sequence(drawn(length), group=number) for number, length in enumerate(LENGTHS)]


def _branches(drawn: Callable[[int], list[int]]) -> list[TrainingSample]:
    """Returns three responses after one prompt, and a sequence of its own."""
    prompt = drawn(PREFIX)
    found = []
    for length in BRANCHES:
        sample = text_sequence([prompt[-1], *drawn(length)])
        sample.prompt = prompt
        found.append(sample)
    return [*found, text_sequence(drawn(PREFIX), group=1)]
