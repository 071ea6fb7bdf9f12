"""The messages to a judge: a template with the prompt, the response and columns of the row."""

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.verifiers.reference import written_out

Messages = list[dict[str, str]]
_Piece = tuple[str, str | None]
"""A text, and the name behind it; None at the end."""


class JudgeMessages:
    """Writes the messages of a request.

    Args:
        template: Text of the user's message. `{name}` stands for a value, `{{` and `}}` for braces.
        system: Text of the system message, with such names too; None for none.
        asked: The end of the user's message, as it is: in which form the judge answers.

    Raises:
        ConfigError: One of the first two is no template, or none has `{response}`.
    """

    def __init__(self, template: str, system: str | None, asked: str) -> None:
        pieces = [*_pieces("template", template), (f"\n\n{asked}", None)]
        self.texts = [("user", pieces)]
        if system is not None:
            self.texts.insert(0, ("system", _pieces("system", system)))
        self.names = {name for _, pieces in self.texts for _, name in pieces if name is not None}
        """Names of the values that it needs."""
        if "response" not in self.names:
            raise ConfigError(
                f"Judge.template is {template!r:.80}, without {{response}}: the judge would not "
                "see what it scores. Write {response} where the response belongs."
            )

    def written(self, values: Mapping[str, Any]) -> Messages:
        """Returns the messages.

        Args:
            values: The values by name; others than those in `names` are not read.

        Raises:
            ValueError: A name has no value, or one without a text.
        """
        texts = {name: text_of(values, name) for name in self.names}
        messages = []
        for role, pieces in self.texts:
            content = "".join(text + ("" if name is None else texts[name]) for text, name in pieces)
            messages.append({"role": role, "content": content})
        return messages


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns a value as the judge reads it: a list or a dict as JSON, a number without an exponent.

    Raises:
        ValueError: There is none, or it is missing (None, NaN), infinite, or nothing of JSON.
    """
    if name not in values:
        raise ValueError(
            f"Judge.template has {{{name}}}, and the row has no column `{name}`, only "
            f"{sorted(values)}. Write {{{{{name}}}}} if you mean the letters in braces."
        )
    value = values[name]
    try:
        if isinstance(value, list | tuple | dict):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        return written_out(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the column `{name}` is no text for the judge: {error}") from error


def _pieces(setting: str, text: str) -> list[_Piece]:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"Judge.{setting} is {text!r:.80}: give a text.")
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"Judge.{setting} is {text!r:.80}, which is no template ({error}): write {{{{ and }}}} "
            "for braces that are no name."
        ) from error
    for _, name, form, conversion in parsed:
        if name is not None and (form or conversion or not name.isidentifier()):
            raise ConfigError(
                f"Judge.{setting} has {{{_as_typed(name, form, conversion)}}}, which is no name: "
                "write {prompt}, {response} or a column in braces, and {{ and }} for braces that "
                "are no name."
            )
    return [(text, name) for text, name, _, _ in parsed]


def _as_typed(name: str, form: str | None, conversion: str | None) -> str:
    """Returns what stands between two braces, shortened."""
    typed = name
    typed += f"!{conversion}" if conversion else ""
    typed += f":{form}" if form else ""
    return f"{typed:.40}"
