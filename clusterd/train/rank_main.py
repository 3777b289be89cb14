"""Main function of one rank: from the rank file to the last step."""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clusterd.exit_reasons import Reason
from clusterd.plans import legality
from clusterd.plans.model_shape import ModelShape
from clusterd.plans.plan import Plan
from clusterd.process_attributes import seeds_given
from clusterd.protocol.control import Ready
from clusterd.protocol.launch import STAGE_VARIABLE, STEPS_VARIABLE
from clusterd.protocol.rank import Probed, Proved
from clusterd.train.checkpoint import dcp, dcp_files, export, pretrained
from clusterd.train.checkpoint.weight_files import open_weights
from clusterd.train.data import fingerprint
from clusterd.train.data.loader import order_of
from clusterd.train.data.stream import Stream, is_stream, keep_first_samples
from clusterd.train.inspect import describe
from clusterd.train.loop.rank_training import Training
from clusterd.train.loop.session import Session, SkippedSession, Stopped
from clusterd.train.loop.step_record import StepLog
from clusterd.train.loop.training_loop import TrainingLoop
from clusterd.train.migration.target import MigrationTarget
from clusterd.train.parallel import precision
from clusterd.train.parallel.alternating import check_parts
from clusterd.train.parallel.mesh import device_of, process_groups, rendezvous, same_on_all_ranks
from clusterd.train.parallel.meta_build import can_build_on_meta
from clusterd.train.parallel.schedule import rate_beyond
from clusterd.train.process import context as contexts
from clusterd.train.process import device_faults, exits, loggers
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control, stop_on_sigterm
from clusterd.train.process.exits import PlanRefused, Refused, TrainError
from clusterd.train.process.job import Job, Outcome
from clusterd.train.process.loggers import Loggers
from clusterd.train.process.probe import probe
from clusterd.train.process.run_in_fork import run_in_fork
from clusterd.train.process.start_phases import StartPhases
from clusterd.train.process.steps_log import StepsLog
from clusterd.train.proof.cuts import comparisons
from clusterd.train.proof.ranks import prove_split
from clusterd.train.proof.results import OF_UPDATES, OF_WRITES, Verdict

OnEnd = Callable[[Training], None]
"""Called on every rank after its last step, while the process groups still exist."""


def run(job: Job, on_end: OnEnd | None = None) -> Outcome:
    """Train `job` as the environment says, to its last step or until a stop.

    Under clusterd a stop ends the process (exit code 0); elsewhere the function returns.

    Raises:
        SystemExit: 93 to 98 if this rank cannot train (see `clusterd.train.process.exits`), 0 after a stop.
    """
    with session(job, on_end, own_loop=False) as opened:
        for _, batch in opened:
            opened.step(batch)
    assert opened.outcome is not None
    return opened.outcome


@contextmanager
def session(job: Job, on_end: OnEnd | None = None, *, own_loop: bool = True) -> Iterator[Session]:
    """Context in which the script trains `job` by its own loop; raises as `run` does."""
    control, job = None, replace(job, own_loop=own_loop)
    try:
        precision.check(job.precision)
        precision.watch_autocast()
        check_parts(job)
        if job.save_format not in export.FORMATS:
            raise Refused(f"save_format is {job.save_format!r}; it must be one of {', '.join(export.FORMATS)}")
        if job.sees_batch not in ("global", "replica"):
            raise Refused(f'sees_batch is {job.sees_batch!r}; it must be "global" or "replica"')
        loggers.check(job.loggers)
        if is_stream(job.data) and job.evaluate is not None and isinstance(job.evaluate.every, str):
            raise Refused(
                f"evaluate: every is {job.evaluate.every!r}, but a stream has no length: give steps, as every=500"
            )
        if is_stream(job.data) and job.sampler is not None:
            raise Refused("sampler gives numbers of samples, and a stream has none: let the stream have that order")
        context = contexts.read()
        if _belongs_to_another_job(job.stage, context):
            yield SkippedSession()
            return
        if steps := os.environ.get(STEPS_VARIABLE):
            factory = job.scheduler if int(steps) > job.steps and context.rank == 0 else None
            if factory is not None and (what := rate_beyond(factory, job.steps, int(steps))):
                _log(f"the script's schedule is made for its {job.steps} steps, the job has {steps}: {what}")
            job = replace(job, steps=int(steps))
        if os.environ.get("CLUSTERD_DESCRIBE") and context.directory is not None:
            write_description(job, context.directory)  # requested before the first launch, to choose a plan
            raise SystemExit(0)
        refuse_second_run(context)
        own_seed = torch.initial_seed()  # of 64 bits, if nobody has seeded it
        is_own = own_seed < 1 << 32 and own_seed not in (*seeds_given, job.seed)
        if is_own and context.rank == 0 and context.migration is None:
            _log(
                f"the script seeds torch with {own_seed}: initial weights, the order of samples and draws of steps "
                f"follow the argument seed={job.seed} alone; pass seed={own_seed} to let them follow it"
            )
        if context.note and context.rank == 0:
            _log(context.note)
        control = Control(context)
        control.start()
        log = _RankLog(job, context)
        with stop_on_sigterm(control), closing(log), training_loop(job, context, control, log) as loop:
            opened = Session(loop)
            try:
                yield opened
            except Stopped:
                pass
            except Exception as error:
                loop.handle(error)
            opened.outcome = outcome = loop.end()
            try:
                if outcome.done and job.save is not None:
                    export.save(loop.training, job.save)
            finally:  # a failed export must not prevent the checkpoint
                loop.leave_checkpoint()
            if outcome.done:  # the script may go on with the files of rank 0, which alone says why it has none
                with suppress(RuntimeError):
                    same_on_all_ranks(0, torch.device("cpu"))
            if on_end is not None:
                on_end(loop.training)
    except Exception as error:
        refusal = exits.classify_error(error, where=str(context) if control is not None else "starting")
        if control is not None:
            refusal = device_faults.judge(error, refusal, context, control)
            reason = str(refusal.reason if refusal is not None else Reason.EXIT)
            message = str(refusal or f"{type(error).__name__}: {exits.first_line(error)}")
            control.report_failure(reason, message)
        if refusal is None:
            raise
        exits.exit_with(refusal)
    finally:
        if control is not None:
            control.close()
    if outcome.stopped and context.launcher == "clusterd":
        raise SystemExit(0)


