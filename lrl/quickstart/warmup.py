"""The quickstart's policy: a million parameters, warmed up until it can work a sum out but seldom
does.

Reinforcement learning selects among responses that a policy can already give. So the warm-up first
teaches the working with correct examples, and then the habit of a direct result, which is nearly
always wrong. Nothing is downloaded: the policy and its character tokenizer are made here, and saved
in the Hugging Face format for the trainer and vLLM.
"""

import logging
import math
import os
import random
import shutil
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from lrl.quickstart.task import problems, worked
from lrl.system.output import progress_bar

log = logging.getLogger(__name__)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
VOCABULARY = [PAD, BOS, EOS, *"0123456789+=,>"]
USUAL_STEPS = 330
"""Steps in which the working is learned: five seeds took 265 to 395, so the loss decides when."""
LOCK_TIMEOUT = 900.0
"""Seconds. Nothing takes longer than two minutes to make: a longer wait means a stuck process."""


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Settings of the warm-up. With other defaults, `policy` needs another folder.

    Args:
        loss: The working is taught until the mean loss of 20 steps is below this, in nats a token.
        max_steps: Steps after which that has failed.
        habit_steps: Steps after it, with direct examples among the worked-out ones.
        worked_share: Share of worked-out examples in those steps.
        examples: New examples per step, drawn from the training problems.
        lr: Learning rate of AdamW (0.9, 0.95): 20 steps of linear rise, then constant; falls to 5 %
            in the habit steps.
    """

    loss: float = 0.05
    max_steps: int = 1500
    habit_steps: int = 100
    worked_share: float = 0.46
    examples: int = 32
    lr: float = 3e-3


def policy() -> Path:
    """Makes or finds the policy of this run's seed (`PL_GLOBAL_SEED`, else 0) in `runs/`."""
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    return make_policy(Path(f"runs/quickstart/policy-seed{seed}"), seed)


def make_policy(folder: Path, seed: int, warm_up: WarmUp = WarmUp()) -> Path:
    """Makes a warmed-up policy, or finds the one made before; returns `folder`. The caller's random
    state does not change: a run is the same if it made or found the policy."""
    return find_or_make(folder, lambda unfinished: _make(unfinished, seed, warm_up))


def find_or_make(folder: Path, make: Callable[[Path], None]) -> Path:
    """Returns `folder`, which appears complete or not at all. All ranks may call it at once: the first
    one makes it, the others wait. `make` fills a folder of another name, which does not exist."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=LOCK_TIMEOUT):
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            # This process has the lock, so the process that wrote it was killed.
            if unfinished.exists():
                shutil.rmtree(unfinished)
            make(unfinished)
            unfinished.rename(folder)
    return folder


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of characters that adds `<bos>`; other characters are errors."""
    tokenizer = Tokenizer(models.WordLevel({token: id for id, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without it decode puts spaces between the characters
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, VOCABULARY.index(BOS))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def make_model() -> transformers.LlamaForCausalLM:
    """Returns an untrained Llama, float32, of 1.05 million parameters by torch's random state."""
    pad, bos, eos = (VOCABULARY.index(token) for token in (PAD, BOS, EOS))
    config = transformers.LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        initializer_range=0.06,  # at this width the usual 0.02 takes three times the steps
        pad_token_id=pad, bos_token_id=bos, eos_token_id=eos, dtype="float32",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(
    model: transformers.LlamaForCausalLM,
    tokenizer: transformers.PreTrainedTokenizerFast,
    warm_up: WarmUp,
    rng: random.Random,
) -> int:
    """Teaches the working, then the habit of leaving it out, in place; returns the number of steps."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    recent = deque([math.inf] * 20, maxlen=20)
    steps = USUAL_STEPS + warm_up.habit_steps
    with progress_bar("warming up the quickstart's policy, about a minute", "step", steps) as bar:

        def step(worked_share: float, lr: float) -> float:
            for group in optimizer.param_groups:
                group["lr"] = lr
            input_ids, labels = _batch(tokenizer, warm_up.examples, worked_share, rng)
            loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.update()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            return loss.item()

        for taught in range(1, warm_up.max_steps + 1):
            recent.append(step(1.0, warm_up.lr * min(1.0, taught / 20)))
            if sum(recent) / len(recent) < warm_up.loss:
                break
        else:
            raise RuntimeError(
                f"loss {recent[-1]:.3f} after max_steps={taught}, not below {warm_up.loss}; raise "
                "one of them"
            )
        bar.total = taught + warm_up.habit_steps
        bar.refresh()
        for done in range(warm_up.habit_steps):
            step(warm_up.worked_share, warm_up.lr * (1 - 0.95 * done / warm_up.habit_steps))
    return taught + warm_up.habit_steps


def _batch(
    tokenizer: transformers.PreTrainedTokenizerFast,
    examples: int,
    worked_share: float,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns input ids and labels, int64 [examples, longest]; prompts and padding are -100."""
    rows = rng.choices(problems(), k=examples)
    workings = [worked(row["prompt"]) if rng.random() < worked_share else "" for row in rows]
    texts = [
        f"{row['prompt']}{working}>{row['answer']}{EOS}"
        for row, working in zip(rows, workings, strict=True)
    ]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[:, : len(tokenizer(rows[0]["prompt"]).input_ids)] = -100  # all prompts are equally long
    return batch.input_ids, labels


def _make(folder: Path, seed: int, warm_up: WarmUp) -> None:
    tokenizer = make_tokenizer()
    # Two threads were 1.5 times as fast on two idle cores, and thirty times as slow on two busy
    # ones.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_model()
            steps = train(model, tokenizer, warm_up, random.Random(seed))
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    log.info("made the quickstart's policy with %d warm-up steps", steps)
