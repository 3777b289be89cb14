"""Access to verbs by role, and visibility of other users' jobs: one table, which the server enforces.

An answer is filtered on its way out, whatever verb it is of: a new field or a new reason cannot show by mistake what is
to be hidden.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from clusterd.core.queueing import admission
from clusterd.core.state import Job, State
from clusterd.errors import ClusterError
from clusterd.rows import plain
from clusterd.trusted_paths import account_name

SOMEBODY = "another-user"
THEIR_JOB = "another-user's-job"
"""Shown in the place of a hidden name: one word, as in a list of names."""


class Callers(StrEnum):
    """Groups of callers, each within the one before."""

    EVERYBODY = "everybody"  # who may connect, readers too
    USERS = "users"  # all but readers
    OPERATORS = "operators"
    DAEMON = "the daemon's account"


class Others(StrEnum):
    """Visibility that a verb about one job needs where the job is another user's."""

    NONE = "-"  # it is about no job, or checks itself that the job is the caller's
    DETAILS = "unless `own`"
    OUTPUT = "with `all`"


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one verb."""

    callers: Callers
    others: Others = Others.NONE
    does: str = ""  # for the message of a refusal


_LOOK, _DETAILS, _OUTPUT = (
    Rule(Callers.EVERYBODY),
    Rule(Callers.EVERYBODY, Others.DETAILS),
    Rule(Callers.EVERYBODY, Others.OUTPUT),
)
_USE = Rule(Callers.USERS)

RULES: dict[str, Rule] = {
    **dict.fromkeys(("hello", "status", "backups", "jobs", "history", "watch", "hosts", "host", "claims"), _LOOK),
    **dict.fromkeys(("arrays", "tasks", "measurements_export", "usage", "report", "fair_share", "forecasts"), _LOOK),
    "calendar": _LOOK,
    **dict.fromkeys(("job", "why", "wait", "plans", "profile"), _DETAILS),
    **dict.fromkeys(("logs", "steps"), _OUTPUT),
    **dict.fromkeys(
        ("login", "submit", "dry_run", "when", "estimate", "snapshot_has", "snapshot_put", "host_check"), _USE
    ),
    **dict.fromkeys(
        ("cancel", "hold", "release", "requeue", "priority", "edit", "migrate", "unpin", "resume", "rerun"), _USE
    ),
    **dict.fromkeys(("checkpoint", "forget", "files", "file", "shell", "shell_input", "forward"), _USE),
    **dict.fromkeys(("job_input", "signal", "pause", "unpause", "booking_add", "booking_cancel"), _USE),
    **{
        verb: Rule(Callers.OPERATORS, does=does)
        for verb, does in {
            "stop": "stop the daemon",
            "reload": "reload the settings",
            "notice": "post notices",
            "claim_add": "claim devices",
            "claim_remove": "remove claims",
            "host_inspect": "add hosts",
            "host_add": "add hosts",
            "host_trust": "trust hosts",
            "host_drain": "drain hosts",
            "drain_preview": "drain hosts",
            "host_undrain": "undrain hosts",
            "host_remove": "remove hosts",
            "join": "join hosts",
            "join_output": "join hosts",
            "leave": "join hosts",
            "measurements_import": "import measurements",
        }.items()
    },
    "backup": Rule(Callers.DAEMON),
}

_SPEC_SHOWN = {"name", "kind", "resources", "priority", "guaranteed", "tenant", "user", "time_limit_s", "interactive"}
"""Fields of a specification that ``names`` shows; the others are empty."""

_ROW_SHOWN = {
    "id", "kind", "state", "priority", "asked", "asked_kind", "attempt", "devices", "hosts", "holds_devices",
    "submitted_s", "started_s", "ended_s",
}  # fmt: skip
"""Fields of a job's row that ``own`` shows, so that it stays true what holds the devices."""

_NULLABLE = {"array", "promise", "forecast", "migrating", "steps", "exit_code", "foreseen_steps"}
"""Fields of a job's row that are null where there is none."""

