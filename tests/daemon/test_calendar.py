"""The calendar: who is expected where, and the same as iCalendar."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clusterd.cli.queue.calendar import LINE_BYTES, icalendar
from clusterd.core import events as e
from clusterd.core.policies import POLICIES
from clusterd.core.queueing.bookings import UNUSED_S
from clusterd.core.state import Job
from clusterd.daemon.api.usage import entries
from clusterd.daemon.journal import codec
from clusterd.forecasting import Request
from clusterd.rows import CalendarEntry, Forecast, Quantiles
from clusterd.simulate.forecaster import answer
from clusterd.types import HostId
from tests.core.allocation.test_bookings import book
from tests.core.allocation.test_device_claims import claim
from tests.core.conftest import Lab

HOUR, DAY = 3600.0, 86400.0


def shown(lab: Lab, days: int = 1, **forecasts: Forecast) -> list[CalendarEntry]:
    """Entries from now on; `forecasts` by the jobs' names."""

    def forecast(job: Job) -> Forecast | None:
        return forecasts.get(job.spec.name)

    ends = {HostId("b"): lab.now_s + 5 * HOUR, HostId("gone"): lab.now_s}
    return entries(lab.scheduler.state, forecast, ends, lab.now_s, lab.now_s + days * DAY)


def at(seconds: float) -> Quantiles:
    return Quantiles(seconds, seconds, seconds, seconds, seconds)


def test_each_host_has_its_jobs_bookings_claims_and_its_end() -> None:
    lab = Lab()
    lab.host("a", gpus=2)
    lab.host("b", gpus=2)
    running, _ = lab.submit("running", hosts=("a",), user="ann", time_limit_s=2 * HOUR)
    lab.run(running)
    number = book(lab, "b:gpu0", begin_s=HOUR)
    own, _ = lab.submit("own", user="ann", booking=number)
    claim(lab, "a:gpu1", "b:gpu1", begin_s=3 * HOUR)
    lab.submit("wide", devices=4, nodes=2, user="bob")
    foreseen = Forecast(start=at(lab.now_s + 4 * HOUR), end=at(lab.now_s + 6 * HOUR))
    found = shown(lab, wide=foreseen)
    assert [(each.host, each.what, each.user, each.text) for each in found] == [
        ("a", "running", "ann", f"running ({running})"),
        ("a", "claim", "ann", "claim 2: new fan"),
        ("b", "expected", "ann", f"own ({own}), expected"),
        ("b", "booking", "ann", "booking 1"),
        ("b", "claim", "ann", "claim 2: new fan"),
        ("b", "leaves", "", "its allocation ends"),
        ("", "expected", "bob", "wide (3), expected"),
    ]
    by_text = {each.text: each for each in found}
    begun_s = lab.attempt(running).started_s
    assert by_text[f"running ({running})"].until_s == begun_s + 2 * HOUR
    booking = lab.scheduler.state.device_claims[number]
    assert (by_text[f"own ({own}), expected"].from_s, by_text[f"own ({own}), expected"].until_s) == (
        booking.from_s, booking.until_s,
    )  # fmt: skip
    assert by_text["wide (3), expected"].until_s == lab.now_s + 6 * HOUR
    assert by_text["claim 2: new fan"].until_s is None


def test_what_is_over_or_begins_later_is_not_shown() -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    book(lab, "a:gpu0", begin_s=2 * DAY)
    held, _ = lab.submit("held", user="ann")
    lab.tell(e.JobHeld(**lab.at(), job=held, by="ann"))
    assert shown(lab, held=Forecast(start=at(lab.now_s + HOUR))) == []
    assert [each.text for each in shown(lab, days=3)] == ["booking 1"]


# --- iCalendar --------------------------------------------------------------------------------------------------------


def entry(**fields: Any) -> dict[str, Any]:
    known = {
        "host": "a",
        "devices": ["a:gpu0"],
        "from_s": 0.0,
        "until_s": None,
        "user": "ann",
        "claim": "1",
        "text": "",
    }
    return {**known, **fields}


