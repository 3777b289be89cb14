"""Roles of users, and what they see of other users' jobs."""

from __future__ import annotations

import grp
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from clusterd import projection
from clusterd.client import Client
from clusterd.core import events as e
from clusterd.core.state import State
from clusterd.daemon.access import RULES, THEIR_JOB, Access, Callers, Peer
from clusterd.daemon.api.server import Server
from clusterd.daemon.api.usage import entries
from clusterd.errors import ClusterError
from clusterd.rows import plain
from clusterd.tui.model.model import Model
from clusterd.types import ArrayTask, JobId, JobSpec, RankEnd, Reason, Resources
from tests.core.allocation.test_bookings import book
from tests.core.conftest import Lab

ANN, BOB = Peer("ann", 1001, False), Peer("bob", 1002, False)
OPERATOR = Peer("olga", 1003, True)
READER = Peer("rita", 1004, False, is_reader=True)


@pytest.fixture
def lab() -> Lab:
    """A job of bob runs on both devices, a second one failed, and one of ann waits."""
    lab = Lab()
    lab.host("a", gpus=2)
    command = ("python", "train.py", "--token", "hunter2")
    theirs: dict[str, Any] = {"user": "bob", "command": command, "env": {"NOTES": "private"}, "workdir": "/home/bob"}
    spec_array = ArrayTask(id=JobId("1"), name="hidden-sweep", index=0, values={"LR": "0.125"})
    for name, more in (("hidden-model", {"array": spec_array}), ("hidden-try", {})):
        job, _ = submit(lab, name, devices=2, **theirs, **more)
    submit(lab, "mine", devices=1, user="ann", command=("true",), env={}, workdir="/home/ann")
    lab.run(JobId("1"))
    end = RankEnd(reason=Reason.EXIT, exit_code=1, message="the password is wrong")
    lab.exit(JobId("1"), end=end)
    lab.stopped(JobId("1"))
    lab.run(job)
    return lab


def submit(lab: Lab, name: str, **what: Any) -> Any:
    lab.jobs += 1
    job = JobId(str(lab.jobs))
    spec = JobSpec(name=name, resources=Resources(devices=what.pop("devices")), **what)
    return job, lab.tell(e.JobSubmitted(**lab.at(), job=job, spec=spec))


def access(lab: Lab, visibility: str) -> Access:
    return Access(lambda: lab.scheduler.state, visibility)


def everything(lab: Lab) -> dict[str, Any]:
    """All answers to verbs that only look, as one text."""
    state = lab.scheduler.state
    return {
        "change": projection.change_row(state, 1, lab.log, lab.decisions),
        "jobs": [projection.job_row(job, state) for job in state.jobs.values()],
        "show": [
            {"spec": projection.spec_row(job.spec), "attempts": [projection.attempt_row(a) for a in job.attempts],
             **plain(projection.job_row(job, state))}
            for job in state.jobs.values()
        ],
        "hosts": [projection.host_row(state, host) for host in state.hosts.values()],
        "holders": {"hidden-model": 1, "hidden-try": 1, "mine": 1},
    }  # fmt: skip


@pytest.mark.parametrize("peer", [ANN, READER])
def test_names_shows_no_command_line_environment_or_output(lab: Lab, peer: Peer) -> None:
    seen = json.dumps(access(lab, "names").shown(peer, everything(lab)))
    for hidden in ("hunter2", "private", "/home/bob", "0.125", "password"):
        assert hidden not in seen
    for shown in ("hidden-model", "hidden-try", "bob", "a:gpu0"):
        assert shown in seen


def test_own_shows_an_anonymous_row_with_its_devices(lab: Lab) -> None:
    seen = access(lab, "own").shown(ANN, everything(lab))
    text = json.dumps(seen)
    for hidden in ("hunter2", "private", "/home/bob", "password", "hidden-", "bob"):
        assert hidden not in text
    rows = {row["id"]: row for row in seen["jobs"]}
    assert (rows["2"]["name"], rows["2"]["state"]) == (THEIR_JOB, "running")
    assert rows["2"]["devices"] == ["a:gpu0", "a:gpu1"]
    assert (rows["3"]["name"], rows["3"]["user"]) == ("mine", "ann")
    assert rows["3"]["reason"], "why it waits"
    assert {device["job_name"] for device in seen["hosts"][0]["devices"]} == {THEIR_JOB}
    assert seen["holders"] == {THEIR_JOB: 2, "mine": 1}
    assert {event["kind"] for event in seen["change"]["events"]} >= {"HostAdded", "JobSubmitted"}
    assert [event["job"] for event in seen["change"]["events"] if "job" in event] == ["3"]


