"""Admission of requests: look-up of jobs and hosts, and refusals in one line for the user."""

from __future__ import annotations

import re
from dataclasses import replace

from clusterd.core.data_locality import places_of
from clusterd.core.host import Host
from clusterd.core.queueing.arrays import find_task, tasks_of
from clusterd.core.queueing.dependencies import CONDITIONS, CORRESPONDING, SINGLETON, is_satisfied
from clusterd.core.state import Attempt, Job, State
from clusterd.errors import ClusterError, UsageError
from clusterd.keys import keys_of
from clusterd.types import ArrayTask, AttemptState, DeviceId, HostId, JobId, JobKind, JobSpec, JobState
from clusterd.units import is_match, is_pattern


def find_job(state: State, text: str, user: str) -> Job:
    """The job of this id, or the user's own job of this name, or of an unambiguous beginning of its name.

    A name may be given again, by others too, whose jobs only their ids mean. Of several own jobs that one is meant that
    is not over, and of these the newest.

    Raises:
        UsageError: there is none, or several.
    """
    if not text:  # what a script's unset variable gives; every name begins with it
        raise UsageError("no job is named: give its id or its name")
    if JobId(text) in state.jobs:
        return state.jobs[JobId(text)]
    own = [j for j in state.jobs.values() if j.spec.user == user]
    found = [j for j in own if j.spec.name == text]
    if not found and (task := find_task(state, text)) is not None:
        return state.jobs[task]
    if not found and len(tasks := tasks_of(own, text, user)) > 1:
        raise UsageError(
            f"{text} is an array: name one of its tasks, as {tasks[0].spec.name}; clusterd ls {text} has all"
        )
    found = found or [j for j in own if j.spec.name.startswith(text)]
    names = sorted({j.spec.name for j in found})
    if len(names) > 1:
        could = f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        raise UsageError(f"{text!r} could be {could}: write more of the name, or the id")
    if names:
        return _newest(found)
    if others := [j for j in state.jobs.values() if j.spec.name == text]:
        job = _newest(others)
        raise UsageError(f"{text} is {job.spec.user}'s, not yours: if it is meant, give its id, {job.id}")
    raise UsageError(f"there is no job {text!r} of yours: clusterd ls --all shows them")


def _newest(jobs: list[Job]) -> Job:
    return max(reversed(jobs), key=lambda job: not job.state.is_final)


def find_awaited(state: State, spec: JobSpec, user: str) -> tuple[JobId, ...]:
    """The jobs after which `spec` is to start, each once, with its condition unless that is "ok".

    They are given by id, name or pattern: ``train``, ``12:any``, ``prep_*``. The id of an array is the whole array. Of
    an array whose task has the index of this one, ``12:corr`` means that task; ``singleton`` means the user's earlier
    jobs of the same name, however they end.

    Raises:
        UsageError: there is none, or several.
        ClusterError: one will never finish.
    """
    found: dict[JobId, None] = {}
    for text in spec.after:
        name, colon, condition = text.partition(":")
        if colon and condition not in (*CONDITIONS, CORRESPONDING):
            known = ", ".join((*CONDITIONS, CORRESPONDING))
            raise UsageError(f"after {text!r}: {condition!r} is no condition; there are {known}")
        if name == SINGLETON:
            jobs, condition = _same_name(state, spec, user), "any"
        else:
            jobs = _named(state, name, user)
        if condition == CORRESPONDING:
            index = spec.array.index if spec.array is not None else None
            jobs = [job for job in jobs if job.spec.array is not None and job.spec.array.index == index]
            condition = "ok"
            if not jobs:
                which = "this job is no task of an array" if index is None else f"{name} has no task {index}"
                raise UsageError(f"after {text!r}: {which}")
        for job in jobs:
            if job.state.is_final and not is_satisfied(job, condition or "ok"):
                raise ClusterError(f"job {job.id} ({job.spec.name}) is {job.state.value}: nothing can start after it")
            found[JobId(f"{job.id}:{condition}" if condition not in ("", "ok") else job.id)] = None
    return tuple(found)


def _named(state: State, text: str, user: str) -> list[Job]:
    """All tasks of an array, the user's newest job of each name that matches a pattern, or one job."""
    if tasks := tasks_of(state.jobs.values(), text, user):
        return tasks
    if not is_pattern(text):
        return [find_job(state, text, user)]
    matching = [j for j in state.jobs.values() if j.spec.user == user and is_match(j.spec.name, text)]
    if not matching:
        raise UsageError(f"after: no job of yours matches {text}")
    return [_newest([j for j in matching if j.spec.name == name]) for name in sorted({j.spec.name for j in matching})]