def test_one_event_for_each_booking_or_claim() -> None:
    rows = [
        entry(claim=None, text="job (1)"),
        entry(text="booking 1: deadline", until_s=7200.0),
        entry(text="booking 1: deadline", until_s=7200.0, host="b", devices=["b:gpu1", "b:gpu2"]),
        entry(claim="2", text="claim 2: fan, new; \\o/"),
    ]
    lines = icalendar(rows, 60.0).split("\r\n")
    assert lines[:3] == ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//clusterd//calendar//EN"]
    assert lines[3:11] == [
        "BEGIN:VEVENT",
        "UID:1-0@clusterd",
        "DTSTAMP:19700101T000100Z",
        "DTSTART:19700101T000000Z",
        "DTEND:19700101T020000Z",
        "SUMMARY:ann: booking 1: deadline",
        "LOCATION:a:gpu0 b:gpu1-2",
        "END:VEVENT",
    ]
    assert "SUMMARY:ann: claim 2: fan\\, new\\; \\\\o/" in lines
    assert sum(line.startswith("DTEND") for line in lines) == 1, "a claim without end has none"
    assert lines[-2:] == ["END:VCALENDAR", ""]


@given(st.lists(st.tuples(st.text(max_size=200), st.floats(0.0, 4e9)), max_size=4))
def test_any_text_comes_back_from_folded_lines(drawn: list[tuple[str, float]]) -> None:
    rows = [entry(claim=str(n), text=text, from_s=at_s) for n, (text, at_s) in enumerate(drawn)]
    made = icalendar(rows, 0.0)
    lines = made.split("\r\n")
    assert all(len(line.encode()) <= LINE_BYTES for line in lines)
    assert not re.search(r"(?<!\r)\n|\r(?!\n)", made)
    unfolded = made.replace("\r\n ", "").split("\r\n")
    summaries = [line.removeprefix("SUMMARY:") for line in unfolded if line.startswith("SUMMARY:")]
    plain = [re.sub(r"\\(.)", lambda found: "" if found[1] == "n" else found[1], text) for text in summaries]
    assert plain == [f"ann: {''.join(x for x in text if x.isprintable())}" for text, _ in drawn]
    starts = [datetime.strptime(line[8:], "%Y%m%dT%H%M%S%z") for line in unfolded if line.startswith("DTSTART:")]
    assert [start.timestamp() for start in starts] == [float(int(at_s)) for _, at_s in drawn]


def test_a_forecast_plays_bookings() -> None:
    """A job of one starts when it begins; one that needs its devices, too, when it is over."""
    lab = Lab()
    lab.host("a", gpus=2)
    number = book(lab, "a:gpu0", begin_s=HOUR, for_s=2 * HOUR)
    own, _ = lab.submit("own", user="ann", booking=number)
    wide, _ = lab.submit("wide", user="bob", devices=2, time_limit_s=HOUR)
    state = codec.encode(lab.scheduler.state)
    of: dict[str, Any] = {"tables": {}, "past": codec.encode([]), "policy": "default"}
    request = Request(now_s=lab.now_s, state=state, **of, rollouts=10, cpu_s=10.0)
    found = answer(request, POLICIES["default"]()).jobs
    booking = lab.scheduler.state.device_claims[number]
    starts_s = {job: times.p50_s for job, each in found.items() if (times := each.start) is not None}
    assert booking.from_s <= starts_s[own] < booking.from_s + 60.0
    assert booking.until_s is not None and starts_s[wide] >= booking.from_s + UNUSED_S


def test_a_job_that_runs_beyond_its_expected_end_is_still_there() -> None:
    lab = Lab()
    lab.host("a", gpus=1)
    late, _ = lab.submit("late", user="ann")
    lab.run(late)
    (entry,) = [each for each in shown(lab, late=Forecast(end=at(lab.now_s - 60.0))) if each.what == "running"]
    assert (entry.job, entry.until_s) == (late, None)