_SAYS_WHY_IT_ENDED = {"EndJob", "RequeueJob", "StopAttempt"}
"""Decisions whose reason may quote a job's output."""

_TOKEN = re.compile(r"[^\s,;:()'\"|]+")


@dataclass(frozen=True, slots=True)
class Peer:
    """User at the other end of a connection, by its peer credentials."""

    user: str
    uid: int
    is_operator: bool
    connection: int = 0  # number of the connection since the daemon's start
    is_reader: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """Roles of users, and what they see.

    Args:
        operators, readers: return names of users, and of groups as ``@group``.
        state: returns the scheduler's state.
        archived: returns users and names of the archived jobs.
        visibility: of other users' jobs; one of `clusterd.config.VISIBILITY`.
    """

    state: Any
    visibility: str = "all"
    operators: Callable[[], tuple[str, ...]] = tuple
    readers: Callable[[], tuple[str, ...]] = tuple
    archived: Callable[[], Iterable[tuple[str, str]]] = tuple

    def peer(self, uid: int, connection: int) -> Peer:
        """The user of a connection. Who is operator is no reader."""
        user = account_name(uid)
        is_operator = uid in (0, os.getuid()) or is_among(user, uid, self.operators())
        is_reader = not is_operator and is_among(user, uid, self.readers())
        return Peer(user, uid, is_operator, connection, is_reader)

    def admit(self, peer: Peer, verb: str, arguments: dict[str, Any]) -> None:
        """Check that a user may call a verb with these arguments.

        Raises:
            ClusterError: not this user, or not about this job.
        """
        rule = RULES[verb]
        if rule.callers is not Callers.EVERYBODY and peer.is_reader:
            raise ClusterError(f"user {peer.user} may only look (readers = [...] in clusterd.toml): ask an operator")
        if rule.callers is Callers.OPERATORS and not peer.is_operator:
            advice = "ask an operator (operators = [...] in clusterd.toml)"
            raise ClusterError(f"user {peer.user} may not {rule.does}: {advice}")
        if rule.callers is Callers.DAEMON and peer.uid not in (0, os.getuid()):
            raise ClusterError("only the account that runs the daemon may make backups: they hold its keys")
        if rule.others is Others.NONE or self._sees_all(peer) or not isinstance(arguments.get("job"), str):
            return
        state: State = self.state()
        job = admission.find_job(state, arguments["job"], peer.user)
        if job.spec.user == peer.user or (rule.others is Others.DETAILS and self.visibility == "names"):
            return
        what = "its output" if rule.others is Others.OUTPUT else "it"
        raise ClusterError(f"job {job.id} is another user's: its owner and operators see {what} (visibility)")

    def shown(self, peer: Peer, answer: Any) -> Any:
        """The part of an answer that a user may see."""
        return answer if self._sees_all(peer) else self._filter(peer).shown(plain(answer))

    def text(self, peer: Peer, message: str) -> str:
        """A message, without names that the user may not see."""
        hides_names = self.visibility == "own" and not peer.is_operator
        return self._filter(peer).text(message) if hides_names else message

    def _filter(self, peer: Peer) -> _Filter:
        return _Filter(self.state(), peer, self.visibility, self.archived())

    def _sees_all(self, peer: Peer) -> bool:
        return self.visibility == "all" or peer.is_operator


