"""Trials of a model before a server starts: whether it keeps responses apart that are trained
together, and whether generators can merge its adapters. No config says either.

**Responses.** A few sequences go through the model alone, which is the truth, and then in each
layout: padded in rows of their own; two in a row, without a mask or with one of
`lrl.training.varlen`; as a tree that shares its first tokens. Padded may differ from alone by
rounding, which is measured in 16 bits; otherwise the model is refused. The other layouts may differ
by twice what padding does. A leak smaller than rounding is not found.

Windows, chunks and top-k sizes reach thousands of tokens, and a model reads differently beyond
them. So the trial runs on a model of the same class and weights in which they are shorter than the
sequences (`narrowed`).

**Adapters.** A network with adapters must compute W + scale * B A. Some models read a weight
without calling its layer (Mamba's step size): the adapter then does nothing in the trainer, but
everything in the generators, which merge it. Others pack several layers into one weight in their
files. So every W must be the same in a checkpoint as in memory, and the gradient of B must be scale
* dW A^T (2106.09685, equation 3, at B = 0).
"""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lrl.errors import ConfigError
from lrl.training import varlen
from lrl.training.collate import fill_rows
from lrl.training.lora import NAME, adapted_layers
from lrl.training.model import (
    MODEL_ERRORS,
    checkpoint_weights,
    decoder_of,
    label_logprobs,
    other_attention,
    shortened,
    text_as_micro_batch,
    trial_pass,
)
from lrl.training.prefix_tree import PrefixTree, TrainingSample, text_sequence
from lrl.training.rounding import rounding_errors
from lrl.training.sharding import parameters_without_memory

log = logging.getLogger(__name__)

LENGTHS = (33, 13, 17, 9, 7)
"""Tokens of each sequence. The first one is as long as every row."""
PREFIX, BRANCHES = 9, (12, 5, 7)
"""Tokens that the branches of the tree share, and of each branch."""
ADAPTER_TOKENS = 32
NARROW = 4
"""Windows, chunks and top-k sizes of the trial, in tokens."""
REACH = re.compile("window|chunk|topk|block_size|local_attention|budget")
"""Names of settings that say how far a token reads, or how many it reads."""
HIGH_QUANTILE = 0.9
"""The quantile of the differences that counts, too. A leak reaches most tokens of a response."""
ADAPTER_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.1}
"""Largest difference of the two gradients of B, relative to the larger one (L2 norms), by the
format of the pass."""


class Gap(NamedTuple):
    """Difference of the same sequences in two layouts.

    In 16 bits the largest difference of log-probs is that of a token which the model considers all
    but impossible, so the mean and a quantile count. The gradient's gap is relative: it shows a leak
    even if small weights make all log-probs alike.
    """

    mean: float
    """Mean difference of a log-prob, in nats."""
    high: float
    """The quantile `HIGH_QUANTILE` of the differences, in nats."""
    gradient: float
    """L2 norm of the difference of the first layer's gradient, over the norm of the gradient."""

    def within(self, limit: Self) -> bool:
        """Returns whether all are numbers, and at most these."""
        return all(one <= most for one, most in zip(self, limit, strict=True))

    def doubled(self, least: Self) -> "Gap":
        """Returns twice the gap, and at least this."""
        return Gap(*map(max, least, (2 * one for one in self)))

    def __str__(self) -> str:
        return (
            f"{self.mean:.2g} nats in a log-prob, {self.gradient:.1%} in the gradient of the first "
            "layer"
        )


class Result(NamedTuple):
    """Results of one layout; samples always come in the same order."""

    logprobs: Tensor
    """float32 [labels]."""
    gradient: Tensor
    """float32 [numbers in the first layer]."""

    def gap(self, truth: Self) -> Gap:
        """Returns how far this is from the true result."""
        nats = (self.logprobs - truth.logprobs).abs()
        norm = truth.gradient.norm().clamp_min(torch.finfo(torch.float32).tiny)
        gradient = (self.gradient - truth.gradient).norm() / norm
        return Gap(nats.mean().item(), nats.quantile(HIGH_QUANTILE).item(), gradient.item())