def _belongs_to_another_job(stage: str, context: Context) -> bool:
    """True if this stage of the script is not the one that this job trains.

    Raises:
        Refused: the job should train one stage of several, but does not say which, or the script has no names for them.
    """
    chosen = os.environ.get(STAGE_VARIABLE, "")
    if context.launcher == "clusterd" and bool(stage) != bool(chosen):
        raise Refused(
            f"the script trains the stage {stage!r}, but the job names none: submit a job for each stage, by clusterd "
            "submit --stages FIRST,SECOND"
            if stage
            else f"the job is the stage {chosen!r} of its script, which trains without a name: pass stage={chosen!r}"
        )
    if chosen in ("", stage):
        return False
    _log(f"stage {stage} is left out: this job trains the stage {chosen}")
    return True


def refuse_second_run(context: Context) -> None:
    """Refuse a second training in this process: measurements and progress of a job belong to one training.

    Raises:
        TrainError: this process has trained already.
    """
    if context.launcher != "clusterd":
        return
    identity = (context.directory, context.attempt, context.generation, context.rank)
    if identity in _trained_here:
        raise TrainError(
            "the script trains a second time (clusterd.train.run or session): a job trains once; name each with "
            'stage="...", and submit them as a chain of jobs: clusterd submit --stages FIRST,SECOND'
        )
    _trained_here.add(identity)


_trained_here: set[tuple[Path | None, Any, int, int]] = set()


