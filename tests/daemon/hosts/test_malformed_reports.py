"""Jobs run code of users: daemon and link survive any message of a rank or host."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.core import events as e
from clusterd.daemon.journal.journal import Journal
from clusterd.exit_reasons import Reason
from clusterd.protocol import ProtocolError, agent
from clusterd.protocol.messages import from_map, to_map
from clusterd.types import JobId, JobSpec
from tests.daemon.hosts.test_registry import HOST, lab, with_one_host

SENDER = {"job": "1", "attempt": 1, "generation": 1, "rank": 0}
CHECKPOINTED = {"what": "checkpointed", "step": 7, "path": "/shared/net"}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


def output(**message: Any) -> dict[str, Any]:
    return {"event": "rank_said", **SENDER, "at_s": 1.0, "said": message}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (output(**{**CHECKPOINTED, "step": "x"}), "checkpointed.step is str, not int"),
        (output(**{**CHECKPOINTED, "step": True}), "checkpointed.step is bool, not int"),
        (output(step=1), "unknown kind"),  # no `what`
        (output(what=["orphaned"]), "unknown kind"),
        ({"event": "rank_said", **SENDER, "said": "orphaned"}, "unknown kind"),
        (output(what="orphaned"), "orphaned.step is absent"),
        (output(what="probe", figures={"a": "b"}), "probe.figures.a is str, not float"),
        ({"event": "rank_exited", **SENDER, "reason": "bored"}, "rank_exited.reason is no Reason"),
        ({"event": "rank_exited", **SENDER, "rank": None, "reason": "exit"}, "rank_exited.rank is NoneType, not int"),
        ({"event": "progress", **SENDER, "step": 1, "loss": 1.0, "step_time_s": None}, "progress.step_time_s"),
        ({"event": "facts", "facts": {"boot_id": 7}}, "facts.boot_id is int, not str"),
        ({"event": {}}, "unknown kind"),
    ],
)
def test_a_malformed_message_is_dropped_and_the_link_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, message: dict[str, Any], field: str
) -> None:
    """The log names the host and the field; the next message counts."""
    journal = Journal(tmp_path / "journal.db")
    seen: list[agent.RankExited] = []

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            made.hosts.reports.subscribe(agent.RankExited, lambda _, report: seen.append(report))
            await made.hosts.on_event(HOST, message)
            await made.hosts.on_event(HOST, {"event": "rank_exited", **SENDER, "reason": "exit", "exit_code": 0})

    anyio.run(run)
    journal.close()
    assert [report.reason for report in seen] == [Reason.EXIT]
    assert f"{HOST}: dropped a malformed message (1 so far)" in caplog.text and field in caplog.text


def test_exits_that_an_agent_repeats_or_invents_are_not_journaled(tmp_path: Path) -> None:
    """An agent of another person may send them without end, and everybody reads the journal."""
    journal = Journal(tmp_path / "journal.db")
    which: dict[str, Any] = {"job": JobId("1"), "attempt": 1, "generation": 1}

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            spec = JobSpec(name="net", command=("true",))
            await made.engine.post(e.JobSubmitted(at_s=2.0, job=JobId("1"), spec=spec))
            await made.engine.post(e.AttemptLaunched(at_s=3.0, **which))
            exited = {"event": "rank_exited", **which, "rank": 0, "reason": "exit", "exit_code": 0}
            for other in ({}, {}, {"job": "7"}, {"attempt": 2}, {"generation": 9}, {"rank": 5}):
                await made.hosts.on_event(HOST, exited | other)

    anyio.run(run)
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as db:
        assert db.execute("SELECT count(*) FROM events WHERE kind = 'RankExited'").fetchone() == (1,)
    db.close()


def test_a_flood_of_malformed_messages_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "journal.db")

    async def run() -> None:
        async with lab(journal) as made:
            await with_one_host(made)
            for _ in range(1000):
                await made.hosts.on_event(HOST, {"event": "nonsense"})

    anyio.run(run)
    journal.close()
    assert caplog.text.count("dropped a malformed message") == 10


@given(
    kind=st.sampled_from(["rank_said", "rank_exited", "progress", "snapshot", "facts", "x"]), fields=PLAIN, what=PLAIN
)
def test_whatever_arrives_is_a_report_or_a_protocol_error(kind: str, fields: Any, what: Any) -> None:
    message = {"event": kind, **SENDER, "said": what, **(fields if isinstance(fields, dict) else {})}
    try:
        agent.report(message)
    except ProtocolError:
        pass


@given(
    st.builds(
        agent.RankExited,
        job=st.text(),
        attempt=st.integers(),
        generation=st.integers(),
        rank=st.integers(),
        reason=st.sampled_from(agent.Reason),
        exit_code=st.none() | st.integers(),
        message=st.text(),
    )
)
def test_a_message_survives_its_map(message: agent.RankExited) -> None:
    assert from_map(agent.RankExited, to_map(message)) == message
