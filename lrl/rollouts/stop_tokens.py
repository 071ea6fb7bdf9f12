"""The tokens at which a response ends: one rule for generators, rewards, `lrl chat` and the checks
of a policy.

It is the rule by which vLLM serves an exported policy. A request names these tokens, and vLLM adds
none of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, GenerationConfig

from lrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lrl.environments import Environment


def stop_tokens(tokenizer: PreTrainedTokenizerBase, folder: str) -> frozenset[int]:
    """Returns the tokenizer's end and the ends of generation_config.json, or else of config.json.

    Args:
        tokenizer: The policy's tokenizer.
        folder: Folder or hub name of the policy.

    Raises:
        ConfigError: transformers does not open the folder's generation_config.json, and neither
            would a generator.
    """
    named: Any = _generation(folder).eos_token_id
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return frozenset(ends - {None})


def _generation(folder: str) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none, or it is no JSON
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"model={folder!r}: generation_config.json cannot be opened: "
            f"{' '.join(str(error).split()):.300}. Mend it, or remove it: lrl reads nothing of it "
            "but eos_token_id."
        ) from error


def turn_stop_tokens(
    tokenizer: PreTrainedTokenizerBase, environment: Environment
) -> tuple[int, ...]:
    """Returns the tokens at which the turns of an environment end, besides the tokens that end a
    response.

    Raises:
        ConfigError: One is not a single token of the policy, and no generator would stop there.
    """
    found = []
    stop: Any = environment.stop
    if isinstance(stop, str):
        raise ConfigError(
            f"data.environment: {type(environment).__name__}.stop is the text {stop!r}; give a "
            f"tuple of texts, such as ({stop!r},)."
        )
    for text in stop:
        try:
            ids = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # tokenizers raise this class itself
            raise ConfigError(
                f"{_stop(environment, text)}, which has no tokens: {error}"
            ) from error
        if len(ids) != 1:
            raise ConfigError(
                f"{_stop(environment, text)}, which is {len(ids)} tokens of the policy: a turn "
                "ends at one token. Name one."
            )
        found += ids
    return tuple(found)


def _stop(environment: Environment, text: str) -> str:
    return f"data.environment: {type(environment).__name__}.stop has {text!r}"
