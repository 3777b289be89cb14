"""The part without widgets: filters, listings, lines, logs, charts and recordings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.errors import ClusterError
from clusterd.replay import recording, write
from clusterd.rows import Usage
from clusterd.tui.model import columns, lines, rows
from clusterd.tui.model.filters import BadFilter, Listing, parse
from clusterd.tui.model.fleet import busy_share, host_summary
from clusterd.tui.model.job_page import Series, chart
from clusterd.tui.model.keys import COMMANDS
from clusterd.tui.model.model import Model
from clusterd.tui.model.state_styles import Look
from clusterd.tui.model.view import SCREENS
from clusterd.tui.screens.base import footer
from clusterd.tui.source.playback import Player
from clusterd.tui.widgets.log_pane import LogWindow, readable
from tests.conftest import RunningCluster, until
from tests.tui.staged import NOW_S, host, job, snapshot

JOBS = [rows.read(rows.Job, row) for row in snapshot()["jobs"]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("state:queued", ["2", "5"]),
        ("!state:queued user:bob", ["4"]),
        ("gpt|vit", ["1", "4"]),
        ("step:>100", ["1"]),
        ("priority:<0", ["5"]),
        ("", ["1", "2", "3", "4", "5", "6"]),
    ],
)
def test_filters(text: str, found: list[str]) -> None:
    shown = parse(text, columns.JOB_FIELDS)
    assert [row.id for row in JOBS if shown.matches(columns.job_fields(row))] == found


@pytest.mark.parametrize(
    ("text", "loss", "matches"),
    [
        ("loss:>0.5", 2.5e-05, False),
        ("loss:<0.5", 2.5e-05, True),
        ("loss:<3e-5", 2.5e-05, True),
        ("loss:>3E-5", 2.5e-05, False),
        ("loss:>1e6", 2.5e8, True),
        ("loss:<0", -2.5e-05, True),
        ("loss:>100", math.inf, True),
        ("loss:>100", math.nan, False),
        ("!!loss:>0.5", 0.7, True),
        ("name:>10", 1.0, True),  # of sweep-17: no sign
    ],
)
def test_a_filter_compares_the_number_that_is_meant(text: str, loss: float, matches: bool) -> None:
    row = rows.read(rows.Job, job(1, "sweep-17", "running", loss=loss))
    assert parse(text, columns.JOB_FIELDS).matches(columns.job_fields(row)) is matches


def test_an_array_is_one_row_that_counts_its_tasks() -> None:
    def task(number: int, state: str, holds: bool = False) -> dict[str, Any]:
        array = {"id": "11", "name": "net", "index": number - 11, "most": 2}
        ended_s = NOW_S if state in ("finished", "failed") else None
        return job(number, f"net_{number - 11}", state, array=array, holds_devices=holds, ended_s=ended_s)

    model = Model()
    model.apply({"snapshot": {"status": {}, "hosts": [], "jobs": [job(1, "alone", "running"), task(11, "queued")]}})
    assert set(model.folded_jobs()) == {"1", "11"}, "an array of one task is a job"
    jobs = [task(11, "finished"), task(12, "failed"), task(13, "running", True), task(14, "queued")]
    model.apply({"number": 2, "at_s": NOW_S, "events": [], "decisions": [], "hosts": [], "gone": [], "jobs": jobs})
    folded = model.folded_jobs()
    assert set(folded) == {"1", "11_*"}
    row = folded["11_*"]
    assert (row.name, row.state, row.step, row.steps) == ("net", "running", 2, 4)
    assert row.tasks == "1 pending, 1 running, 1 done, 1 failed"
    assert row.reason == "4 tasks, at most 2 at once"
    assert model.tasks_of(model.key_of("12")) == ["11", "12", "13", "14"]
    again = {**task(12, "finished"), "id": "15"}
    model.apply({"number": 3, "at_s": NOW_S, "events": [], "decisions": [], "hosts": [], "gone": [], "jobs": [again]})
    assert model.folded_jobs()["11_*"].tasks == "1 pending, 1 running, 2 done", "of a task that ran again, the newest"
    shown = parse("array:net state:failed", columns.JOB_FIELDS)
    assert [row.id for row in model.jobs.values() if shown.matches(columns.job_fields(row))] == ["12"]


def test_claims_of_a_host_are_shown() -> None:
    claim = {"id": "3", "devices": ["gpu01:gpu1"], "from_s": NOW_S + 60.0, "reason": "new fan", "by": "ann"}
    row = rows.read(rows.Host, host("gpu01", devices=2, claims=[claim], labels=["nvlink"]))
    text = [lines.plain(made) for made in host_summary(row, {}, Look(), NOW_S)]
    assert any(made.startswith("claimed   gpu1 from ") and "(claim 3, ann): new fan" in made for made in text)
    assert "labels    nvlink" in text


@given(st.floats(-1e300, 1e300))
def test_a_loss_fits_its_column_and_is_right(loss: float) -> None:
    """To a digit at least, however small or large; never cut at its end."""
    row = rows.read(rows.Job, job(1, "a", "running", loss=loss))
    column = next(column for column in columns.JOB_COLUMNS if column.name == "loss")
    shown = lines.plain(column.show(row, columns.CellContext(NOW_S, Look(), {})))
    assert lines.width(((shown, ""),)) <= column.cells
    assert float(shown) == pytest.approx(loss, rel=0.5)


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(3.21, "3.21"), (5.516e-05, "5.52e-5"), (2.5e-05, "2.5e-5"), (123456.7, "1.235e5"), (-1.234e-10, "-1e-10")],
)
def test_a_loss_is_shown_with_its_exponent(loss: float, shown: str) -> None:
    assert columns.short_number(loss, 7) == shown


def test_the_time_left_is_that_of_the_expected_end() -> None:
    """Regression: in a trial of a slow plan it was hours, beside an end that was expected in minutes."""
    end = dict.fromkeys(("p5_s", "p25_s", "p50_s", "p75_s", "p95_s"), NOW_S + 120.0)
    trained = {"steps": 1000, "step": 100, "step_time_s": 60.0, "forecast": {"at_s": NOW_S - 30.0, "end": end}}
    column = next(column for column in columns.JOB_COLUMNS if column.name == "why")

    def shown(**others: Any) -> str:
        row = rows.read(rows.Job, job(1, "a", "running", **{**trained, **others}))
        return lines.plain(column.show(row, columns.CellContext(NOW_S, Look(), {})))

    assert shown() == "2m00s left"
    assert shown(forecast=None) == "15h00m left"
    past = {"at_s": NOW_S - 3600.0, "end": dict.fromkeys(end, NOW_S - 60.0)}
    assert shown(forecast=past) == "15h00m left", "an end that is past is no longer expected"


def test_a_loss_that_is_no_number_is_sorted_last() -> None:
    losses = [math.nan, 2.0, None, 1.0, math.nan, 3.0, 0.5]
    jobs = {str(n): rows.read(rows.Job, job(n, "a", "running", loss=loss)) for n, loss in enumerate(losses)}
    column = next(column for column in columns.JOB_COLUMNS if column.name == "loss")
    listing: Listing[rows.Job] = Listing(columns.job_fields, column.order, lambda key: (len(key), key))
    listing.rebuild(jobs)
    assert listing.keys == ["6", "3", "1", "5", "0", "2", "4"]


@pytest.mark.parametrize("text", ["(", "nofield:x", "step:>many"])
def test_an_invalid_filter_is_refused(text: str) -> None:
    with pytest.raises(BadFilter):
        parse(text, columns.JOB_FIELDS)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=40))
def test_a_listing_kept_up_to_date_is_the_one_built_anew(changes: list[tuple[int, int, bool]]) -> None:
    """Row by row, with rows that come, change and go."""
    shown = parse("!name:^b", columns.JOB_FIELDS)

    def made() -> Listing[rows.Job]:
        listing: Listing[rows.Job] = Listing(columns.job_fields, lambda row: row.step, lambda key: (len(key), key))
        listing.configure(shown, lambda row: row.step, True)
        return listing

    stored, table = made(), dict[str, rows.Job]()
    for number, step, goes in changes:
        key = str(number)
        if goes:
            table.pop(key, None)
        else:
            table[key] = rows.read(rows.Job, job(number, "abc"[step % 3], "running", step=step))
        stored.update(table, [key])
        anew = made()
        anew.rebuild(table)
        assert stored.keys == anew.keys
        assert stored.hidden == anew.hidden


@given(
    st.lists(st.tuples(st.text("ab 宽\t", max_size=20), st.sampled_from(["", "dim"])), max_size=5), st.integers(1, 30)
)
def test_lines_fit_and_wrap_to_the_width(runs: list[tuple[str, str]], cells: int) -> None:
    whole = tuple((lines.printable(text), style) for text, style in runs)
    assert lines.width(lines.fit(whole, cells)) == cells
    if cells >= 2:
        for piece in lines.wrap(whole, cells):
            assert lines.width(((lines.plain(piece).rstrip(), ""),)) <= cells


@given(st.lists(st.binary(max_size=60), max_size=30), st.integers(1, 7))
def test_a_log_window_holds_the_last_lines_however_the_bytes_are_cut(chunks: list[bytes], stored: int) -> None:
    window = LogWindow(stored)
    for piece in chunks:
        window.feed(piece)
    expected = b"".join(chunks).split(b"\n")
    assert window.total == len(expected) - 1
    assert list(window.lines) == [readable(raw) for raw in expected[:-1][-stored:]]


def test_a_log_line_cannot_move_the_cursor() -> None:
    assert readable(b"\x1b[31mred\x1b[0m \x1b[2Jtext\x07") == "red text·"
    assert readable(b"10%\r50%\r100%") == "100%"


@given(
    st.lists(st.tuples(st.floats(), st.floats()), max_size=30), st.integers(1, 100), st.integers(1, 20), st.booleans()
)
def test_a_chart_is_as_large_as_asked(points: list[tuple[float, float]], cells: int, height: int, plain: bool) -> None:
    drawn = chart([Series(sorted(p for p in points if abs(p[0]) < 1e9 and abs(p[1]) < 1e9))], cells, height, plain)
    assert len(drawn) in (1, max(height, 2) + 1)
    if plain:
        assert all(lines.plain(one).isascii() for one in drawn)


@pytest.mark.parametrize("cells", [20, 40, 80, 160])
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("screen", SCREENS)
def test_a_footer_names_whole_keys_and_the_way_out(screen: str, replays: bool, cells: int) -> None:
    """However narrow, help and leaving are there; at 80 columns so is what the screen is for."""
    shown, clicks = footer(screen, not replays, replays, cells)
    message = lines.plain(shown[0])
    assert lines.width(shown[0]) <= cells
    terms = {f"{command.shown} {command.short}" for command in COMMANDS}
    assert set(message.strip().split("  ")) <= terms
    assert "q quit" in message
    assert "? help" in message
    if cells >= 80:
        wanted = {"fleet": "d u", "queue": "w m c n l /", "job": "w m c K l", "decisions": "/ s", "events": "/ s"}[
            screen
        ]
        assert set((". , space > <" if replays else wanted).split()) <= set(clicks)


def test_a_drained_host_says_what_is_still_there_and_not_since_when() -> None:
    """The host was up for two hours; the time since it is drained is not known."""
    here = [host("gpu01", drained="ann: new fan", jobs=["gpt-large"]), host("gpu02")]
    drained, used = rows.read(rows.Baseline, {"status": {}, "jobs": [], "hosts": here}).hosts
    message = [lines.plain(one) for one in host_summary(drained, {}, Look(), NOW_S)]
    assert message[0] == "gpu01  ◇ drained"
    assert any("still here" in one and "gpt-large" in one for one in message)
    free = [lines.plain(one) for one in host_summary(used, {}, Look(), NOW_S)]
    assert free[0] == "gpu02  ● up for 2h00m"
    assert not any("still here" in one for one in free)


def _recording() -> list[dict[str, Any]]:
    first = {"snapshot": {"jobs": [], "hosts": [], "status": {}}, "number": 0, "at_s": NOW_S}
    changes = [
        {"number": n, "at_s": NOW_S + n, "jobs": [job(n % 7, f"job{n % 7}", "running", step=n, loss=1 / n)],
         "decisions": [{"kind": "HoldJob", "cause": n, "reason": "so", "job": str(n % 7)}]}
        for n in range(1, 301)
    ]  # fmt: skip
    return [first, *changes]


@pytest.mark.parametrize("seen", [[], [1, 2, 3], [3, 4, 5], [2, 4]])
def test_history_goes_where_it_belongs(seen: list[int]) -> None:
    """Events from before the attachment, or during the daemon's absence, are inserted in order, and none twice."""
    model = Model()
    model.apply(_recording()[0])
    happened = {n: {"kind": "JobSubmitted", "id": n, "at_s": NOW_S + n} for n in range(1, 6)}
    decided = {
        n: [{"kind": "HoldJob", "cause": n, "reason": f"{n}{x}", "at_s": NOW_S + n} for x in "ab"] for n in happened
    }
    for n in seen:
        model.apply({"number": n, "at_s": NOW_S + n, "events": [happened[n]], "decisions": decided[n]})
    for _ in range(2):
        model.add_history(happened.values(), [one for both in decided.values() for one in both])
        assert [event.id for _, event in model.events] == [1, 2, 3, 4, 5]
        assert [one.reason for _, one in model.decisions] == [f"{n}{x}" for n in happened for x in "ab"]


