"""Trials of a model before a server starts: whether it keeps responses apart that are trained
together, and whether generators can merge its adapters. No config says either.

**Responses.** A few sequences go through the model alone, which is the truth, and then padded, two
in a row, and as a tree. Padded may differ from alone by rounding, which is measured in 16 bits;
otherwise the model is refused. The other layouts may differ by twice what padding does.

**Adapters.** Some models read a weight without calling its layer (Mamba's step size): the adapter
then does nothing in the trainer, but everything in the generators, which merge it. Others pack
several layers into one weight in their files. So every W must be the same in a checkpoint as in
memory, and the gradient of B must be scale * dW A^T (2106.09685, equation 3, at B = 0).
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from accelerate import init_empty_weights
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lrl.errors import ConfigError
from lrl.training import varlen
from lrl.training.collate import fill_rows, text_as_micro_batch, text_sequence
from lrl.training.logprobs import decoder_of, label_logprobs
from lrl.training.lora import NAME, adapted_layers
from lrl.training.pieces import checkpoint_weights
from lrl.training.prefix_tree import PrefixTree
from lrl.training.rounding import rounding_errors
from lrl.training.sharding import layers_of

log = logging.getLogger(__name__)

PREFIX, BRANCHES, OTHERS = 9, (12, 5, 7), (33, 13, 17)
"""Tokens that the branches of the tree share, of each branch, and of each other sequence."""
ADAPTER_TOKENS = 32
NARROW = 4
"""Windows, chunks and top-k sizes of the trial, in tokens."""
REACH = re.compile("window|chunk|topk|block_size|local_attention|budget")
"""Names of settings that say how far a token reads, or how many it reads."""
PER_NAT = 20.0
"""The gradient's limit in float32 is 1 %, that of a log-prob 5e-4 nats."""
MAX_GAP_FLOAT32 = 1e-2
"""Limit of `gap` for rounding in float32; measured on a CPU: 2e-5."""
MIN_GAP_16_BITS = 2e-2
"""The same in 16 bits, for a model that hardly rounds."""
ALWAYS_ALLOWED_GAP = 1e-4
"""Of rows shared by several responses, whatever padding does."""
LIBRARIES_OF_A_GPU = ("cuDNN", "cuBLAS", "CUDA error")
"""Words in errors of an installation that does not fit, never of a model."""
ADAPTER_ROUNDING = {torch.float32: 1e-2, torch.bfloat16: 0.1}
"""Largest difference of the two gradients of B, relative to the larger one (L2 norms), by the
format of the pass."""

Result = tuple[Tensor, Tensor]
"""Log-probs, float32 [labels], and the gradient of the first layer, float32 [its numbers]. The
gradient shows a leak even if small weights make all log-probs alike."""


def gap(found: Result, truth: Result) -> float:
    """Returns the relative difference of the gradients (L2 norms), or `PER_NAT` times the mean
    difference of a log-prob, whichever is larger."""
    least = torch.finfo(torch.float32).tiny
    nats = (found[0] - truth[0]).abs().mean()
    relative = (found[1] - truth[1]).norm() / truth[1].norm().clamp_min(least)
    return torch.stack([PER_NAT * nats, relative]).max().item()


def rounding_gap(
    network: PreTrainedModel, compute: Callable[[], Result], truth: Result, in_16_bits: bool
) -> float:
    """Returns the largest gap of `compute` to the truth that rounding explains."""
    if not in_16_bits:
        return MAX_GAP_FLOAT32
    with rounding_errors(network, "bfloat16"):
        return max(MIN_GAP_16_BITS, 2 * gap(compute(), truth))


class Shared(NamedTuple):
    """What a model's responses may share in training."""

    packed: bool = False
    """Rows: positions alone keep responses apart."""
    prefixes: bool = False
    """Rows and first tokens: lrl's mask keeps responses apart."""

    @property
    def rows(self) -> bool:
        return self.packed or self.prefixes

    @property
    def masks(self) -> bool:
        """Whether they share rows only with the mask."""
        return self.prefixes and not self.packed

    def also(self, other: "Shared") -> "Shared":
        """Returns what both may share."""
        return Shared(self.packed and other.packed, self.prefixes and other.prefixes)

    def under(self, network: PreTrainedModel) -> "Shared":
        """Returns what they may share in a network that was tried with masks, in another attention."""
        takes_masks = network.config._attn_implementation in (*varlen.WITH_MASKS, varlen.VARLEN)
        return self if takes_masks else Shared(self.packed)


def check_rows(network: PreTrainedModel) -> None:
    """Raises ConfigError unless padded responses are computed as if each were alone."""
    _Trial(network).check_padded()


