"""The messages to a judge: a template with the prompt, the response and columns of the row."""

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.reference import written_out


class JudgeMessages:
    """Writes the messages of a request.

    Args:
        template: Text of the user's message. `{name}` stands for a value, `{{` and `}}` for braces.
        system: Text of the system message, with such names too; None for none.
        asked: The end of the user's message, as it is: in which form the judge answers.

    Raises:
        ConfigError: A template has a brace alone, or none has `{response}`.
    """

    def __init__(self, template: str, system: str | None, asked: str) -> None:
        self.templates = (
            {"user": template} if system is None else {"system": system, "user": template}
        )
        self.asked = asked
        self.names = set().union(*map(_names_in, self.templates.values()))
        """Names of the values that it needs."""
        if "response" not in self.names:
            raise ConfigError(
                f"Judge.template is {template!r:.80}, without {{response}}: the judge would not "
                "see what it scores. Write {response} where the response belongs."
            )

    def written(self, values: Mapping[str, Any]) -> list[dict[str, str]]:
        """Returns the messages.

        Args:
            values: The values by name; others than those in `names` are not read.

        Raises:
            ValueError: A name has no value, or one without a text.
        """
        texts = {name: text_of(values, name) for name in self.names}
        messages = [
            {"role": role, "content": template.format_map(texts)}
            for role, template in self.templates.items()
        ]
        messages[-1]["content"] += f"\n\n{self.asked}"
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


def _names_in(template: str) -> set[str]:
    try:
        fields = [field[1:] for field in Formatter().parse(template) if field[1] is not None]
        if any(
            form or conversion or not str(name).isidentifier() for name, form, conversion in fields
        ):
            raise ValueError("braces around what is no name")
    except ValueError as error:
        raise ConfigError(
            f"Judge.template or Judge.system is {template!r:.80} ({error}): write {{prompt}}, "
            "{response} or a column in braces, and {{ and }} for braces that are no name."
        ) from error
    return {str(name) for name, _, _ in fields}