@pytest.mark.parametrize("visibility", ["own", "names"])
def test_bookings_and_the_calendar_name_nobody_who_is_hidden(lab: Lab, visibility: str) -> None:
    """Nor who has booked, and has no job yet."""
    book(lab, "a:gpu0", begin_s=3600.0, owner="carol", name="hidden-paper")
    state, now_s = lab.scheduler.state, lab.now_s
    claims = [projection.claim_row(claim) for claim in state.device_claims.values()]
    seen = access(lab, visibility).shown(ANN, [claims, entries(state, lambda _: None, {}, now_s, now_s + 86400.0)])
    text = json.dumps(seen)
    for name in ("carol", "hidden-paper", "bob", "hidden-try"):
        assert (name in text) == (visibility == "names")
    assert [entry["what"] for entry in seen[1]] == ["running", "booking"]


@pytest.mark.parametrize("visibility", ["own", "names"])
def test_the_terminal_ui_shows_what_is_left(lab: Lab, visibility: str) -> None:
    state, rules = lab.scheduler.state, access(lab, visibility)
    jobs = [projection.job_row(job, state) for job in state.jobs.values()]
    baseline = {"status": {}, "jobs": jobs, "hosts": [projection.host_row(state, h) for h in state.hosts.values()]}
    model = Model()
    model.apply(rules.shown(ANN, {"snapshot": baseline, "number": 1}))
    model.apply(rules.shown(ANN, projection.change_row(state, 2, lab.log, lab.decisions)))
    assert model.jobs["2"].name == (THEIR_JOB if visibility == "own" else "hidden-try")
    assert model.jobs["2"].devices == ("a:gpu0", "a:gpu1")
    assert model.jobs["2"].submitted_s > 0


def test_own_keeps_the_shape_of_rows(lab: Lab) -> None:
    """A client of any version finds each field, with the type that it has in a new job."""
    state = lab.scheduler.state
    rows = json.loads(json.dumps([plain(projection.job_row(job, state)) for job in state.jobs.values()]))
    for before, after in zip(rows, access(lab, "own").shown(ANN, rows), strict=True):
        assert before.keys() == after.keys()
        for key in before:
            assert type(after[key]) in (type(before[key]), type(None)), key


@pytest.mark.parametrize("visibility", ["own", "names", "all"])
def test_operators_and_owners_see_everything(lab: Lab, visibility: str) -> None:
    before = everything(lab)
    assert access(lab, visibility).shown(OPERATOR, before) == before
    seen = json.dumps(plain(access(lab, visibility).shown(BOB, before)))
    assert "hunter2" in seen and "password" in seen


def test_a_refusal_does_not_name_hidden_jobs(lab: Lab) -> None:
    message = "'secret' could be hidden-model, hidden-try: write more of the name, or the id; bob's."
    assert "hidden-" not in access(lab, "own").text(ANN, message)
    assert access(lab, "names").text(ANN, message) == message


@pytest.mark.parametrize(
    ("visibility", "verb", "is_refused"),
    [
        ("own", "job", True), ("own", "why", True), ("own", "logs", True), ("own", "wait", True),
        ("names", "job", False), ("names", "why", False), ("names", "logs", True), ("names", "steps", True),
        ("all", "job", False), ("all", "logs", False),
    ],
)  # fmt: skip
def test_another_users_job(lab: Lab, visibility: str, verb: str, is_refused: bool) -> None:
    rules = access(lab, visibility)
    rules.admit(BOB, verb, {"job": "hidden-try"})
    rules.admit(OPERATOR, verb, {"job": "2"})
    if not is_refused:
        rules.admit(ANN, verb, {"job": "2"})
        return
    with pytest.raises(ClusterError, match="job 2 is another user's") as refused:
        rules.admit(ANN, verb, {"job": "2"})
    assert "bob" not in str(refused.value)


