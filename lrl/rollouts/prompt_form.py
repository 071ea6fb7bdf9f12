"""How a run made prompts of its rows, as a file in the folder of its policy: `lrl chat` asks in the same way."""

import json
from pathlib import Path
from typing import Any

from lrl.runtime.config_errors import ConfigError

FILE = "prompt_form.json"
"""`Prompts.form`, beside the policy's files in Hugging Face format."""


def of(data: Any) -> dict[str, Any]:
    """Returns the form of a data module's prompts; empty for one that is not lrl's."""
    return dict(getattr(getattr(data, "prompts", None), "form", {}))


def save(form: dict[str, Any], folder: Path) -> None:
    """Writes the form into the folder of a policy; an empty one leaves no file."""
    if not form:
        return
    (folder / FILE).write_text(json.dumps(form, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Returns the form in the folder of a policy; empty if it has none, as a policy that lrl has not trained.

    Raises:
        ConfigError: The file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        form = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): remove it, or export the policy again.") from error
    if not isinstance(form, dict):
        raise ConfigError(f"{path} holds {form!r:.60} and no settings: remove it, or export the policy again.")
    return form