def shared_by_responses(network: PreTrainedModel) -> Shared:
    """Returns what responses may share and still be computed as if each were alone; logs a warning
    for what they may not. Raises ConfigError if not even padded ones are."""
    trial = _Trial(network)
    allowed = max(ALWAYS_ALLOWED_GAP, 2 * trial.check_padded())
    packed = trial.gap(trial.packed)
    why_no_tree = trial.why_no_tree(allowed)
    shared = Shared(packed <= allowed, prefixes=not why_no_tree)
    if not shared.prefixes:
        what, why = "its own copy of the prompt", why_no_tree
        if not shared.rows:
            what, why = "a padded row of its own", f"responses then differ by {packed:.1g}"
        rank_zero_only(log.warning)(
            "model=%r: each response has %s in training (%s: %s). A step takes longer for it.",
            *(network.name_or_path, what, type(network).__name__, why),
        )
    return shared


def cannot_have_varlen(network: PreTrainedModel) -> str:
    """Returns why a network cannot have lrl's own attention; nothing if trees then compute what each
    response does alone without it."""
    if not network._supports_flash_attn or not network._can_set_attn_implementation():
        return "transformers has no flash attention for it"
    trial = _Trial(network)
    trial.network.set_attn_implementation(varlen.VARLEN)
    try:
        found, allowed = trial.gap(trial.tree), trial.rounding()
    except ConfigError as error:
        return str(error.__cause__)
    return "" if found <= allowed else f"responses then differ by {found:.1g}"


