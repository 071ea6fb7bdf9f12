"""Bad input gives an error of at most ten lines with setting, value and remedy, before any server
starts.

Every case changes one thing on the command line of a small run that is right in everything.

Covers lrl/preflight/checkpoint.py, datasets.py, disagreements.py, folders.py, model_folder.py,
monitors.py, policy.py, lrl/cli/null_values.py.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lrl
from lrl.checkpoints.run_folder import RunFolderLock
from lrl.cli.lightning import USUAL_CALLBACKS
from lrl.cli.main import main
from lrl.cli.recipes import recipes
from lrl.generators.server import Server
from lrl.preflight import resources, settings
from lrl.rewards import RewardPool
from lrl.system.byte_counts import in_gib
from lrl.system.config_errors import fault
from tests.preflight.bad_files import DATA, MODELS, RESUMES
from tests.preflight.bad_settings import RANKER, SERVERS, SETTINGS, TRAINER, WORDS
from tests.preflight.bad_words import evaluation, monitor, only, runs_of
from tests.preflight.broken_inputs import make

FOUND_TOGETHER = SETTINGS | TRAINER | SERVERS | DATA | MODELS | RESUMES
CASES = WORDS | FOUND_TOGETHER
RUNS = runs_of({name: words for name, (words, _) in FOUND_TOGETHER.items()})
"""A command takes a core half a second, and names all faults that it finds."""
Run = Callable[..., tuple[int, str]]


class ServerReached(BaseException):
    """A run reached the start of a server: it has no fault."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    """Runs `lrl` in this process, without servers; returns its exit status and the printed
    error."""

    def start(*_: object) -> None:
        raise ServerReached

    def run(*words: str) -> tuple[int, str]:
        given = [
            word.replace("{in}", str(inputs)).replace("{tmp}", str(tmp_path)) for word in words
        ]
        capfd.readouterr()
        # A run takes it out of the environment.
        monkeypatch.setenv("LRL_TOKEN", "of-this-test-and-long-enough")
        try:
            status = main(given)
        except SystemExit as end:
            status = int(end.code or 0)
        return status, message(capfd.readouterr().err)

    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(RewardPool, "start", lambda pool, first=None: None)
    program = tmp_path / "lrl"
    program.touch()  # other ranks run it, and end at once
    monkeypatch.setattr(sys, "argv", [str(program)])
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, *more: None if name == "srun" else which(name, *more)
    )
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # Lightning sets it; so it is taken back
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(inputs)
    return run


def message(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    first = next((number for number, line in enumerate(lines) if "error:" in line), len(lines))
    return "\n".join(lines[first:])


FIT = ("fit", "--config", "{in}/run.yaml")


@pytest.mark.parametrize("cases", [[case] for case in WORDS] + RUNS, ids=lambda cases: cases[0])
def test_bad_input_is_named_in_a_few_lines_before_a_server_starts(
    cases: list[str], run: Run
) -> None:
    """As for a user who mends what is named, until nothing is left."""
    left = cases
    while left:
        named = named_by(run, left)
        if not named:
            assert len(left) > 1, left
            break
        left = [case for case in left if case not in named]
    for case in left:  # some mend one another
        assert named_by(run, [case])


def named_by(run: Run, cases: list[str]) -> list[str]:
    """Returns the cases of a run that its error names."""
    try:
        status, output = run(*FIT, *(word for case in cases for word in CASES[case][0]))
    except (ServerReached, KeyError):
        return []
    assert status == 2
    assert len(output.splitlines()) <= 10, output
    assert "Traceback" not in output and "Expected a <class" not in output, output
    assert len(cases) > 1 or "cannot work:" not in output, "one fault is said once"
    named = [case for case in cases if is_named(case, output)]
    assert named or len(cases) > 1, output
    return named


def is_named(case: str, output: str) -> bool:
    """Whether one fault of those in an error has all names of the case."""
    _, several, faults = output.partition("cannot work:\n")
    return any(
        all(name in fault for name in CASES[case][1])
        for fault in (faults.splitlines() if several else [output])
    )


def test_a_setting_of_another_class_is_not_taken_for_one_that_it_is_only_like(run: Run) -> None:
    words = ("--trainer.callbacks+", "Throughput", "--trainer.callbacks.every_n_steps", "5")
    status, output = run(*FIT, *words)
    assert status == 2
    assert output == (
        "lrl: error: trainer.callbacks.every_n_steps: lrl.callbacks.Throughput has no such setting."
    )


def test_there_are_eighty_cases() -> None:
    kinds = (WORDS, SETTINGS, TRAINER, SERVERS, DATA, MODELS, RESUMES)
    assert len(CASES) == sum(map(len, kinds)) >= 80


def test_a_character_that_a_policy_cannot_spell_is_named_before_the_policy_is_made(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrl.quickstart.warmup.make_policy", lambda *_: pytest.fail("it is made"))
    words = ("--model.model", "lrl.quickstart.warmup:policy")
    status, output = run(*FIT, *words, "--data.prompts.source", "{in}/data/letters.jsonl")
    assert status == 2 and len(output.splitlines()) == 1
    assert "Row 0 of letters" in output and "'H', which it has no token for" in output


def test_a_machine_without_the_library_of_vllms_cpu_build_is_told_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lrl.generators.cpu_backend.LIBRARY", "libnowhere.so.1")
    status, output = run(*FIT)
    assert status == 2
    assert (
        "vLLM's CPU build needs libnowhere.so.1, which is not here. Type: sudo apt-get install "
        "libnuma1" in output
    ), output


HEALTHY = {
    "the run that the cases change": (),
    "a model with sampling settings of its own, which are not used": (
        "--model.model",
        "{in}/models/sampling",
    ),
    "a model that brings code which is not needed": ("--model.model", "{in}/models/code-unused"),
    "added tokens that no prompt has": ("--model.model", "{in}/models/added-tokens"),
    "a strategy by the name of its class": ("--trainer.strategy", "lrl.AsyncSingleDevice"),
    "a strategy by its bare name": ("--trainer.strategy", "AsyncSingleDevice"),
    "a class's setting that is that of another one": (
        "--model.warmup_steps",
        "${data.init_args.max_lag}",
    ),
    "a class's setting that is one of the trainer's": (
        "--data.groups_per_step",
        "${trainer.max_steps}",
    ),
    "one reward that is no list": ("--data.rewards", "lrl.quickstart.task:correct"),
    "one reward by the name of its class": ("--data.rewards", "ExactMatch"),
    "prompts that repeat": ("--data.prompts.source", "{in}/data/twins.jsonl"),
    "chats for a tokenizer with a template": ("--data.prompts.source", "{in}/data/chats.jsonl"),
    "tools for a template that shows them": (
        *("--model.model", "{in}/models/tools", "--data.environment", "lrl.environments.Tools"),
        *("--data.environment.tools", '["tests.environments.tool_functions.add"]'),
        *("--trainer.strategy.server.tool_parser", "hermes"),
    ),
    "plain text for one without": ("--model.model", "{in}/models/no-template"),
    "a language model that ranks prompts": (
        *RANKER,
        "--data.length_predictor.ranker.model",
        "{in}/models/whole",
    ),
    "a checkpoint of the run itself": ("--ckpt_path", "{in}/checkpoints/whole.ckpt"),
    "callbacks without a sync, which every run has": only("lrl.callbacks.RolloutLog"),
    "no strategy and no callbacks": ("--config", "{in}/bare.yaml"),
    "no progress bar, neither Lightning's nor lrl's": (
        *(
            "--trainer.callbacks+",
            "lrl.callbacks.Progress",
            "--trainer.enable_progress_bar",
            "false",
        ),
    ),
    "an attention that applies the model's cap": (
        "--model.model",
        "{in}/models/capped",
        "--model.attention",
        "eager",
    ),
    "texts below the length at which positions change": (
        *("--model.model", "{in}/models/longrope", "--data.max_prompt_tokens", "32"),
    ),
    "long micro-batches and groups beyond a generator": (
        *("--data.micro_batch_tokens", "8", "--trainer.strategy.server.max_num_seqs", "2"),
    ),
}


@pytest.mark.parametrize("cases", runs_of(HEALTHY), ids=lambda cases: cases[0])
def test_a_healthy_run_is_not_refused(cases: list[str], run: Run) -> None:
    with pytest.raises((ServerReached, KeyError)) as reached:
        run(*FIT, *(word for case in cases for word in HEALTHY[case]))
    assert (
        reached.type is ServerReached
        or "callbacks" in str(reached.value)
        or "loops" in str(reached.value)
    )


def test_a_run_that_names_no_strategy_and_no_callbacks_has_the_usual_ones(
    run: Run, monkeypatch: Any
) -> None:
    trainers: list[Any] = []
    monkeypatch.setattr(
        "lrl.strategies.generator_devices.GeneratorDevices.start_generators",
        lambda self, trainer: trainers.append(trainer),
    )
    with pytest.raises(RuntimeError, match="There are no generators"):
        run("fit", "--config", "{in}/bare.yaml", "--trainer.callbacks+", "lrl.callbacks.Timeline")
    (trainer,) = trainers
    assert type(trainer.strategy) is lrl.AsyncSingleDevice and trainer.log_every_n_steps == 1
    names = [
        type(callback).__name__
        for callback in trainer.callbacks
        if "lrl" in type(callback).__module__
    ]
    assert sorted(name for name in names if name in (*USUAL_CALLBACKS, "Timeline")) == sorted(
        [*USUAL_CALLBACKS, "Timeline"]
    )


def test_no_rank_is_started_for_a_strategy_without_generators(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
    monkeypatch.setattr(
        f"{launcher}._call_children_scripts", lambda self: pytest.fail("a rank was started")
    )
    status, output = run(
        *FIT, "--trainer.strategy", "ddp", "--model.model", "{in}/models/no-weights"
    )
    assert status == 2
    assert (
        "trainer.strategy is ddp, which has no generators" in output and "has no weights" in output
    )


LOGGED = (
    "--trainer.logger",
    "CSVLogger",
    "--trainer.logger.save_dir",
    "{tmp}",
    "--trainer.logger.name",
    "mine",
)


def test_last_resumes_from_the_newest_checkpoint_of_the_run(
    run: Run, inputs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = tmp_path / "mine/version_0/checkpoints/last-step=96.ckpt"
    checkpoint.parent.mkdir(parents=True)
    shutil.copy(inputs / "checkpoints/other-model.ckpt", checkpoint)
    status, output = run(*FIT, *LOGGED, "--ckpt_path", "last")
    assert status == 2 and f"{str(checkpoint)!r} is of another model" in output
    shutil.copy(inputs / "checkpoints/whole.ckpt", checkpoint)
    with pytest.raises(ServerReached):
        run(*FIT, *LOGGED, "--ckpt_path", "last")
    assert f"Restoring states from the checkpoint path at {checkpoint}" in caplog.text


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_in_the_folder_of_another_keeps_its_metrics(
    resume: bool, run: Run, inputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine" / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(inputs / "checkpoints/whole.ckpt", folder / "checkpoints/last-step=96.ckpt")
    lines = ["loss,step", *(f"0.5,{step}" for step in (0, 95, 96, 120))]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    words = ("--ckpt_path", "last") if resume else ()
    with pytest.raises(ServerReached):
        run(*FIT, *LOGGED, "--trainer.logger.version", "version_0", *words)
    assert (folder / "metrics.csv").read_text().splitlines() == lines[: 3 if resume else None]


def test_a_second_run_in_the_folder_of_a_live_run_is_refused(run: Run, tmp_path: Path) -> None:
    live = RunFolderLock()
    live.acquire(tmp_path / "mine" / "version_0")
    status, output = run(*FIT, *LOGGED, "--trainer.logger.version", "version_0")
    assert status == 2 and f"is that of a live run (process {os.getpid()} on" in output
    live.release()
    with pytest.raises(ServerReached):
        run(*FIT, *LOGGED, "--trainer.logger.version", "version_0")


@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger"])
def test_a_run_that_is_refused_leaves_no_folder(
    logger: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        fault("rewards: none of them can be loaded.")

    logged = [word.replace("CSVLogger", logger) for word in LOGGED]
    monkeypatch.setattr(RewardPool, "start", refuse)  # after Lightning has opened the loggers
    status, output = run(*FIT, *logged)
    assert status == 2 and "none of them can be loaded" in output
    assert not (tmp_path / "mine").exists()


def test_the_quickstart_is_not_refused(run: Run, quickstart_policy: Path) -> None:
    with pytest.raises(ServerReached):
        run(
            "fit", "--config", str(recipes()["quickstart"]), "--model.model", str(quickstart_policy)
        )


MANY = {
    "data.groups_per_step is 0": ("--data.groups_per_step", "0"),
    "AIPO(rho=0.5)": ("--model.objective", "AIPO", "--model.objective.rho", "0.5"),
    "gradient_clip_val=1": ("--trainer.gradient_clip_val", "1"),
    "no column 'question'": ("--data.prompts.prompt_column", "question"),
    "model.schedule='cosine'": ("--model.schedule", "cosine", "--trainer.max_steps", "-1"),
    "lacks weights": ("--model.model", "{in}/models/more-layers"),
    "no such file": ("--ckpt_path", "{tmp}/none.ckpt"),
}


def test_all_faults_are_reported_together(run: Run) -> None:
    status, output = run(*FIT, *(word for words in MANY.values() for word in words))
    assert status == 2
    assert all(name in output for name in MANY), output
    assert output.startswith(f"lrl: error: {len(MANY)} things cannot work:")
    assert len(output.splitlines()) == 1 + len(MANY)


def test_more_faults_than_ten_lines_hold_are_counted(run: Run) -> None:
    zeros = (
        "micro_batch_tokens",
        "max_prompt_tokens",
        "max_response_tokens",
        "temperature",
        "rollout_timeout_s",
    )
    more = [word for name in zeros for word in (f"--data.{name}", "0")]
    status, output = run(*FIT, *(word for words in MANY.values() for word in words), *more)
    lines = output.splitlines()
    assert status == 2 and len(lines) == 10, output
    assert lines[0].startswith("lrl: error: 12 things") and lines[-1] == "  and 4 more"


def test_a_trainer_that_cannot_be_built_does_not_hide_the_faults_of_data_and_model(
    run: Run,
) -> None:
    words = ("--trainer.devices", "1", "--data.prompts.source", "{in}/data/empty.jsonl")
    status, output = run(*FIT, *words, "--model.model", "{in}/models/no-weights")
    assert status == 2
    assert all(name in output for name in ("generator_devices", "is empty", "has no weights")), (
        output
    )


def test_a_function_that_makes_the_model_is_not_run_while_something_else_is_wrong(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "making.py").write_text("def model():\n    raise SystemError('this takes long')\n")
    words = ("--model.model", "making:model", "--data.max_lag", "-1")
    _, output = run(*FIT, *words)
    assert "max_lag" in output and "takes long" not in output
    _, output = run(*FIT, *words[:2])
    assert "model.model" in output.replace("model=", "model.model=") and "takes long" in output


def test_a_script_gets_the_same_faults_as_one_error(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning as L

    from lrl.callbacks import WeightSync

    monkeypatch.setattr(Server, "start", lambda server: pytest.fail("a server was started"))
    policy = lrl.PolicyModule(str(inputs / "models/no-weights"), schedule="linear")
    data = lrl.RolloutDataModule([{"prompt": "1"}], [lrl.rewards.ExactMatch()], groups_per_step=2)
    settings = {"max_epochs": 1, "logger": False, "accelerator": "cpu", "gradient_clip_val": 1.0}
    trainer = L.Trainer(
        devices=2, strategy=lrl.AsyncSingleDevice(), callbacks=[WeightSync()], **settings
    )
    with pytest.raises(ValueError) as caught:
        trainer.fit(policy, data)
    for name in (
        "gradient_clip_val",
        "model.schedule",
        "has no weights",
        "data.groups_per_step",
        "'answer'",
    ):
        assert name in str(caught.value)


def test_a_run_behind_one_that_was_refused_starts_its_own_ranks(run: Run) -> None:
    status, output = run(
        *FIT, "--trainer.devices", "3", "--trainer.strategy", "lrl.AsyncDDP", "--data.max_lag", "-1"
    )
    assert status == 2 and "max_lag" in output
    assert "LOCAL_RANK" not in os.environ, "it would wait for ranks that nobody starts"


NOTHING_FREE = SimpleNamespace(total=2**30, used=2**30, free=1000)


def test_numbers_that_are_compared_differ_in_the_message(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 800_000  # bytes, of the megabyte that the checkpoint takes
    disk = SimpleNamespace(total=2**40, used=0, free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk)
    status, output = run(*FIT)
    found = re.search(r"where (\S+) GiB are free, and a checkpoint takes (\S+)\. Free some", output)
    assert status == 2 and found is not None, output
    assert float(found[1]) == pytest.approx(free / 2**30, rel=0.1) and float(found[2]) > float(
        found[1]
    )
    assert in_gib(0.0101 * 2**30, 0.0099 * 2**30, 0) == ["0.0101", "0.0099", "0.0000"]
    assert in_gib(3 * 2**30, 10 * 2**30) == ["3.0", "10.0"]


@pytest.mark.parametrize(
    ("patched", "found", "named"),
    [
        (
            "lrl.preflight.resources.memory_here",
            lambda: 2**20,
            (
                "Memory",
                "trainer 0.00",
                "keys and values 1.0",
                "there are 0.0010",
                "model.model",
                "kv_cache_gib",
            ),
        ),
        (
            "shutil.disk_usage",
            lambda path: NOTHING_FREE,
            ("/dev/shm", "remount", "trainer.default_root_dir", "checkpoint"),
        ),
    ],
)
def test_too_little_memory_is_an_error_with_its_parts(
    patched: str,
    found: Callable[..., object],
    named: tuple[str, ...],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patched, found)
    status, output = run(*FIT)
    assert status == 2 and len(output.splitlines()) <= 10
    assert all(name in output for name in named), output


def test_memory_that_a_full_micro_batch_may_not_have_gives_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    least = resources.GIB + 5 * 2**19  # keys and values, and the weights of this small policy
    free = SimpleNamespace(available=least, total=2**40)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    with pytest.raises(ServerReached):
        run(*FIT)
    assert "Memory: a full micro-batch takes about 0.0" in caplog.text, caplog.text
    assert "lower data.micro_batch_tokens" in caplog.text


def test_the_room_of_pull_counts_the_generators_files(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: NOTHING_FREE)
    status, output = run(*FIT, "--trainer.strategy.weight_transfer", "pull")
    assert status == 2 and "strategy.weight_transfer pull takes" in output


def test_a_tight_or_odd_setting_gives_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    sizes = ("--data.micro_batch_tokens", "8", "--trainer.strategy.server.max_num_seqs", "2")
    words = (
        *FIT,
        *sizes,
        "--model.warmup_steps",
        "9",
        "--data.prompts.source",
        "{in}/data/twins.jsonl",
    )
    words = (*words, "--model.lr", "0")
    with caplog.at_level(logging.WARNING), pytest.raises(ServerReached):
        run(*words)
    for name in (
        "data.micro_batch_tokens is 8",
        "max_num_seqs 2",
        "model.warmup_steps is 9",
        "8 of the 16 prompts",
        "lr is 0",
    ):
        assert name in caplog.text


def test_a_checkpoint_that_would_keep_the_worst_accuracy_gives_a_warning(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    words = (*evaluation({})[0], *monitor("ModelCheckpoint", "eval/rows/accuracy"))
    with caplog.at_level(logging.WARNING), pytest.raises(ServerReached):
        run(*FIT, *words)
    assert "ModelCheckpoint.monitor is 'eval/rows/accuracy' with mode min" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), pytest.raises(ServerReached):
        run(*FIT, *words, "--trainer.callbacks.mode", "max")
    assert "with mode min" not in caplog.text


@pytest.mark.parametrize("fast", [False, True])
def test_a_number_format_in_which_the_cpu_is_slow_gives_a_warning(
    fast: bool, run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "computes_in", lambda dtype: fast or dtype == "float32")
    halves = {"--trainer.strategy.server.dtype": "bfloat16", "--trainer.precision": "bf16-mixed"}
    words = [word for pair in halves.items() for word in pair]
    with caplog.at_level(logging.WARNING), pytest.raises(ServerReached):
        run(*FIT, "--model.dtype", "float32", *words)
    assert ("strategy.server.dtype computes in bfloat16" in caplog.text) != fast
    assert ("trainer.precision computes in bfloat16" in caplog.text) != fast
    assert "model.dtype computes" not in caplog.text


def test_the_command_itself_ends_with_status_2_and_no_traceback(
    inputs: Path, tmp_path: Path
) -> None:
    given = [
        word.replace("{in}", str(inputs))
        for word in (*FIT, "--model.model", "{in}/models/no-shard")
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-c",
        "import sys; from lrl.cli.main import main; sys.exit(main())",
        *given,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 2, done.stderr
    assert "model-00002-of-00002.safetensors" in message(done.stderr)
    assert len(message(done.stderr).splitlines()) <= 10 and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("**/generator-*.log"))