MAX_GAP_FLOAT32 = Gap(mean=5e-4, high=1e-3, gradient=1e-2)
"""Limit for rounding in float32; measured on a CPU: 1e-6 nats and 3e-6 of the gradient."""
MIN_GAP_16_BITS = Gap(mean=1e-3, high=2e-3, gradient=2e-2)
"""The same in 16 bits, for a model that hardly rounds."""
ALWAYS_ALLOWED_GAP = Gap(mean=1e-4, high=1e-4, gradient=1e-4)
"""Difference from alone that rows shared by several responses may always have."""


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

    def under(self, network: PreTrainedModel) -> "Shared":
        """Returns what they may share in a network that was tried with another attention, with
        masks."""
        if network.config._attn_implementation in (*varlen.WITH_MASKS, varlen.VARLEN):
            return self
        return Shared(rows=self.rows and not self.masks)


def check_rows(network: PreTrainedModel) -> None:
    """Raises ConfigError unless padded responses are computed as if each were alone."""
    network = narrowed(network)
    _Trial(network, _sequences(network)).check_padded()


def shared_by_responses(network: PreTrainedModel) -> Shared:
    """Returns what responses may share and still be computed as if each were alone: rows, without a
    mask or with one, and their first tokens. Logs a warning for what they may not.

    Raises ConfigError if not even responses in rows of their own are.
    """
    network = narrowed(network)
    trial = _Trial(network, _sequences(network))
    allowed = trial.check_padded().doubled(ALWAYS_ALLOWED_GAP)
    first, *others = trial.trees
    rows = [[first], *map(list, zip(others[::2], others[1::2], strict=True))]
    packed = trial.gap(rows)
    if packed.within(allowed):
        return Shared(rows=True, prefixes=may_share_prefixes(network))
    if not _takes_no_mask(network):
        with suppress(ConfigError):  # the model fails with a mask
            if trial.gap(rows, masks=True).within(allowed):
                return Shared(rows=True, prefixes=may_share_prefixes(network), masks=True)
    rank_zero_only(log.warning)(
        "model=%r: in %s, responses that share a row see each other (%s). Each gets a row of its "
        "own, padded to the longest in its micro-batch: rollouts/padding is what that costs.",
        *(network.name_or_path, type(network).__name__, packed),
    )
    return Shared()


def may_share_prefixes(network: PreTrainedModel) -> bool:
    """Returns whether responses that share their first tokens in a row are computed as if each were
    alone; else logs a warning. Call it for a network whose responses may share rows."""
    why = _takes_no_mask(network)
    if not why:
        trial = _Trial(network, _branches(network))
        try:
            gap = trial.gap(trial.tree_and_other())
        except ConfigError as error:
            why = str(error)
        else:
            if gap.within(trial.padded().doubled(ALWAYS_ALLOWED_GAP)):
                return True
            why = f"responses that share their first tokens differ by {gap}"
    rank_zero_only(log.warning)(
        "model=%r: each response carries its own copy of the prompt through training, because in "
        "%s %s. With long prompts a step takes several times as long.",
        *(network.name_or_path, type(network).__name__, why),
    )
    return False


def cannot_have_varlen(network: PreTrainedModel) -> str:
    """Returns why a network cannot have lrl's own attention in the place of transformers'; nothing
    if log-probs and gradients of trees are those that each response has alone without it."""
    if not network._supports_flash_attn or not network._can_set_attn_implementation():
        return "transformers has no flash attention for it"
    network = narrowed(network)
    trial = _Trial(network, _branches(network))
    network.set_attn_implementation(varlen.VARLEN)
    try:
        gap, rounding = trial.gap(trial.tree_and_other()), trial.rounding()
    except ConfigError as error:
        return str(error.__cause__)
    return "" if gap.within(rounding) else f"responses then differ by {gap}"