def narrowed(network: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same class and weights whose windows, chunks and top-k sizes end within
    the trial's sequences, because a model reads differently beyond them; with transformers'
    attention in place of lrl's."""
    config = copy.deepcopy(network.config)
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if type(value) is int and value > NARROW and REACH.search(name):
                setattr(part, name, NARROW)
    attention = network.config._attn_implementation
    if attention == varlen.VARLEN:
        attention = None
    with init_empty_weights(include_buffers=False):
        narrow = type(network)._from_config(
            config, dtype=network.dtype, attn_implementation=attention
        )
    for own, theirs in zip(network.modules(), narrow.modules(), strict=True):
        theirs._parameters = own._parameters
        learned = own._buffers.keys() - own._non_persistent_buffers_set
        theirs._buffers |= {name: own._buffers[name] for name in learned}
    return narrow.to(network.device)


def check_logits(network: PreTrainedModel) -> None:
    """Compares lrl's log-probs with the model's own, to find unknown changes of the logits."""
    ids = torch.arange(1, 9) % network.get_input_embeddings().num_embeddings
    micro = text_as_micro_batch(ids.tolist(), network.device)
    with torch.no_grad(), trial_pass(network):
        ours = label_logprobs(network, micro, chunk_tokens=len(ids))[0, :-1]
        given = varlen.arguments(decoder_of(network), micro)
        logits = network(input_ids=micro.input_ids, use_cache=False, **given).logits[0, :-1].float()
    theirs = logits.log_softmax(-1).gather(-1, micro.labels[0, :-1, None]).squeeze(-1)
    gap = (ours - theirs).abs().max().item()
    if not gap < (1e-3 if varlen.computes_in(network) == torch.float32 else 0.25):
        raise ConfigError(
            f"model={network.name_or_path!r}: {type(network).__name__} changes its logits after "
            f"the head in a way lrl does not know (log-probs differ by {gap:.3g} nats). Add it to "
            "lrl.training.logprobs.LogitTransform."
        )


@contextmanager
def trial_pass(network: PreTrainedModel) -> Iterator[None]:
    """For passes that try a model, in its attention's dtype, always from the same random state: what
    it raises becomes a ConfigError."""
    devices = [network.device] if network.device.type == "cuda" else []
    try:
        with varlen.in_its_dtype(network), torch.random.fork_rng(devices):
            yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # RuntimeErrors, not the model's
        raise
    except (TypeError, AttributeError, ValueError, LookupError, RuntimeError) as error:
        if any(library in str(error) for library in LIBRARIES_OF_A_GPU):
            raise
        raise ConfigError(
            f"model={network.name_or_path!r}: {type(network).__name__} does not give log-probs for "
            f"tokens and their positions alone ({shortened(error)}). Take another model, or another "
            "attention."
        ) from error


def shortened(error: Exception) -> str:
    """Returns the class and the message of a library's exception, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


class _Trial:
    """The results of a narrowed network for the same sequences in different rows."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.network = narrowed(network)
        prompt, *texts = _texts(network, [PREFIX, *BRANCHES, *OTHERS])
        branches = [text_sequence([prompt[-1], *text]) for text in texts[: len(BRANCHES)]]
        for branch in branches:
            branch.prompt = prompt
        others = [text_sequence(text, group) for group, text in enumerate(texts[3:], start=1)]
        for sample in branches + others:
            sample.advantages = torch.linspace(-1, 1, len(sample.trained))
        trees = [PrefixTree([sample]) for sample in branches + others]
        self.padded = [[tree] for tree in trees]
        self.packed = [trees[:2], trees[2:4], trees[4:]]
        self.tree = [[PrefixTree(branches, PREFIX - 1), trees[3]], trees[4:]]
        self.truth = self._alone()

    def gap(self, rows: list[list[PrefixTree]]) -> float:
        """Returns how far these rows are from each sequence alone."""
        return gap(self._run(rows), self.truth)

    def rounding(self) -> float:
        """Returns the largest gap between layouts of different shapes that rounding explains."""
        in_16_bits = varlen.computes_in(self.network) != torch.float32
        return rounding_gap(self.network, self._alone, self.truth, in_16_bits)

    def check_padded(self) -> float:
        """Returns the gap of padded rows; raises ConfigError if rounding does not explain it."""
        found = self.gap(self.padded)
        if found <= self.rounding():
            return found
        network = self.network
        raise ConfigError(
            f"model={network.name_or_path!r}: {type(network).__name__} gives a response that is "
            f"padded, or in a batch with others, other log-probs than alone (they differ by "
            f"{found:.1g}). It cannot be trained: take another model, or another attention."
        )

    def why_no_tree(self, allowed: float) -> str:
        """Returns why responses cannot share their first tokens; nothing if they can."""
        attention = self.network.config._attn_implementation
        if attention not in varlen.WITH_MASKS:
            return f"its attention {attention!r} takes no mask"
        if kinds := varlen.unknown_layers(decoder_of(self.network).config):
            return f"lrl knows no mask for its layers of {', '.join(sorted(kinds))}"
        try:
            found = self.gap(self.tree)
        except ConfigError as error:  # the model fails with a mask
            return str(error)
        return "" if found <= allowed else f"responses then differ by {found:.1g}"

    def _alone(self) -> Result:
        logprobs, gradients = zip(*(self._run([row]) for row in self.padded), strict=True)
        return torch.cat(logprobs), torch.stack(gradients).sum(0)

    def _run(self, rows: list[list[PrefixTree]]) -> Result:
        """Returns log-probs and their weighted sum's gradient."""
        network = self.network
        decoder = decoder_of(network)
        layer = next(layers_of(decoder), decoder)
        weights = [weight for weight in layer.parameters() if weight.requires_grad]
        micro = fill_rows(rows, temperature=1.0).to(network.device)
        with trial_pass(network), torch.enable_grad():
            found = label_logprobs(network, micro, chunk_tokens=sum(OTHERS))
            total = (micro.advantages * found).sum()
            parts = torch.autograd.grad(total, weights, materialize_grads=True)
        return found.detach()[micro.mask], torch.cat([part.flatten().float() for part in parts])


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


# ---- adapters


def check_adapters(network: PreTrainedModel) -> None:
    """Raises ConfigError, with the remedy, if a layer cannot have its adapter, whose B is still 0;
    changes nothing."""
    layers: dict[str, Any] = dict(adapted_layers(network))
    shapes = {name: weight.shape for name, weight in checkpoint_weights(network)}
    expected = _expected_gradients(network, layers)
    rounding = ADAPTER_ROUNDING[varlen.computes_in(network)]
    bad = {}
    for name, layer in layers.items():
        weight, up = layer.get_base_layer().weight.detach(), layer.lora_B[NAME].weight
        ((saved_as, saved), *more) = revert_weight_conversion(
            network, {f"{name}.weight": weight}
        ).items()
        # No token has reached a layer, such as an expert, without a gradient.
        none = torch.zeros_like(up)
        found, wanted = up.grad if up.grad is not None else none, expected.get(name, none)
        if more or shapes.get(saved_as) != weight.shape or not torch.equal(saved, weight):
            bad[name] = (
                "is part of another weight in the model's files: no generator could merge it"
            )
        elif not (found - wanted).norm() <= rounding * max(found.norm(), wanted.norm()):
            bad[name] = "the model also reads without it: generators, which merge it, would differ"
    network.zero_grad()
    if not bad:
        return
    (first, why), *more = bad.items()
    ends, bad_ends = ({name.rpartition(".")[2] for name in names} for names in (layers, bad))
    right = ", ".join(sorted(ends - bad_ends))
    remedy = f"Set model.lora.target_modules to [{right}]." if right else "Leave model.lora out."
    raise ConfigError(
        f"model.lora: {type(network).__name__} cannot have an adapter at {first} (and {len(more)} "
        f"more), which {why}. {remedy}"
    )


def _expected_gradients(network: PreTrainedModel, layers: dict[str, Any]) -> dict[str, Tensor]:
    """Returns scale * dW A^T of each layer that tokens reach; one gradient of a W at a time is in
    memory."""
    expected: dict[str, Tensor] = {}

    def take(name: str, layer: Any, weight: Tensor) -> None:
        down = layer.lora_A[NAME].weight.detach()
        expected[name] = layer.scaling[NAME] * cast(Tensor, weight.grad).to(down.dtype) @ down.T
        weight.grad = None

    (text,) = _texts(network, [ADAPTER_TOKENS])
    micro = text_as_micro_batch(text, network.device)
    with ExitStack() as hooks, torch.enable_grad():
        for name, layer in layers.items():
            weight = layer.get_base_layer().weight.requires_grad_()
            taking = weight.register_post_accumulate_grad_hook(partial(take, name, layer))
            hooks.callback(weight.requires_grad_, False)
            hooks.callback(taking.remove)
        with trial_pass(network):
            logprobs = label_logprobs(network, micro, ADAPTER_TOKENS)[micro.mask]
            weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
            (weights * logprobs).sum().backward()
    return expected
