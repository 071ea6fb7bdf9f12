"""The form of a run's prompts, kept in the policy's folder for `lrl chat`."""

import json
from pathlib import Path
from typing import Any

from lrl.system.best_effort import writable

FILE = "prompt_form.json"
"""The file of `Prompts.form`, in the policy's folder."""


def of(data: Any) -> dict[str, Any]:
    """Returns the form of a data module's prompts; empty for one that is not lrl's."""
    return dict(getattr(getattr(data, "prompts", None), "form", {}))


def save(form: dict[str, Any], folder: Path) -> None:
    """Writes the form into the folder of a policy; an empty one leaves no file."""
    if form:
        text = writable(json.dumps(form, indent=2, ensure_ascii=False))
        (folder / FILE).write_text(f"{text}\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Returns the form in the folder of a policy; empty for one that lrl has not trained."""
    path = folder / FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