class _Filter:
    """Hides other users' jobs in one answer to one user."""

    def __init__(self, state: State, peer: Peer, visibility: str, archived: Iterable[tuple[str, str]]) -> None:
        self._state, self._user, self._hides_names = state, peer.user, visibility == "own"
        self._replaced: dict[str, str] = {}
        if self._hides_names:
            known = [(job.spec.user, job.spec.name) for job in state.jobs.values()]
            known += [(j.spec.user, j.spec.array.name) for j in state.jobs.values() if j.spec.array is not None]
            known += ((claim.owner, claim.reason) for claim in state.device_claims.values() if claim.owner)
            known += archived
            mine = {name for user, name in known if user == peer.user}
            self._replaced = {user: SOMEBODY for user, _ in known}
            self._replaced |= {name: THEIR_JOB for user, name in known if user != peer.user and name not in mine}
            self._replaced.pop(peer.user, None)

    def text(self, text: str) -> str:
        """A text with hidden names replaced."""
        if not self._replaced:
            return text
        return _TOKEN.sub(self._replace, text)

    def _replace(self, found: re.Match[str]) -> str:
        token = found[0]
        bare = token.rstrip(".")
        return self._replaced.get(token) or (self._replaced.get(bare, bare) + token[len(bare) :])

    def shown(self, value: Any) -> Any:
        """A part of an answer as the user may see it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self._row(value)
        if isinstance(value, list | tuple):
            return [self.shown(item) for item in value if not (self._hides_names and self._is_about_others(item))]
        return value

    def _is_about_others(self, item: Any) -> bool:
        """True for the row of an event, a decision or an array of another user's job."""
        if not isinstance(item, dict):
            return False
        if "tasks" in item and "states" in item:
            return bool(item["user"] != self._user)
        return "job_name" not in item and self._is_event_of_others(item)

    def _is_event_of_others(self, row: dict[str, Any]) -> bool:
        if "kind" not in row or not row.get("job"):
            return False
        job: Job | None = self._state.jobs.get(row["job"])
        return job is None or job.spec.user != self._user  # whose an archived one is, is not looked up

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        owner = row.get("user")
        if {"id", "asked", "user"} <= row.keys() and owner != self._user:
            row = self._job_row(row)
        elif self._is_event_of_others(row):
            row = _without_output(row)
        elif {"command", "env", "user"} <= row.keys() and owner != self._user:
            row = {key: value if key in _SPEC_SHOWN else _empty(value) for key, value in row.items()}
        shown: dict[str, Any] = {}
        for key, value in row.items():
            name, item = self.text(key), self.shown(value)
            if name in shown and isinstance(item, int | float):  # numbers by the names of jobs
                item = shown[name] + item if isinstance(item, int) else max(shown[name], item)
            shown[name] = item
        return shown

    def _job_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Row of another user's job."""
        if self._hides_names:
            hidden = {key: value if key in _ROW_SHOWN else _empty(value) for key, value in row.items()}
            hidden |= dict.fromkeys(_NULLABLE & row.keys())
            return {**hidden, "name": THEIR_JOB, "user": SOMEBODY}
        array = {**row["array"], "values": {}} if row.get("array") else None
        reason = "" if row["state"] == "failed" else row["reason"]  # it may quote the job's output
        return {**row, "array": array, "reason": reason, "checkpoint": None, "shape": None, "attempts": []}


def _without_output(row: dict[str, Any]) -> dict[str, Any]:
    """Row of an event or a decision, without what may quote the output of its job."""
    if row["kind"] in _SAYS_WHY_IT_ENDED:
        return {**row, "reason": "", "text": ""}
    if isinstance(row.get("end"), dict):
        return {**row, "end": {**row["end"], "message": ""}, "text": ""}
    return row


def _empty(value: Any) -> Any:
    """Empty value of the same type, so that clients find what they expect."""
    return type(value)() if isinstance(value, str | list | tuple | dict | bool | int) else None


def is_among(user: str, uid: int, names: Iterable[str]) -> bool:
    """True for a user who is named, or is in a group that is named as ``@group``."""
    if user in names:
        return True
    groups = {name.removeprefix("@") for name in names if name.startswith("@")}
    return bool(groups) and bool(groups & _groups_of(user, uid))


def _groups_of(user: str, uid: int) -> set[str]:
    """Names of a user's groups."""
    try:
        numbers = os.getgrouplist(user, pwd.getpwuid(uid).pw_gid)
    except KeyError:
        return set()
    found = set()
    for number in numbers:
        try:
            found.add(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return found