@pytest.mark.slow
@given(st.lists(st.integers(-5, 310), min_size=1, max_size=8))
def test_a_recording_shows_the_same_wherever_one_comes_from(places: list[int]) -> None:
    """Forward, back, or straight there."""
    player = Player(_recording())
    for place in places:
        player.seek(place)
    straight = Player(_recording())
    straight.seek(places[-1])
    assert player.model == straight.model


def test_playing_goes_at_its_speed_and_stops_at_the_end() -> None:
    player = Player(_recording())
    player.speed = 10.0
    player.advance(1.0)
    assert player.index == 10
    player.step(-1)
    assert (player.index, player.playing) == (9, False)
    player.play()
    player.advance(1000.0)
    assert (player.index, player.playing) == (300, False)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    assert write(file, iter(_recording())) == 301
    assert list(recording(file)) == _recording()
    file.write_text('{"snapshot": {}}\nno json\n')
    with pytest.raises(ClusterError, match="line 2"):
        list(recording(file))
    with pytest.raises(ClusterError, match="No such file"):
        list(recording(tmp_path / "absent"))


def test_a_journal_plays_to_what_the_daemon_shows(cluster: RunningCluster) -> None:
    """While the daemon is still writing it."""
    cluster.start(hosts=1)
    for name in ("a", "b"):
        cluster.submit('command = ["true"]\n', name)
    until(lambda: all(row["state"] == "finished" for row in cluster.call("jobs", all=True)))
    items = list(recording(cluster.directory))
    player = Player(items)
    player.seek(len(items) - 1)
    shown = {row["id"]: (row["state"], row["exit_code"]) for row in cluster.call("jobs", all=True)}
    assert {row.id: (row.state, row.exit_code) for row in player.model.jobs.values()} == shown