@pytest.mark.parametrize("verb", sorted(verb for verb, rule in RULES.items() if rule.callers is not Callers.EVERYBODY))
def test_a_reader_changes_nothing(verb: str) -> None:
    with pytest.raises(ClusterError, match="user rita may only look"):
        Access(State).admit(READER, verb, {})


@pytest.mark.parametrize("verb", sorted(verb for verb, rule in RULES.items() if rule.callers is Callers.OPERATORS))
def test_an_operators_verb(verb: str) -> None:
    Access(State).admit(OPERATOR, verb, {})
    with pytest.raises(ClusterError, match=r"user ann may not .*: ask an operator"):
        Access(State).admit(ANN, verb, {})


def test_a_backup_is_for_the_daemons_account_and_not_for_other_operators() -> None:
    with pytest.raises(ClusterError, match="only the account that runs the daemon"):
        Access(State).admit(OPERATOR, "backup", {})
    Access(State).admit(Peer("me", os.getuid(), True), "backup", {})


def test_a_group_has_a_role() -> None:
    """The user of these tests, by a name and by a group; an operator is no reader."""
    me = pwd.getpwnam("nobody")
    group = grp.getgrgid(me.pw_gid).gr_name
    assert Access(State, readers=lambda: (f"@{group}",)).peer(me.pw_uid, 1).is_reader
    assert Access(State, readers=lambda: ("nobody",)).peer(me.pw_uid, 1).is_reader
    both = Access(State, operators=lambda: (f"@{group}",), readers=lambda: ("nobody",)).peer(me.pw_uid, 1)
    assert both.is_operator and not both.is_reader
    assert not Access(State, readers=lambda: ("@no-such-group", "root")).peer(me.pw_uid, 1).is_reader


def as_user(lab: Lab, peer: Peer) -> Access:
    """Access of a server whose every client is the same user."""

    class OneUser(Access):
        def peer(self, uid: int, connection: int) -> Peer:
            return peer

    return OneUser(lambda: lab.scheduler.state, "own")


def test_the_server_filters_answers_streams_and_refusals(lab: Lab, tmp_path: Path) -> None:
    """One table guards what is served, whatever a verb returns."""
    state = lab.scheduler.state

    async def jobs(peer: Peer) -> list[Any]:
        return [projection.job_row(job, state) for job in state.jobs.values()]

    async def logs(peer: Peer, job: str) -> Any:
        yield {"data": "the password is hunter2"}

    async def watch(peer: Peer) -> Any:
        yield projection.change_row(state, 1, lab.log, lab.decisions)

    async def submit(peer: Peer) -> None:
        raise ClusterError("hidden-model holds the devices")

    socket = tmp_path / "s"

    async def serve(asked: Callable[[], Any], peer: Peer) -> Any:
        rules = as_user(lab, peer)
        server = Server(socket, None, rules, {"jobs": jobs, "submit": submit}, {"logs": logs, "watch": watch})
        async with await server.listen() as listener, anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, listener)
            answer = await anyio.to_thread.run_sync(asked)
            tasks.cancel_scope.cancel()
        server.withdraw()
        return answer

    def asked() -> tuple[str, str, str, str]:
        with Client(socket, timeout_s=20.0) as client:
            answers = [json.dumps(client.call("jobs")), json.dumps(list(client.stream("watch")))]
            for request in (lambda: client.call("submit"), lambda: list(client.stream("logs", job="2"))):
                try:
                    answers.append(json.dumps(request()))
                except ClusterError as error:
                    answers.append(str(error))
        return answers[0], answers[1], answers[2], answers[3]

    rows, changes, refusal, output = anyio.run(serve, asked, ANN)
    assert all("hidden-" not in text and "bob" not in text for text in (rows, changes, refusal, output))
    assert "another user's" in output and THEIR_JOB in refusal
    rows, changes, refusal, output = anyio.run(serve, asked, BOB)
    assert "hidden-model" in rows and "hunter2" in changes and "hunter2" in output
    *_, refusal, _ = anyio.run(serve, asked, READER)
    assert "may only look" in refusal