@contextmanager
def training_loop(job: Job, context: Context, control: Control, log: StepLog) -> Iterator[TrainingLoop]:
    """Loop of one rank at its first step, from creating process groups to destroying them."""
    started = StartPhases()
    started.end("process")
    target = MigrationTarget(context, control) if context.standby and context.migration is not None else None
    shape = ModelShape.from_dict(context.migration.shape) if context.migration is not None else None
    if context.rank == 0 and job.save is not None:
        # Also in standby: then the migration fails, not the job after the switch.
        export.check(job.save, job.save_format)
    if context.rank == 0 and job.evaluate is not None and job.evaluate.save_best is not None:
        export.check(job.evaluate.save_best, job.save_format)
    if context.final:
        dcp_files.check(context.final)
    stream = _opened_stream(job, context) if is_stream(job.data) else None
    shape = check_plan(job, context, shape)
    # A single process that will never migrate has no other to compare with.
    known = None
    if stream is not None:
        known = fingerprint.of_stream(context.job, [])
    elif context.launcher != "alone":
        known = fingerprint.fingerprint_of(job.data, context.job, partial(_first_order, job))
    compared = known if stream is None else fingerprint.of_stream(context.job, stream.samples())
    if context.rank == 0 and known is not None and context.plan.dp > 1:
        if known["draws"]:
            _log(
                "the data set draws from the global random generators (augmentation), under "
                f"{context.plan} other numbers than in one process: losses differ as between two seeds; a generator of "
                "its own, seeded by the number of the sample, does not depend on the plan",
            )
        elif known["random"]:
            _log(
                "samples of the data set are others each time that they are read, and not by the global random "
                f"generators (a counter, or a generator of its own): under {context.plan} others than in one process, "
                "and losses may differ as between two seeds; what depends on the number of the sample alone does not "
                "depend on the plan",
            )
    weights = open_weights(job.init_from) if job.init_from is not None and not context.restore else None
    needs_values = target is None
    covered = weights is not None and needs_values and pretrained.covers(weights, job.model, job.seed)
    uninitialized = target is not None or bool(context.restore) or covered
    on_meta = uninitialized and can_build_on_meta(job.model, job.seed)
    store = rendezvous(context)
    if comparisons(context.plan) and context.plan.family not in context.proven:
        gathers = shape is not None and shape.gathers
        limit = target.leave_memory_to_source if target is not None else lambda _: None
        given = stream.samples() if stream is not None else None
        verdict = prove_split(job, context, control, store, given=given, gathers=gathers, limit=limit)
        _act_on(verdict, job, context)
        if context.rank == 0 and not (verdict.unclear or verdict.too_large):
            control.report(Proved(context.plan.family))
    # No fork from here on: a child of a process with a CUDA context and the threads of NCCL may hang.
    started.end("proof")
    device = device_of(context)
    with process_groups(context, device, store) as mesh:
        started.end("context")

        def make() -> Training:
            fingerprint.check_same_on_all_ranks(compared, job.data, partial(_first_order, job))
            build_as: dict[str, bool] = {"uninitialized": uninitialized, "on_meta": on_meta}
            made = Training(job, context, device, mesh, **build_as, shape=shape, fingerprint=known, stream=stream)
            if weights is not None and needs_values:
                pretrained.load(made, weights, strict=job.init_strict)
            return made

        restored = ""
        if target is not None:
            training = target.take_over(make, device)
        else:
            training = make()
            if context.restore:
                training.optimizer.make_state()
                restored = dcp_files.find(context.restore)
                dcp.restore(training, training.shape, restored)
                if context.rank == 0:
                    _log(f"goes on after step {training.step} of the checkpoint in {restored}")
            started.end("build")
            training.started = started
        control.send_status(Ready())
        if context.probe and target is None:
            figures = probe(device, context.hosts, precision.dtype_of(job.precision))
            if context.rank == 0:
                control.report(Probed(figures))
        migration_id = target.migration_id if target is not None else ""
        yield TrainingLoop(training, control, log, migration_id=migration_id, restored=restored)


WAYS_OUT = 'return (sum, weight), compare samples by train.gather, or accept it: sees_batch="replica"'


OF_SHARDS = "a shard has a part of the features, over which softmax, top-k, chunks and statistics differ"
OF_STAGES = "a stage has what its layers compute, and none of what others keep in attributes or hooks"
OF_FSDP = "FSDP2 gathers weights for forward passes of their modules; who reads or writes them elsewhere has shards"


def _act_on(verdict: Verdict, job: Job, context: Context) -> None:
    """Refuse the plan, or say in the log what differs from one process.

    Raises:
        PlanRefused: the plan trains something else than one process.
    """
    plan, texts = context.plan, []
    if verdict.of_model:
        cuts = (plan.tp, OF_SHARDS), (plan.pp, OF_STAGES), (plan.zero, OF_FSDP)
        causes = ", and ".join(text for degree, text in cuts if degree > 1)
        raise PlanRefused(
            f"{plan} computes something else than one process: {verdict.of_model}; most often because {causes}: dp and "
            "zero=1 leave the model whole"
        )
    if verdict.difference and job.sees_batch != "replica":
        ways = "; one process has that of the whole batch" if OF_UPDATES in verdict.difference else f"; {WAYS_OUT}"
        ways = "" if OF_WRITES in verdict.difference else ways
        raise PlanRefused(f"the result depends on how the batch is cut: {verdict.difference}{ways}")
    if verdict.difference:
        texts.append(f"the result depends on how {plan} cuts the batch, as accepted: {verdict.difference}")
    if verdict.unclear:
        of_data = ", by samples of the data, of which the script's loop may make others" if job.own_loop else ""
        texts.append(f"it is not shown that {plan} trains as one process: {verdict.unclear}{of_data}")
    elif is_stream(job.data) and plan.dp * plan.accumulation > 1 and not verdict.difference:
        texts.append(
            f"that {plan} trains as one process was shown with the first batch of the stream: where later samples have "
            "what those lack (padding, labels that do not count), a mean over part of them is another; (sum, weight) "
            "is exact"
        )
    if verdict.metrics:
        texts.append(verdict.metrics)
    if verdict.left:
        texts.append(
            f"what forward passes keep depends on {plan}, and with it what reads that (evaluations, metrics, the "
            f"script's loop): {verdict.left}; what they keep of samples of train.gather does not"
        )
    if verdict.too_large:
        texts.append(f"it is not shown that {plan} trains as one process: the whole model does not fit one device")
    if verdict.draws and not verdict.unclear:
        texts.append(
            f"a step draws random numbers (dropout, noise), under {plan} others than in one process: losses differ as "
            "between two seeds"
        )
    if context.rank == 0:
        for text in texts:
            _log(text)


