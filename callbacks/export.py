"""Export of the trained policy in Hugging Face format, which transformers and vLLM open."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError

from lrl.callbacks.base import OnRankZero, find_all
from lrl.callbacks.evaluation import Evaluation
from lrl.checkpoints.run_folder import run_folder
from lrl.rollouts import prompt_form
from lrl.system import hub
from lrl.system.config_errors import fault

log = logging.getLogger(__name__)


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
            _check_name(push_to_hub)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks, before any server starts, that the upload can begin.

        Raises:
            ConfigError: The hub cannot be reached, or there is no token for it.
        """
        if self.push_to_hub is None or stage != "fit":
            return
        hub.reach()
        if hub.offline():
            fault(
                f"Export.push_to_hub is {self.push_to_hub!r}, and the hub cannot be reached. Leave "
                "it out, and upload the folder later: hf upload NAME FOLDER."
            )
        if get_token() is None:
            fault(
                f"Export.push_to_hub is {self.push_to_hub!r}, and there is no token for the hub. "
                "Type `hf auth login`, or set HF_TOKEN."
            )

    def path(self, trainer: L.Trainer) -> Path:
        """Returns the folder this run exports to."""
        return Path(self.folder) if self.folder else run_folder(trainer) / "policy"

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes the policy and its tokenizer, into the system's temporary folder if this one
        cannot be written."""
        path = self.path(trainer)
        try:
            path.mkdir(parents=True, exist_ok=True)  # transformers only logs that it is no folder
            self._export(trainer, pl_module, path)
        except (OSError, SafetensorError) as error:
            self.folder = tempfile.mkdtemp(prefix="lrl-policy-")
            log.warning(
                "The policy cannot be written to %s: %s. It goes to %s.", path, error, self.folder
            )
            self._export(trainer, pl_module, Path(self.folder))
        if self.push_to_hub is not None:
            self._upload(self.push_to_hub, self.path(trainer), trainer.global_step)

    def _export(self, trainer: L.Trainer, pl_module: Any, folder: Path) -> None:
        from lrl.callbacks import model_card  # here: only the end of a run needs it

        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        pl_module.export(folder)
        prompt_form.save(prompt_form.of(data), folder)
        evaluations = find_all(trainer, Evaluation)
        model_card.write(
            folder,
            policy=pl_module,
            data=data,
            steps=trainer.global_step,
            evaluations=evaluations,
        )

    def _upload(self, name: str, folder: Path, steps: int) -> None:
        """Uploads the folder; a hub that fails costs the run nothing."""
        api = HfApi()
        try:
            api.create_repo(name, private=self.private, exist_ok=True)
            api.upload_folder(
                repo_id=name, folder_path=folder, commit_message=f"lrl: after {steps} steps"
            )
        # ValueError: the hub refuses the card, or a proxy answers with a page of HTML in its place.
        # RuntimeError: the transport of large files has failed.
        except (OSError, HTTPError, ValueError, RuntimeError) as error:
            log.warning(
                "The policy is in %s, and not on the hub: %s. Upload it: hf upload %s %s",
                folder,
                error,
                name,
                folder,
            )


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        fault(f"Export.push_to_hub is {name!r}: {error}")
    if "/" not in name:
        fault(f"Export.push_to_hub is {name!r}: give it as `user/{name}`.")
