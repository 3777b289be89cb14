"""Playback of a simulated run: every screen over simulated time, forward and back, at any speed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from textual.pilot import Pilot

from clusterd.cli.simulate import simulate
from clusterd.replay import recording
from clusterd.tui.app import Top
from clusterd.tui.source.playback import Player, RecordingSource
from tests.tui.test_pilot import until

TIMES_S = {1: 8.0, 2: 4.2, 4: 2.2, 8: 1.2}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Three jobs of one model on two hosts of eight devices."""
    truth, jobs, file = tmp_path / "truth.csv", tmp_path / "jobs.csv", tmp_path / "run.jsonl"
    truth.write_text(
        "model,parameters,layers,hidden,seq_len,global_batch,family,dp,tp,pp,zero_stage,offload,act_ckpt,"
        "gpus_per_node,step_time_s\n"
        + "".join(f"net,1000000,4,64,64,16,ga,{n},1,1,0,0,0,{n},{time}\n" for n, time in TIMES_S.items())
    )
    jobs.write_text(
        "name,submission_time,duration,application,num_gpus,num_cpus,exec_plan,steps,is_sla\n"
        "large,0,0,net,8,64,ga,1000,0\nmiddle,10,0,net,8,64,ga,400,1\nsmall,20,0,net,2,16,ga,50,0\n"
    )
    argv = ["--cluster", "2x8:g", "--workload", str(jobs), "--truth", str(truth), "--oracle", "--processes", "1"]
    argv += ["--policy", "default", "--record", str(file)]
    answer = CliRunner().invoke(simulate, argv, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return file


def play(file: Path, script: Callable[[Top, Player, Pilot[Any]], Awaitable[None]], **options: Any) -> None:
    """Open the interface on a recording, paused at its beginning."""

    async def run() -> None:
        app = Top(RecordingSource(list(recording(file))), **options)
        player = app.player
        assert player is not None
        player.playing = False
        async with app.run_test(size=(120, 40)) as pilot:
            await script(app, player, pilot)

    asyncio.run(run())


def report(player: Player) -> dict[str, Any]:
    """Text of all screens at this instant of the recording."""
    return {
        "jobs": {job.name: (job.state, job.step, job.plan, tuple(job.devices)) for job in player.model.jobs.values()},
        "leased": sorted(device.id for host in player.model.hosts.values() for device in host.devices if device.job),
        "decisions": len(player.model.decisions),
        "events": len(player.model.events),
    }


def test_a_simulated_run_goes_by_and_back_again(recorded: Path) -> None:
    """Each instant is the same whether one comes from before it or from after it, and at the end all is done."""

    async def script(app: Top, player: Player, pilot: Pilot[Any]) -> None:
        seen = [report(player)]
        while player.index < len(player) - 1:
            await pilot.press("full_stop")
            seen.append(report(player))
        assert {name: job[:2] for name, job in seen[-1]["jobs"].items()} == {
            "large": ("finished", 1000), "middle": ("finished", 400), "small": ("finished", 50),
        }  # fmt: skip
        assert not seen[-1]["leased"]
        assert max(len(instant["leased"]) for instant in seen) == 16
        while player.index:
            await pilot.press("comma")
            assert report(player) == seen[player.index], player.index

    play(recorded, script, ticks=False)


def test_every_screen_shows_the_simulated_instant(recorded: Path) -> None:
    """Halfway: who has which device, what waits, under which plan, why, and when."""

    async def script(app: Top, player: Player, pilot: Pilot[Any]) -> None:
        await pilot.press(*["right_square_bracket"] * 5)
        running = [job for job in player.model.jobs.values() if job.state == "running"]
        assert running
        assert 0 < player.now_s < player.end_s
        board: Any
        await pilot.press("1")
        board = app.board
        await until(pilot, lambda: board.table.keys == ["h000", "h001"])
        assert any(job.name in board.detail.text for job in running)
        await pilot.press("2")
        board = app.board
        alive = {job.id for job in player.model.jobs.values() if not job.is_over}
        await until(pilot, lambda: set(board.table.keys) == alive)
        board.table.move_to(running[0].id)
        await pilot.pause()
        assert str(running[0].plan) in board.detail.text
        await until(pilot, lambda: board.log_pane.text == "a recording holds no logs")
        await pilot.press("enter")
        board = app.board
        await until(pilot, lambda: "plans so far" in board.page.text)
        assert "the recording holds none" in board.page.text
        assert f"  {running[0].plan}  for " in board.page.text
        await pilot.press("4")
        board = app.board
        await until(pilot, lambda: board.table.keys)
        assert {decision.kind for _, decision in player.model.decisions} >= {"LaunchAttempt"}
        assert "because" in board.detail.text
        await pilot.press("5")
        board = app.board
        await until(pilot, lambda: board.table.keys)
        assert "0:" in board.detail.text  # hours since the start, no day of 1970
        head = app.query_one("#head")
        assert "recording" in head.text  # type: ignore[attr-defined]

    play(recorded, script, ticks=False)


def test_it_plays_at_its_speed_and_verbs_that_act_are_not_there(recorded: Path) -> None:
    """On its own to the end, faster when asked; nothing in it can be cancelled or moved."""

    async def script(app: Top, player: Player, pilot: Pilot[Any]) -> None:
        await pilot.press("c", "m", "p", "d", "w", "l")
        assert len(app.screen_stack) == 1
        await pilot.press("a")  # also jobs that are over
        before = player.speed
        await pilot.press("greater_than_sign", "greater_than_sign", "less_than_sign")
        assert player.speed == before * 2
        await pilot.press(*["greater_than_sign"] * 4, "space")
        await until(pilot, lambda: player.now_s == player.end_s)
        assert not player.playing
        board: Any = app.board
        await until(pilot, lambda: len(board.table.keys) == 3)
        await pilot.press("R")
        await until(pilot, lambda: player.index == 0)
        await until(pilot, lambda: not board.table.keys)

    play(recorded, script)