def _first_order(job: Job) -> int:
    """Checksum of what the script's sampler yields for the first epoch; zero: it has none."""
    found = [0]

    def note(_: int, numbers: Any) -> None:
        found.append(zlib.crc32(numbers.tobytes()))

    order_of(job.data, job.global_batch, job.seed, job.sampler, note)
    return found[-1]


def _opened_stream(job: Job, context: Context) -> Stream:
    """The job's stream, with the first batch read for its first step, unless its position comes from other ranks."""
    migration = context.migration
    moves_live = migration is not None and migration.snapshot is None and not migration.lost
    stream = Stream(job.data, strict=moves_live)
    if migration is None:
        step = 0
        if context.restore:
            step, position = dcp.stream_position(dcp_files.find(context.restore))
            stream.restore(position)
        plan, coordinates = context.plan, context.coordinates
        stream.open(
            job, plan, coordinates.replica, step, collates=job.own_loop or coordinates.stage in (0, plan.pp - 1)
        )
    return stream


def check_plan(job: Job, context: Context, shape: ModelShape | None = None) -> ModelShape | None:
    """Check the plan on every rank before rendezvous, so that no rank waits for one that refused.

    Args:
        shape: of the model, if already known.
    Returns:
        The shape, if known now.
    Raises:
        PlanRefused: with all the reasons.
    """
    plan = context.plan
    # A job under clusterd may migrate, which needs the shape. Describing forks, which later threads and a GPU forbid.
    if shape is None and (plan != Plan() or context.launcher == "clusterd"):
        if not is_stream(job.data):
            describe.check_data(job.data)
            keep_first_samples(job.data)
        degrees = [plan.tp] if plan.tp > 1 else []
        shape = run_in_fork(lambda: describe.describe(job, tp_degrees=degrees, trace=False, pipeline=plan.pp > 1))
    if reasons := legality.check(plan, shape, global_batch=job.global_batch):
        raise PlanRefused(f"the plan {plan} cannot run: {'; '.join(reasons)}")
    return shape


def _log(text: str) -> None:
    """Write a line of clusterd's own into the log of the rank."""
    print(f"clusterd: {text}", flush=True)


def write_description(job: Job, directory: Path) -> None:
    """Write the model's shape for the daemon, to ``model.json`` of the attempt's directory."""
    # Step times measured under one torch and Python version do not hold under another.
    environment = f"torch {torch.__version__}, python {sys.version_info.major}.{sys.version_info.minor}"
    text = json.dumps({**describe.describe(job).to_dict(), "environment": environment})
    part = directory / "model.json.part"
    part.write_text(text, encoding="utf-8")
    part.replace(directory / "model.json")


SHOWN = ("lr", "samples_per_s", "grad_norm")
"""Numbers of a step that loggers get, beside its loss and metrics."""


class _RankLog:
    """Step log of rank 0; other ranks have none. The number of the first step is known when it is done."""

    def __init__(self, job: Job, context: Context) -> None:
        self._job, self._context = job, context
        self._log: StepsLog | None = None
        self._loggers: Loggers | None = None

    def step(self, step: int, loss: float | None, time_s: float, details: dict[str, Any]) -> None:
        """Record a finished step."""
        if (log := self._opened(step)) is not None:
            log.step(step, loss, time_s, details)
            known = {"loss": loss} if loss is not None else {}
            self._write(step, {**known, **{k: details[k] for k in SHOWN if k in details}})
            self._write(step, details.get("metrics", {}))

    def evaluation(self, step: int, metrics: dict[str, float], time_s: float) -> None:
        """Record an evaluation after a step."""
        if (log := self._opened(step + 1)) is not None:
            log.evaluation(step, metrics, time_s)
            self._write(step, metrics, "evaluation/")

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Record the script's own metrics after a step."""
        if (log := self._opened(step + 1)) is not None:
            log.metrics(step, metrics)
            self._write(step, metrics)

    def close(self) -> None:
        """Have the loggers write what they buffer."""
        if self._loggers is not None:
            self._loggers.close()

    def _write(self, step: int, values: dict[str, Any], prefix: str = "") -> None:
        if self._loggers is not None and values:
            self._loggers.write(step, values, prefix)

    def _opened(self, first_step: int) -> StepsLog | None:
        job, context = self._job, self._context
        if self._log is None and context.rank == 0:
            self._log = StepsLog(
                context.steps_file,
                first_step=first_step,
                steps=job.steps,
                plan=str(context.plan),
                samples=job.global_batch,
            )
            self._loggers = Loggers(job.loggers, context, first_step) if job.loggers else None
        return self._log