def test_a_device_shows_its_last_hour() -> None:
    """Three minutes a cell, the newest at the right; nothing where nothing was recorded."""
    known = rows.read(rows.Host, host("gpu01"))
    device = known.devices[0].id
    newest = int(NOW_S // 60)
    minutes = [{"minute": newest - back, "busy": 1.0 if back < 3 else 0.0, "power_w": 251.4} for back in range(9)]
    usage = rows.read(Usage, {"devices": {device: minutes}})
    shown = [lines.plain(one) for one in host_summary(known, {}, Look(), NOW_S, usage)]
    (first,) = [one for one in shown if "▁▁█" in one]
    assert "100%" in first and "251 W" in first
    assert "__#" in "\n".join(lines.plain(one) for one in host_summary(known, {}, Look(ascii=True), NOW_S, usage))


def test_the_fleet_says_how_busy_its_leased_devices_are() -> None:
    row = host("gpu01")
    row["devices"][0]["job"] = "1"
    known = rows.read(rows.Host, row)
    leased = [device.id for device in known.devices if device.job]
    newest = int(NOW_S // 60)
    minutes = {device: [{"minute": newest, "busy": 0.4}, {"minute": newest - 30, "busy": 1.0}] for device in leased}
    idle = {device.id: [{"minute": newest, "busy": 0.0}] for device in known.devices if not device.job}
    usage = rows.read(Usage, {"devices": {**minutes, **idle}})
    assert leased and busy_share({"gpu01": known}, usage, NOW_S) == pytest.approx(0.4)
    assert busy_share({"gpu01": known}, Usage(), NOW_S) is None
