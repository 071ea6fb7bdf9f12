"""A run: what it owns, and its loop.

Lightning calls hooks. What users set up (the policy, the data module, the strategy and the
callbacks) passes them on to the run, in this order:

    check()       strategy.setup_environment    before anything starts
    prepare()     data.setup                    loads the prompts; workers start
    start()       strategy.setup                generators start, members join
    begin()       WeightSync.on_train_start     the first sync: proves the generators, admits prompts
    next_step()   the loader of the data        a stream of micro-batches, packed as groups finish
      (the policy's training_step adds up their gradients and does one optimizer step)
    sync()        WeightSync.on_train_batch_end    copies the weights and starts giving them to the
                                                generators; once they have them (during the next
                                                step, with `max_lag` above 0), admits prompts
    evaluate()    Evaluation                    on slots of its own, beside the next steps
    end()         strategy.teardown             stops all that the run started, after errors too

Each rank has a run, made by `PolicyModule.configure_callbacks`; the one of rank 0 owns the
generators, the workers (processes with the user's rewards and environments) and the controller, and
starts, syncs and evaluates. Code that waits for groups or an evaluation calls `poll()` meanwhile.

    lrl.rollouts.ledger         admits prompts, and hands out groups in the order that bounds the lag
    lrl.rollouts.controller     a group's way from the request to the trainer
    lrl.rollouts.stream         waits for the groups of a step, and packs them into micro-batches
    lrl.routing.request_queue   requests get slots of generators, and free them
    lrl.generators.fleet        generators are watched and replaced
    lrl.workers.process         workers are started, and killed
    lrl.weights.sync            one sync
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.callbacks.base import find, find_all
from lrl.callbacks.weight_sync import WeightSync
from lrl.checkpoints.resume import steps_done
from lrl.checkpoints.run_folder import continue_logs, lock_run_folder, run_folder
from lrl.datamodule import RolloutDataModule
from lrl.evaluation import answer
from lrl.generators.fleet import Fleet
from lrl.generators.pool import GeneratorPool
from lrl.members.run_members import RunMembers, make_members
from lrl.policy import PolicyModule
from lrl.preflight.settings import check_run, check_strategy
from lrl.rewards import RewardPool
from lrl.rollouts.prompts import Prompts
from lrl.rollouts.stream import ControllerCalls, RankStream, StepStream
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.auth import START_S
from lrl.system.event_loop import LoopThread
from lrl.system.output import progress_bar
from lrl.system.stopwatch import Stopwatch
from lrl.types import Group, Prompt, Sampling, Step
from lrl.weights.sync import Sync

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation


class Run:
    """One `trainer.fit` or `trainer.validate`, from its checks to its end."""

    loop: LoopThread
    """Its thread talks to the generators and the workers; rank 0 has it from `prepare` on."""
    fleet: Fleet
    """The generators; rank 0 has them from `start` on."""
    members: RunMembers

    def __init__(self, trainer: L.Trainer, policy: PolicyModule, data: RolloutDataModule) -> None:
        check_strategy(trainer)
        assert isinstance(trainer.strategy, GeneratorDevices)
        self.trainer = trainer
        self.policy = policy
        self.data = data
        self.strategy = trainer.strategy
        self.stopwatch = Stopwatch()
        """What the trainer does (`lrl.system.stopwatch.TRAINER`)."""
        self.version = -1
        """The version in the generators."""
        self.newest = -1
        """The version in the generators, or on its way."""
        self.pause_seconds = 0.0
        """Seconds without writing in the last finished sync."""
        self.syncs: dict[GeneratorPool, Sync] = {}
        """The sync of each pool of generators; rank 0 has them from `start` to `end`."""
        self._step: StepStream | None = None
        self._calls: ControllerCalls | None = None
        self._ends = ExitStack()
        """Ends what was started: the last one first, and each one also after another's error."""
        self._ends.callback(policy.free_sent)
        self.strategy.run = data.run = self

    # ---- the loop

    def check(self) -> None:
        """Checks settings, prompts, model and memory, and claims the run's folder. Raises
        ConfigError."""
        if not self.leads:
            return
        check_run(self)
        self._ends.callback(os.close, lock_run_folder(self.trainer))
        resumed = self.data.resumes_from if self.trains else None
        continue_logs(self.trainer, -1 if resumed is None else steps_done(Path(resumed)))

    def prepare(self) -> None:
        if not self.leads:
            return
        data, first = self.data, None
        self.loop = LoopThread()
        self.loop.interrupted = self.raise_if_stopped
        self._ends.callback(self.loop.close)
        if self.trains:
            first = next(iter(data.prompts))
            self.start_rewards(data.reward_pool, first)
            if data.length_predictor is not None:
                self._ends.callback(data.length_predictor.ranker.close)
                data.length_predictor.ranker.start()
        if data.environment is not None:
            self._ends.callback(data.environment.pool.close)
            parses = self.strategy.server_settings.tool_parser is not None
            data.environment.start(self.loop, data.policy_text, first, parses)
            if (agents := data.environment.external) is not None:
                work = agents.listen(self.strategy.server_settings, run_folder(self.trainer))
                rank_zero_info(self.loop.wait(work, START_S, "opening the port for agents"))

    def start_rewards(self, pool: RewardPool, first: Prompt) -> None:
        """Starts the workers of a pool, which end with the run."""
        self._ends.callback(pool.close)
        pool.start(self.loop, first)

    def start(self) -> None:
        """Starts the generators, and waits until they and the requested members are there; raises
        ServerError if they are not in time."""
        strategy = self.strategy
        servers = strategy.make_servers(self)
        self.fleet = fleet = strategy.make_fleet(self, servers)
        self.members = members = make_members(self, fleet)
        self._ends.callback(members.close)
        self._ends.callback(fleet.stop)
        members.open()
        if strategy.generators_of_other_nodes:  # the first rank of each such node starts some
            strategy.ranks.share((members.server.elsewhere, members.server.token))
        usual = (
            "1 to 2 minutes on a GPU"
            if strategy.root_device.type == "cuda"
            else "10 to 30 s for a small model"
        )
        with progress_bar(f"starting {len(servers)} vLLM generator(s), {usual}:") as bar:

            def raise_if_hopeless() -> None:
                bar.update(0)
                self.raise_if_stopped()
                members.raise_if_all_failed()

            fleet.start(raise_if_hopeless)
            members.admit(strategy.generators_of_other_nodes, raise_if_hopeless)
        assert self.weight_sync is not None, "every run has one (`default_callbacks`)"
        self.syncs = self.weight_sync.make_syncs(self)
        for sync in self.syncs.values():
            self._ends.callback(sync.close)
            self._ends.callback(sync.interrupt)

    def begin(self) -> None:
        """Gives the generators the first version, proves them and admits the first prompts."""
        self.sync()
        self._calls = self.data.make_calls(self)
        self._calls.new_version(self.version)

    def next_step(self) -> Step:
        """Returns the next optimizer step: a lazy stream of micro-batches."""
        if not self.leads:
            return RankStream(self.policy)
        data, step = self.data, self.trainer.global_step
        self._step = StepStream(
            step,
            data.pacing.groups_in(step),
            source=self.calls,
            policy=self.policy,
            learners=data.learners,
            packer=data.make_packer(step, self.policy),
            stopwatch=self.stopwatch,
            gather=self.strategy.placement == "shared",
            replayed=data.replay.draw(step) if data.replay else (),
        )
        return self._step

    def sync(self) -> None:
        """Gives the policy's weights to the generators that write rollouts, and admits the prompts
        that may start under the new version.

        Waits for the previous sync to end, then until the weights are copied. Waits for the whole
        sync if the trainer has nothing else to do (`max_lag` 0), no generator has served yet, or the
        transport does not copy.
        """
        version, pool = self.trainer.global_step, self.fleet.rollouts
        sync = self.syncs[pool]
        self.newest = version

        def on_synced() -> None:
            self.version = version
            self.pause_seconds = sync.pause_seconds
            if self._calls is not None:
                self._calls.new_version(version)

        beside_the_step = self.trainer.training and pool.has_served and self.data.max_lag > 0
        sync.sync(version, on_synced, in_background=beside_the_step)

    def poll(self) -> None:
        """Syncs generators that have joined or were replaced; a waiting trainer calls it a few times
        a second.

        Raises:
            SIGTERMException: The run was stopped.
            NoGenerators: None has served for longer than `strategy.generator_timeout_s`.
        """
        self.raise_if_stopped()
        fleet = self.fleet
        for pool in fleet.pools:
            pool.check_outage()
        if fleet.rollouts.pending or self.syncs[fleet.rollouts].is_broken:
            self.sync()
        if fleet.evaluation is not None and fleet.evaluation.pending:
            self.syncs[fleet.evaluation].sync(self.trainer.global_step)

    def evaluate(
        self,
        prompts: Prompts,
        sampling: Sampling,
        rewards: RewardPool,
        *,
        slots: int | None = None,
        done: Callable[[], Any] = lambda: None,
    ) -> tuple[int, Future[list[Group]]]:
        """Begins to answer and score `prompts`, a group each; calls `done` after each. Returns the
        version of the generators at the beginning, and the groups.

        With `slots`, that many responses are asked for at once, in slots beyond those of rollouts.
        With None they queue behind rollouts, and as many are written as the generators can.
        """
        fleet, data = self.fleet, self.data
        pool, version, spare = fleet.rollouts, self.newest, slots is not None
        if fleet.evaluation is not None and self.trainer.training:
            pool, version, spare = fleet.evaluation, self.trainer.global_step, False
            self.syncs[pool].sync(version)
        groups = answer(
            prompts,
            sampling,
            data.writer(pool, spare=spare),
            data.scorer(rewards),
            at_once=slots if spare and slots is not None else pool.capacity,
            deadline_s=data.rollout_timeout_s,
            done=done,
        )
        return version, self.loop.submit(groups)

    def end(self) -> None:
        """Ends all that the run has started, whatever has happened; idempotent."""
        self.strategy.run = None
        self.syncs = {}
        self._ends.close()

    # ---- its parts, on rank 0

    @property
    def leads(self) -> bool:
        return self.trainer.is_global_zero

    @property
    def trains(self) -> bool:
        return self.trainer.state.fn == "fit"

    @property
    def weight_sync(self) -> WeightSync | None:
        """The settings of the syncs; None on the other ranks."""
        return find(self.trainer, WeightSync)

    @property
    def evaluations(self) -> list[Evaluation]:
        from lrl.callbacks.evaluation import Evaluation  # here: many runs have none

        return find_all(self.trainer, Evaluation)

    @property
    def step_stream(self) -> StepStream:
        """The step that trains now, or the last one; callbacks read its groups and counts."""
        assert self._step is not None, "training has begun"
        return self._step

    @property
    def calls(self) -> ControllerCalls:
        """The controller, for the trainer's thread; rank 0 has it once training begins."""
        if self._calls is None:
            raise RuntimeError("There is no controller: training has not begun.")
        return self._calls

    # ---- signals and checkpoints

    def raise_if_stopped(self) -> None:
        """Raises SIGTERMException if a signal has requested the run's end.

        Does nothing once the run is ending: raising would break off the last checkpoint.
        """
        if not self.trainer.interrupted and self.strategy.run is self:
            self.strategy.signals.check()

    def settle(self) -> None:
        """Waits until every token written so far has arrived, since a checkpoint saves only those. A
        sync that is under way ends first: a generator that loads weights does not answer."""
        if not self.syncs:
            return
        if self.trainer.interrupted:
            for sync in self.syncs.values():
                sync.interrupt()
        else:
            self.syncs[self.fleet.rollouts].wait()
        self.fleet.call(self.fleet.rollouts.flush(), "fetching the tokens on their way")

    def controller_state(self) -> dict[str, Any] | None:
        if self._calls is None:
            return None
        return self._calls.state_dict(self.trainer.global_step)