def _same_name(state: State, spec: JobSpec, user: str) -> list[Job]:
    """The user's jobs that are not over and have the name of this one, or of its array without being in it."""
    name = spec.array.name if spec.array is not None else spec.name
    own = spec.array.id if spec.array is not None else ""
    return [
        job
        for job in state.jobs.values()
        if job.spec.user == user and not job.state.is_final and name == (job.spec.array or job.spec).name
        if not (own and job.spec.array is not None and job.spec.array.id == own)
    ]


def find_checkpoint(state: State, spec: JobSpec, user: str, is_operator: bool) -> JobSpec:
    """The job with the checkpoint that it is to start from; one that another job left is looked up by id or name.

    Raises:
        UsageError: there is no such job, or it is of another kind.
        ClusterError: it has left none, or has not ended.
    """
    text = spec.restore
    if text is None or "/" in text:
        return spec
    job = find_own_job(state, text, user, is_operator)
    label = f"job {job.id} ({job.spec.name})"
    if JobKind.COMMAND in (job.spec.kind, spec.kind):
        which = label if job.spec.kind is JobKind.COMMAND else "the new job"
        raise UsageError(f"{which} is a command: it saves nothing from which another job could go on")
    if spec.kind is not job.spec.kind:
        raise UsageError(f"{label} is {job.spec.kind.value}, the new one {spec.kind.value}: checkpoints differ")
    if not job.state.is_final:
        raise ClusterError(
            f"{label} is {job.state.value}: clusterd cancel {job.id} saves it and ends it; clusterd edit changes its "
            "limits while it runs"
        )
    continued = replace(spec, continues=job.spec.continues or job.id)
    if spec.kind is JobKind.CHECKPOINTABLE:  # its script finds what it saved by itself
        return replace(continued, restore=None)
    steps = spec.steps or (job.inspection.shape or {}).get("steps", 0)
    if spec.snapshot == job.spec.snapshot and steps and steps <= job.progress.step:
        more = f"clusterd resume {job.id} --steps {2 * steps}"
        raise ClusterError(f"{label} has done all of its {job.progress.step} steps: {more}")
    if job.checkpoint.path is None or (job.state is JobState.FINISHED and job.checkpoint.step < job.progress.step):
        raise ClusterError(
            f"{label} has left no checkpoint: {job.reason}. A job saves at its time limit and when it is cancelled; "
            "with [checkpoints] directory in its file, also at its end"
        )
    return replace(continued, restore=job.checkpoint.path, restore_step=job.checkpoint.step)


def refuse_other_array(state: State, array: ArrayTask, user: str) -> None:
    """Refuse a task of an array that is not the user's.

    Raises:
        UsageError: it is.
    """
    first = state.jobs.get(array.id)
    if first is None or first.spec.user != user or first.spec.array is None or first.spec.array.name != array.name:
        raise UsageError(f"there is no array {array.id} ({array.name}) of yours: submit its first task without an id")


def find_host(state: State, name: str) -> Host:
    """The host of this name.

    Raises:
        UsageError: there is none.
    """
    host = state.hosts.get(HostId(name))
    if host is None:
        known = ", ".join(sorted(state.hosts)) or "none yet"
        raise UsageError(f"there is no host {name!r} (hosts: {known}): clusterd host add {name}")
    return host


def find_devices(state: State, text: str) -> list[DeviceId]:
    """Devices of a host: ``gpu01:gpu0-2,5``, ``gpu01:3,4``, or ``gpu01`` for all of them.

    Raises:
        UsageError: the host or a device does not exist.
    """
    name, _, which = text.partition(":")
    host = find_host(state, name)
    known = {device.id for device in host.devices}
    if not which:
        return [device.id for device in host.devices]
    found: list[DeviceId] = []
    kinds: tuple[str, ...] = ("gpu", "cpu", "")
    for part in which.split(","):
        kind, first, last = re.fullmatch(r"([a-z]*)(.*?)(?:-(\d+))?", part, re.ASCII | re.DOTALL).groups()  # type: ignore[union-attr]
        kinds = (kind,) if kind else kinds  # in gpu0-2,5 of all that follow
        is_range = last is not None and first.isdecimal() and int(first) <= int(last) < int(first) + len(known)
        for number in range(int(first), int(last) + 1) if is_range else [part.removeprefix(kind)]:
            device = next((id_ for k in kinds if (id_ := DeviceId(f"{host.id}:{k}{number}")) in known), None)
            if device is None:
                there = ", ".join(sorted(known)) or "none"
                raise UsageError(f"{host.id} has no device {part!r}: there are {there}")
            found.append(device)
    return found