def narrowed(network: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class and weights, with windows, chunks and top-k sizes that end
    within the trial's sequences; in the place of lrl's own attention it has transformers'."""
    config = copy.deepcopy(network.config)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if type(value) is int and value > NARROW and REACH.search(name):
                setattr(part, name, NARROW)
    attention = network.config._attn_implementation
    if attention == varlen.VARLEN:
        attention = None
    with parameters_without_memory():
        narrow = type(network)._from_config(
            config, dtype=network.dtype, attn_implementation=attention
        )
    for own, theirs in zip(network.modules(), narrow.modules(), strict=True):
        theirs._parameters = own._parameters
        learned = own._buffers.keys() - own._non_persistent_buffers_set
        theirs._buffers |= {name: own._buffers[name] for name in learned}
    return narrow.to(network.device)


def _takes_no_mask(network: PreTrainedModel) -> str:
    """Returns why lrl can make no mask for a network; nothing if it can."""
    attention = network.config._attn_implementation
    if attention not in varlen.WITH_MASKS:
        return f"its attention {attention!r} takes no mask"
    kinds = varlen.unknown_layers(decoder_of(network).config)
    return f"lrl knows no mask for its layers of {', '.join(sorted(kinds))}" if kinds else ""


class _Trial:
    """A network's results for the same samples in different layouts of rows."""

    def __init__(self, network: PreTrainedModel, samples: list[TrainingSample]) -> None:
        self._network = network
        self._layer = _first_layer(network)
        for sample in samples:
            sample.advantages = torch.linspace(-1, 1, len(sample.trained))
        self.samples = samples
        self.trees = [PrefixTree([sample]) for sample in samples]
        self._truth = self._alone()

    def gap(self, rows: list[list[PrefixTree]], masks: bool = False) -> Gap:
        """Returns how far these rows, with lrl's masks or without, are from each sample alone."""
        return self._run(rows, masks).gap(self._truth)

    def tree_and_other(self) -> list[list[PrefixTree]]:
        """Returns the rows of `_branches`: one, with a tree of the first samples."""
        return [[PrefixTree(self.samples[:-1], PREFIX - 1), self.trees[-1]]]

    def padded(self) -> Gap:
        """Returns how far rows of their own, padded to the longest, differ from each alone."""
        return self.gap([[tree] for tree in self.trees])

    def check_padded(self) -> Gap:
        """Returns `padded`; raises ConfigError if rounding does not explain it."""
        found = self.padded()
        if found.within(self.rounding()):
            return found
        network = self._network
        raise ConfigError(
            f"model={network.name_or_path!r}: {type(network).__name__} gives a response that is "
            f"padded, or in a batch with others, other log-probs than alone ({found}). It cannot "
            f"be trained: take another model{other_attention(network)}."
        )

    def rounding(self) -> Gap:
        """Returns the largest gap between layouts of different shapes that rounding explains."""
        in_16_bits = varlen.computes_in(self._network) != torch.float32
        return rounding_gap(self._network, self._alone, self._truth, in_16_bits)

    def _alone(self) -> Result:
        each = [self._run([[tree]]) for tree in self.trees]
        gradients = torch.stack([one.gradient for one in each])
        return Result(torch.cat([one.logprobs for one in each]), gradients.sum(0))

    def _run(self, rows: list[list[PrefixTree]], masks: bool = False) -> Result:
        """Returns log-probs and their weighted sum's gradient; keeps gradients and random state."""
        micro = fill_rows(rows, temperature=1.0, masks=masks).to(self._network.device)
        with trial_pass(self._network), _same_random_state(self._network), torch.enable_grad():
            found = label_logprobs(self._network, micro, chunk_tokens=sum(LENGTHS))
            parts = torch.autograd.grad(
                (micro.advantages * found).sum(), self._layer, materialize_grads=True
            )
        gradient = torch.cat([part.flatten().float() for part in parts])
        return Result(found.detach()[micro.mask], gradient)


def rounding_gap(
    network: PreTrainedModel, compute: Callable[[], Result], truth: Result, in_16_bits: bool
) -> Gap:
    """Returns the largest gap of `compute` to the truth that rounding explains; measured on the
    network in 16 bits."""
    if not in_16_bits:
        return MAX_GAP_FLOAT32
    with rounding_errors(network, "bfloat16"):
        return compute().gap(truth).doubled(MIN_GAP_16_BITS)


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


def _same_random_state(network: PreTrainedModel) -> Any:
    return torch.random.fork_rng([network.device] if network.device.type == "cuda" else [])


def _texts(network: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Returns texts of so many random tokens, always the same."""
    draw = torch.Generator().manual_seed(0)
    ends = network.get_input_embeddings(), network.get_output_embeddings()
    vocabulary = min(len(end.weight) for end in ends)  # some models have tokens that they only read
    # Many models embed the padding token as zeros. An attention to the best few tokens finds all
    # equally good for it.
    padding = getattr(network.config.get_text_config(), "pad_token_id", None)
    tokens = torch.tensor([token for token in range(vocabulary) if token != padding])
    drawn = tokens[torch.randint(len(tokens), (sum(lengths),), generator=draw)]
    return [text.tolist() for text in drawn.split(list(lengths))]


def _sequences(network: PreTrainedModel) -> list[TrainingSample]:
    """Returns sequences of `LENGTHS`; every token but the first is a label."""
    return [text_sequence(text, group) for group, text in enumerate(_texts(network, LENGTHS))]


def _branches(network: PreTrainedModel) -> list[TrainingSample]:
    """Returns three responses after one prompt, and a sequence of its own."""
    prompt, *responses, other = _texts(network, [PREFIX, *BRANCHES, PREFIX])
    branches = [text_sequence([prompt[-1], *response]) for response in responses]
    for branch in branches:
        branch.prompt = prompt
    return [*branches, text_sequence(other, group=1)]


# ---- adapters

Layers = dict[str, Any]
"""The layers with adapters (peft's `LoraLayer`) by their names."""


def check_adapters(network: PreTrainedModel) -> None:
    """Raises ConfigError, with the remedy, if a layer cannot have its adapter, whose B is 0 as
    before training; leaves weights, gradients and random state as they were."""
    layers = dict(adapted_layers(network))
    if bad := _not_in_files(network, layers):
        why = "is a part of another weight in the model's files: no generator could merge it"
        _refuse(network, layers, bad, why)
    expected = _expected_gradients(network, layers)
    rounding = ADAPTER_ROUNDING[varlen.computes_in(network)]
    bad = [
        name for name, layer in layers.items() if not _learns(layer, expected.get(name), rounding)
    ]
    network.zero_grad()
    if bad:
        why = "the model also reads without it: generators, which merge it, would differ"
        _refuse(network, layers, bad, why)


def _not_in_files(network: PreTrainedModel, layers: Layers) -> list[str]:
    shapes = {name: weight.shape for name, weight in checkpoint_weights(network)}
    bad = []
    for name, layer in layers.items():
        weight = layer.get_base_layer().weight.detach()
        ((saved_as, saved), *more) = revert_weight_conversion(
            network, {f"{name}.weight": weight}
        ).items()
        if more or shapes.get(saved_as) != weight.shape or not torch.equal(saved, weight):
            bad.append(name)
    return bad


def _expected_gradients(network: PreTrainedModel, layers: Layers) -> dict[str, Tensor]:
    """Sends tokens forward and back; returns scale * dW A^T of each layer that they have reached.
    One gradient of a W is in memory at a time."""
    expected: dict[str, Tensor] = {}
    began = [next(iter(layers))]

    def take(name: str, layer: Any, weight: Tensor) -> None:
        down = layer.lora_A[NAME].weight.detach()
        expected[name] = layer.scaling[NAME] * cast(Tensor, weight.grad).to(down.dtype) @ down.T
        weight.grad = None

    (text,) = _texts(network, [ADAPTER_TOKENS])
    micro = text_as_micro_batch(text, network.device)
    with ExitStack() as hooks, torch.enable_grad():
        for name, layer in layers.items():
            weight = layer.get_base_layer().weight.requires_grad_()
            hooks.callback(weight.requires_grad_, False)
            taking = weight.register_post_accumulate_grad_hook(partial(take, name, layer))
            beginning = layer.register_forward_pre_hook(lambda *_, name=name: began.append(name))
            hooks.callback(taking.remove)
            hooks.callback(beginning.remove)
        try:
            with _same_random_state(network), varlen.in_its_dtype(network):
                logprobs = label_logprobs(network, micro, ADAPTER_TOKENS)[micro.mask]
        except torch.OutOfMemoryError:
            raise
        except MODEL_ERRORS as error:
            _refuse(network, layers, began[-1:], f"makes it fail ({shortened(error)})")
        # Reformer computes its layers without autograd unless its input has a gradient.
        if not logprobs.requires_grad:
            _refuse(network, {}, list(layers), "gets no gradient if the embedding has none")
        (torch.linspace(-1, 1, len(logprobs), device=logprobs.device) * logprobs).sum().backward()
    return expected


def _learns(layer: Any, expected: Tensor | None, rounding: float) -> bool:
    """Returns whether the gradient of a layer's B is the expected one; None for a layer, such as an
    expert, that no token has reached."""
    up = layer.lora_B[NAME].weight
    found, wanted = (torch.zeros_like(up) if one is None else one for one in (up.grad, expected))
    return bool((found - wanted).norm() <= rounding * max(found.norm(), wanted.norm()))


def _refuse(network: PreTrainedModel, layers: Layers, bad: list[str], why: str) -> NoReturn:
    """Raises ConfigError with the bad layers, and the ends of names that may stay."""
    ends, bad_ends = ({name.rpartition(".")[2] for name in names} for names in (layers, bad))
    right = ", ".join(sorted(ends - bad_ends))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    remedy = f"Set model.lora.target_modules to [{right}]." if right else "Leave model.lora out."
    raise ConfigError(
        f"model.lora: {type(network).__name__} cannot have an adapter at {bad[0]}{more}, which "
        f"{why}. {remedy}"
    )
