"""Runs of a script under a plan, or through a live move, and their verdicts."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from migration_driver import Mover
from rank_pool import Rank, RankPool

from clusterd.train.checkpoint.dcp_files import NEXT_STEP
from tests.foreign.registry import PLANS, Script
from tests.hang import HANG_S

STEPS, BASELINE_STEPS = 12, 120
MOVE = ("dp=1", "dp=2,zero=3")
AGAIN = ("resume", "restart")
"""After a stop that saves, and after a kill behind a checkpoint."""

NOISE_TIMES = 5.0
"""Of the difference between two runs of one process, which counts as equal where these differ."""

PACE_S = 0.3
"""Pause between steps while a move is prepared, so that the baseline is long enough."""

RIGHT, TOLD, REFUSED, WRONG = "right", "told", "refused", "WRONG"
PEER_LOSS = re.compile(r"^RuntimeError: .*gloo/transport/tcp/", re.MULTILINE)  # closed, or reset, by peer
ROUTINE = re.compile(
    r"clusterd: (the script seeds torch|stopped after|goes on after step|saved step|using \d|step \d|resum|moved|\[)"
)
"""Lines that a run without fault prints too."""


@dataclass(frozen=True)
class Verdict:
    """Verdict about one run, with the line that says why, and the largest relative difference of a loss."""

    verdict: str
    reason: str = ""
    difference: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    ranks: Sequence[Rank],
    losses: list[float],
    expected: list[float],
    tolerance: float,
    before: Sequence[Rank] = (),
) -> Verdict:
    """Verdict about a run from what its ranks, and those before them, left and from the losses of one process."""
    if any(rank.exit_code for rank in ranks):
        return _judge_failure(ranks)
    if not losses or len(losses) > len(expected):
        return Verdict(WRONG, f"{len(losses)} losses, expected {len(expected)}")
    pairs = list(zip(losses, expected, strict=False))
    difference = max(abs(a - b) / max(abs(b), 1e-9) if math.isfinite(a) else math.inf for a, b in pairs)
    if difference > tolerance:
        lines = _lines(ranks) or _lines(before)
        return Verdict(TOLD if lines else WRONG, lines[0] if lines else "losses differ, unsaid", difference)
    return Verdict(RIGHT, difference=difference)


def _judge_failure(ranks: Sequence[Rank]) -> Verdict:
    first = next(rank for rank in ranks if rank.exit_code)
    if any(_lines([rank]) for rank in ranks):  # one that waited for a rank that said why has nothing to say
        ranks = [rank for rank in ranks if not PEER_LOSS.search(rank.output)]
    if any("Traceback" in rank.output for rank in ranks):
        blamed = next(rank for rank in ranks if "Traceback" in rank.output)
        last = [line for line in blamed.output.splitlines() if line.strip() and not line.startswith(" ")][-1]
        return Verdict(WRONG, f"crash: {last}")
    if all(rank.exit_code in (-signal.SIGKILL, -signal.SIGABRT) for rank in ranks):
        return Verdict(WRONG, "hang")
    lines = _lines(ranks)
    return Verdict(REFUSED, lines[-1]) if lines else Verdict(WRONG, f"exit code {first.exit_code}, no message")


def _lines(ranks: Sequence[Rank]) -> list[str]:
    """Messages of clusterd in the ranks' output, without routine ones."""
    lines = (line for rank in ranks for line in rank.output.splitlines())
    return [
        line.removeprefix("clusterd: ") for line in lines if line.startswith("clusterd: ") and not ROUTINE.match(line)
    ]