def find_own_job(state: State, text: str, user: str, is_operator: bool, *, ends: bool = False) -> Job:
    """The job that `text` names, for a user who wants to change it: only its owner and operators may.

    Args:
        ends: work of it is to be ended or deleted, for which the beginning of a name is not enough.
    Raises:
        UsageError: none, or several.
        ClusterError: `user` is neither.
    """
    job = find_job(state, text, user)
    if ends and text not in (job.id, job.spec.name) and job.spec.name.startswith(text):
        whole = f"to end or delete something, give its whole name, or its id, {job.id}"
        raise UsageError(f"there is no job {text!r} of yours, but {job.spec.name}: {whole}")
    if not is_operator and user != job.spec.user:
        raise ClusterError(f"job {job.id} ({job.spec.name}) is {job.spec.user}'s: ask them, or an operator")
    return job


def may_remove(state: State, host: Host) -> None:
    """Check that a host may be removed: nothing runs on it.

    Raises:
        ClusterError: something does; its work would be lost.
    """
    jobs = sorted({state.jobs[a.job].spec.name for a in state.attempts_on(host.id)})
    if jobs:
        raise ClusterError(
            f"{host.id} runs {', '.join(jobs)}: drain it first (clusterd host drain {host.id}), or cancel them"
        )


def may_submit(spec: JobSpec) -> None:
    """Check a job as far as possible without the cluster.

    Raises:
        UsageError: naming the field and what would be right.
    """
    wanted = spec.resources
    if wanted.plans and spec.kind is not JobKind.CHECKPOINTABLE:
        raise UsageError(
            f'resources.plans is for kind = "checkpointable"; a {spec.kind.value} job takes one wish: resources.plan'
        )
    if spec.kind is JobKind.CHECKPOINTABLE and wanted.devices < 1:
        raise UsageError('a checkpointable job needs devices, or plans to run under, as in plans = ["dp=2", "dp=1"]')
    if not spec.command:
        raise UsageError('command is empty: give the argv to run, as in command = ["python", "train.py"]')
    if wanted.plan is not None and wanted.devices and wanted.plan.ranks != wanted.devices:
        raise UsageError(
            f"resources.plan ({wanted.plan}) has {wanted.plan.ranks} ranks, resources ask for {wanted.devices} "
            "devices: make them equal, or leave one out"
        )
    if spec.checkpoint_directory is not None and not spec.checkpoint_directory.startswith("/"):
        raise UsageError(f"checkpoints.directory is {spec.checkpoint_directory!r}; it must be an absolute path")
    if spec.checkpoint_every_s is not None and spec.checkpoint_every_s < 1.0:
        raise UsageError(f"checkpoints.every is {spec.checkpoint_every_s:g} s: it must be a second or more")
    if spec.kind is JobKind.COMMAND:
        of_training = {key.name: key.of(spec) for key in keys_of(JobSpec) if key.kinds and spec.kind not in key.kinds}
        for key, value in {**of_training, "--from": spec.restore, "--steps": spec.steps}.items():
            if value is not None:
                raise UsageError(
                    f"{key} means nothing to a command, which is only run: leave it out, or say what the script is: "
                    'kind = "elastic" or "checkpointable"'
                )
    if spec.steps is not None and (spec.steps < 1 or spec.kind is not JobKind.ELASTIC):
        raise UsageError(f"--steps is {spec.steps}: it is a number of steps, for elastic jobs; others count their own")
    if spec.restore is not None and spec.kind is not JobKind.ELASTIC:
        raise UsageError("--from needs an elastic job: the scripts of others find their checkpoints by themselves")
    if spec.restore is not None and not places_of(spec.restore)[0][1].startswith("/"):
        raise UsageError(f"--from {spec.restore}: write an absolute path that the job's hosts see, or HOST:/folder")
    if spec.stall_s is not None and spec.kind is not JobKind.ELASTIC:
        raise UsageError(f"limits.stall is for elastic jobs, whose steps are known; this is a {spec.kind.value} job")
    if spec.stall_s is not None and spec.stall_s <= 0:
        raise UsageError(f"limits.stall is {spec.stall_s:g} s: it must be longer than nothing")
    if spec.time_limit_s is not None and spec.time_limit_s <= 0:
        raise UsageError(f"limits.time is {spec.time_limit_s:g} s: it must be longer than nothing")


def hosts_without_login(state: State, account: str) -> dict[HostId, str]:
    """Hosts on which an account's jobs may not run, with the reason."""
    return {host.id: why for host in state.hosts.values() if (why := host.without_login(account))}


def running_attempt(job: Job, otherwise: str) -> Attempt:
    """The attempt of a job that runs.

    Raises:
        ClusterError: it does not run, with `otherwise`.
    """
    if job.attempt is None or job.attempt.state is not AttemptState.RUNNING:
        raise ClusterError(f"job {job.id} ({job.spec.name}) is {job.state.value}: {otherwise}")
    return job.attempt


def refuse_if_over(job: Job) -> None:
    """Refuse a request about a job that is over.

    Raises:
        ClusterError: it is.
    """
    if job.state.is_final:
        raise ClusterError(f"job {job.id} ({job.spec.name}) is {job.state.value} already")
