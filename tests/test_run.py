"""A run owns what it starts, and ends it; the order of its hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrl
from lrl.run import Run
from tests import test_trainer
from tests.callbacks.model_run import ModelRun

data, quiet = test_trainer.data, test_trainer.quiet
HOOKS = ("check", "prepare", "start", "begin", "end")


def test_a_run_ends_all_that_it_has_started_although_one_end_fails() -> None:
    run, ended = ModelRun(), list[str]()

    def fail() -> None:
        raise OSError("a server cannot be stopped")

    run._ends.callback(ended.append, "workers")
    run._ends.callback(fail)
    run._ends.callback(ended.append, "syncs")
    with pytest.raises(OSError, match="cannot be stopped"):
        run.end()
    assert ended == ["syncs", "workers"] and run.strategy.run is None
    run.end()  # it has ended
    assert ended == ["syncs", "workers"]


def test_lightnings_hooks_call_the_run_in_its_order_and_nothing_is_read_before_its_check(
    policy_folder: Path, quiet: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in HOOKS:
        body: Any = getattr(Run, name)

        def note(run: Run, name: str = name, body: Any = body) -> None:
            called.append(name)
            body(run)

        monkeypatch.setattr(Run, name, note)
    load = lrl.Prompts.load

    def read(prompts: lrl.Prompts, *args: Any) -> None:
        assert called, "configure_callbacks reads nothing"
        load(prompts, *args)

    monkeypatch.setattr(lrl.Prompts, "load", read)
    trainer = L.Trainer(devices=2, strategy=lrl.AsyncSingleDevice(), **quiet)
    with pytest.raises(test_trainer.ServersReached):
        trainer.fit(lrl.PolicyModule(str(policy_folder)), data)
    assert called == ["check", "prepare", "start", "end"]