class Runner:
    """Runs scripts in two pools of ranks."""

    def __init__(self, directory: Path, modules: Sequence[str]) -> None:
        self._directory, self._numbers = directory, itertools.count()
        self._pools = (RankPool(modules=modules), RankPool(modules=modules))

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def verdicts(self, script: Script, plans: Sequence[str] = ()) -> dict[str, Verdict]:
        """Verdicts by plan; `"one"` is one process, `"move"` the live move, and see `AGAIN`."""
        directory = self._directory / f"{script.name}-{next(self._numbers)}"
        alone = self._pools[0].run(directory / "one", "dp=1", script=script.name, steps=BASELINE_STEPS)
        found = {"one": judge(alone.ranks, alone.losses, alone.losses, script.tolerance)}
        if found["one"].verdict != RIGHT:
            return found
        again = self._pools[0].run(directory / "noise", "dp=1", script=script.name, steps=STEPS)
        found["one"] = judge(again.ranks, again.losses, alone.losses, math.inf)
        noise = found["one"].difference
        if noise > script.tolerance:  # a script that draws from entropy of its own: no run is like another
            script = replace(script, tolerance=NOISE_TIMES * noise)
        for plan in plans or (*PLANS, *script.plans):
            if plan != "move" and plan not in AGAIN:
                run = self._pools[0].run(directory / plan, plan, script=script.name, steps=STEPS)
                found[plan] = judge(run.ranks, run.losses, alone.losses, script.tolerance)
        if not plans or "move" in plans:
            found["move"] = self._move(script, directory / "move", alone.losses)
        for how in AGAIN:
            if not plans or how in plans:
                found[how] = self._again(script, directory / how, alone.losses, kills=how == "restart")
        return found

    def _again(self, script: Script, directory: Path, expected: list[float], *, kills: bool) -> Verdict:
        """One process that ends, killed after a checkpoint or by a stop that saves, and another that goes on."""
        directory.mkdir(parents=True)
        saved = directory / "checkpoint"
        mover = Mover(self._pools, directory, {"script": script.name, "pace_s": PACE_S})
        try:
            mover.start("dp=1")
            mover.train(3)
            if kills:
                step = mover.checkpoint(saved)["step"]
                mover.wait((saved / NEXT_STEP).exists, "the loss beside the checkpoint")
                os.kill(mover.agents["a"].pid(1, 0), signal.SIGKILL)
                mover.now.run.result(HANG_S)
            else:
                step = mover.cancel(saved)
        except Exception as error:
            return _of_failure(str(error))
        finally:
            mover.close()
        more = {"restore": str(saved)}
        options = {"script": script.name, "steps": step + 5, "refuses": not kills}
        run = self._pools[0].run_each(directory / "again", "dp=1", [options], more=lambda _: more)[0]
        return judge(run.ranks, run.losses, expected[step:], script.tolerance, _ended(mover.now.run))

    def _losses_of(self, script: Script, directory: Path, steps: int) -> list[float]:
        return self._pools[0].run(directory, "dp=1", script=script.name, steps=steps).checked().losses

    def _move(self, script: Script, directory: Path, expected: list[float]) -> Verdict:
        directory.mkdir(parents=True)
        mover = Mover(self._pools, directory, {"script": script.name, "pace_s": PACE_S})
        failure, losses = "", []
        try:
            mover.start(MOVE[0])
            mover.train(3)
            moved = mover.move(MOVE[1])
            mover.train(5)
            losses = [step["loss"] for step in mover.stop()]
            assert moved is not None
            losses = losses[: moved.step + 5]
            if len(losses) > len(expected):  # compiling took the target ranks so long
                expected = self._losses_of(script, directory / "one", len(losses))
        except Exception as error:
            failure = str(error)
        finally:
            mover.close()
        ranks = [rank for generation in mover._launched for rank in _ended(generation.run)]
        if failure:
            return _of_failure(failure)
        return judge(ranks, losses, expected, script.tolerance)


def _of_failure(failure: str) -> Verdict:
    """Verdict from the error of a driver: a refusal, if a rank gave a reason."""
    refusal = re.search(r"clusterd: (.*)", failure) or re.search(r"'why': [\"'](.*?)[\"']", failure)
    if refusal is None or "Traceback" in failure:
        return Verdict(WRONG, f"{failure.strip().splitlines()[-1][:300]}")
    return Verdict(REFUSED, refusal[1])


def _ended(run: Future[Any]) -> list[Rank]:
    return run.result()[0].ranks if run.done() and run.exception() is None else []
