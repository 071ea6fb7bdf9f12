"""Export of the trained policy in Hugging Face format, with a model card, and to the hub."""

import logging
import tempfile
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from lrl.callbacks.base import OnRankZero, find_all
from lrl.callbacks.evaluation import Evaluation
from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, ExportError
from lrl.rollouts.policy_text import form_of, save_form
from lrl.system import hub

log = logging.getLogger(__name__)

UNWRITABLE = (OSError, SafetensorError)
"""What a folder that cannot be written raises."""
UPLOAD_S = 1800.0
"""Seconds after which the run ends without the upload."""


class Export(OnRankZero):
    """Exports the policy when training ends, with a model card.

    Args:
        folder: Target; by default `policy` in the run's folder.
        push_to_hub: Name on the Hugging Face hub, `user/name`, to which the folder is uploaded as
            well; null uploads nothing.
        private: Whether only its owner sees it there, if it is new.

    Raises:
        ConfigError: The hub would not take such a name.
    """

    def __init__(
        self, folder: str | None = None, push_to_hub: str | None = None, private: bool = True
    ) -> None:
        self.folder = folder
        self.push_to_hub = push_to_hub
        self.private = private
        if push_to_hub is not None:
            try:
                validate_repo_id(push_to_hub)
            except HFValidationError as error:
                raise ConfigError(f"Export.push_to_hub: {error}") from error

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Raises ConfigError, before any server starts, if the folder is the model's own, the hub
        cannot be reached, or there is no token for it."""
        if self.folder and Path(self.folder).resolve() == Path(pl_module.policy_folder).resolve():
            raise ConfigError(f"Export.folder is {self.folder!r}, the model's own folder.")
        if self.push_to_hub is None or stage != "fit":
            return
        wanted = f"Export.push_to_hub is {self.push_to_hub!r}, and"
        if not hub.reach():
            later = "Leave it out, and upload the folder later: hf upload NAME FOLDER."
            raise ConfigError(f"{wanted} the hub cannot be reached. {later}")
        if get_token() is None:
            raise ConfigError(
                f"{wanted} there is no token for it. Type `hf auth login`, or set HF_TOKEN."
            )

    def path(self, trainer: L.Trainer) -> Path:
        return Path(self.folder) if self.folder else run_folder(trainer) / "policy"

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Writes the policy and its tokenizer, into the system's temporary folder if this one
        cannot be written; raises ExportError if neither can."""
        path = self.path(trainer)
        try:
            path.mkdir(parents=True, exist_ok=True)  # transformers only logs that it is no folder
            self._export(trainer, pl_module, path)
        except UNWRITABLE as error:
            reason = f"The policy cannot be written to {path}: {error}"
            self.folder = self._export_elsewhere(trainer, pl_module, reason)
        if self.push_to_hub is not None:
            self._upload(self.push_to_hub, self.path(trainer), trainer.global_step)

    def _export_elsewhere(self, trainer: L.Trainer, pl_module: Any, reason: str) -> str:
        log.warning(reason)
        try:
            folder = tempfile.mkdtemp(prefix="lrl-policy-")
            self._export(trainer, pl_module, Path(folder))
        except UNWRITABLE as error:
            raise ExportError(
                f"{reason}; nor to the temporary folder: {error}. Free some space, and write it "
                "from a checkpoint of the run: lrl export CHECKPOINT FOLDER"
            ) from error
        log.warning("It goes to %s.", folder)
        return folder

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        pl_module.export(folder)
        save_form(form_of(data), folder)
        card = model_card(pl_module, trainer.global_step, find_all(trainer, Evaluation))
        (folder / "README.md").write_text(card, encoding="utf-8")

    def _upload(self, name: str, folder: Path, steps: int) -> None:
        """Uploads the folder; a hub that fails, or is too slow, costs the run nothing."""
        from lrl.system.event_loop import start_daemon_call  # here: few runs upload

        # Not here: where the hub's storage cannot be reached, its client tries for minutes.
        work = partial(_send, name, folder, steps=steps, private=self.private)
        uploading = start_daemon_call(work, "lrl-upload")
        reason: object = f"it is not there after {UPLOAD_S:.0f} s"
        if wait([uploading], UPLOAD_S).done:
            try:
                uploading.result()
                return
            # ValueError: the hub refuses the card, or a proxy answers with a page of HTML in its
            # place. RuntimeError: the transport of large files has failed.
            except (OSError, HTTPError, ValueError, RuntimeError) as error:
                reason = error
        text = "The policy is in %s, and not on the hub: %s. Upload it: hf upload %s %s"
        log.warning(text, folder, reason, name, folder)


def _send(name: str, folder: Path, steps: int, private: bool) -> None:
    api = HfApi()
    made = api.create_repo(name, private=private, exist_ok=True)  # gives a bare name its user
    api.upload_folder(
        repo_id=made.repo_id, folder_path=folder, commit_message=f"lrl: after {steps} steps"
    )


def model_card(policy: Any, steps: int, evaluations: Sequence[Evaluation]) -> str:
    """Returns the README of the folder of a policy: what it was trained from, and how good it is."""
    base = None if Path(policy.policy_folder).exists() else str(policy.policy_folder)
    about = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lrl", "reinforcement-learning", type(policy.objective).__name__.lower()],
    )
    lines = [
        f"---\n{about.to_yaml()}\n---\n",
        f"# {Path(policy.policy_folder).name}\n",
        f"Trained from {base or 'a local folder'} by asynchronous reinforcement learning with lrl, in "
        f"{steps} optimizer steps.\n",
    ]
    for evaluation in evaluations:
        for step, report in evaluation.reports:
            decoding = "greedy" if report.greedy else f"{report.k} sampled responses to each"
            lines.append(f"- After {step} steps: {report.as_line()}, {decoding}")
    return "\n".join(lines) + "\n"
