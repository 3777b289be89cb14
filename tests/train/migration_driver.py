"""Driver of migrations of real ranks, in the role of the daemon, over the agents of `agent_double`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agent_double import HostAgent, Message, Network
from rank_pool import RankPool, Run
from scenarios import Recorded, job

from clusterd.plans.plan import Plan
from clusterd.protocol.launch import MigrationRequest
from clusterd.protocol.messages import from_map
from clusterd.train.inspect.describe import describe
from clusterd.train.migration.spec import MigrationSpec
from tests.hang import HANG_S

STEPS = 100_000
"""More than any test waits for; the last generation is stopped."""


@dataclass
class Generation:
    """Ranks of one plan."""

    number: int
    plan: Plan
    hosts: list[str]
    run: Future[list[Run]]
    directory: Path
    pool: RankPool
    kind: str = ""  # of its devices
    lost: tuple[int, ...] = ()
    proves: bool = False

    def ended(self) -> Run:
        """The run, once it is over, in which no proof of a migration was left out."""
        run = self.run.result(HANG_S)[0]
        assert not (self.proves and "it was not tried whether" in run.ranks[0].output), run.ranks[0].output
        return run

    @property
    def living(self) -> int:
        return self.plan.ranks - len(self.lost)

    @property
    def side(self) -> Message:
        devices = [f"{host}:{self.kind}{r}" for r, host in enumerate(self.hosts)]
        return {"generation": self.number, "plan": self.plan.to_dict(), "hosts": self.hosts, "devices": devices}

    def steps(self) -> list[Message]:
        return Run([], self.directory / "0").steps


@dataclass
class Moved:
    """Measurements of a migration."""

    downtime_s: float
    bytes_network: int
    step: int  # last step of the source ranks


@dataclass
class Mover:
    """One job, and the pools that its generations use in turn."""

    pools: tuple[RankPool, RankPool]
    directory: Path
    options: dict[str, Any]
    hosts: tuple[str, ...] = ("a",)
    rank_file: Message = field(default_factory=dict)  # additional entries, for every rank
    proof_s: float = 600.0  # longer than a busy machine takes
    generations: list[Generation] = field(default_factory=list)
    moves: list[MigrationSpec] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.network = Network()
        self.agents = {host: HostAgent(host, self.directory, self.network) for host in self.hosts}
        self._threads = ThreadPoolExecutor(2)
        self._launched: list[Generation] = []
        model = {
            k: v
            for k, v in self.options.items()
            if k not in ("samples", "pace_s", "record", "filed", "unlike", "own_loop", "stand_in", "stream")
        }
        self.shape = describe(job(Recorded(self.options.get("samples", 128)), **model), trace=False)

    def close(self) -> None:
        for generation in self._launched:
            if not generation.run.done():
                self._tell(generation, {"event": "stop", "reason": "the test ended"})
        self._threads.shutdown()
        for agent in self.agents.values():
            agent.close()

    @property
    def now(self) -> Generation:
        return self.generations[-1]

    def start(self, plan: str, hosts: str = "") -> Generation:
        """Start the first generation."""
        generation = self._made(plan, hosts)
        self._launch(generation, None)
        self.generations.append(generation)
        self.wait(lambda: sum(a.ready(generation.number) for a in self.agents.values()) == generation.plan.ranks)
        return generation

    def move(
        self,
        plan: str,
        hosts: str = "",
        *,
        abort_after: str = "",
        lost: Sequence[int] = (),
        step: int | None = None,
        makes_room: bool = False,
        ends: Message | None = None,
    ) -> Moved | None:
        """Migrate to another plan.

        Args:
            hosts: one letter per target rank; default: all on the first host.
            abort_after: abort once all ranks concerned have sent this report.
            lost: source ranks that are gone; step: the step that the others must complete.
            makes_room: source ranks publish and free their memory before the target ranks start.
            ends: fields of a stop that comes in the place of the resume, after which the target ranks end.
        """
        old = self.now
        old.lost = tuple(lost)
        new = self._made(plan, hosts)
        move = {
            "id": f"test.1.{new.number}",
            "token": "00",
            "shape": self.shape.to_dict(),
            "lost": list(lost),
            "step": step,
            "makes_room": makes_room,
            "proof_s": self.proof_s if not (lost or makes_room) else 0.0,
            "old": old.side,
            "new": new.side,
            "fabric": {host: [host, 1] for host in self.hosts},
            "host": None,
        }
        new.proves = bool(move["proof_s"]) and not (self.options.get("stream") or self.options.get("script"))
        if not makes_room:
            self._launch(new, move)
        self._tell(old, {"event": "move", "move": move})
        self.all_say(old, "prepared", move["id"])
        if makes_room:
            self._tell(old, {"event": "quiesce", "move": move["id"]})
            self.all_say(old, "quiesced", move["id"])
            self._launch(new, move)
        self.all_say(new, "prepared", move["id"])
        self._move = MigrationSpec.of(from_map(MigrationRequest, move))
        digest = {said["digest"] for g in (old, new) for said in self.said(g, "prepared", move["id"]).values()}
        assert digest == {self._move.transfers.digest}
        if abort_after != "prepared":
            self._tell(old, {"event": "quiesce", "move": move["id"]})
            quiesced = self.all_say(old, "quiesced", move["id"])
            assert len({said["step"] for said in quiesced.values()}) == 1
            if not abort_after:
                return self._switch(old, new, move["id"], quiesced, ends)
        self._tell(new, {"event": "stop", "reason": "the move was undone"})
        self._tell(old, {"event": "abort", "move": move["id"]})
        for agent in self.agents.values():
            agent.forget(move["id"])
        new.run.result(HANG_S)[0].checked()
        if abort_after != "prepared":
            self.all_say(old, "resumed", move["id"])
        return None

    def refused_move(self, plan: str) -> str:
        """Migrate to a plan that target ranks must refuse; return the reason, once the source ranks train again."""
        with pytest.raises(AssertionError, match=r"PlanRefused|refused"):
            self.move(plan)
        move = f"test.1.{len(self._launched)}"
        refusals = [said["refused"] for said in self.said(self._launched[-1], "failed", move).values()]
        assert refusals and all(refusals), refusals
        self.undo()
        self.all_say(self.now, "resumed", move)
        self._launched[-1].run.result(HANG_S)
        return str(refusals[0])

    def undo(self) -> None:
        """Let the source ranks of the last migration, which failed, go on."""
        move = f"test.1.{len(self._launched)}"
        self._tell(self.now, {"event": "abort", "move": move})
        for agent in self.agents.values():
            agent.forget(move)

    def _switch(
        self, old: Generation, new: Generation, move: str, quiesced: dict[int, Message], ends: Message | None
    ) -> Moved:
        loaded = self.all_say(new, "loaded", move)
        step = next(iter(quiesced.values()))["step"]
        assert {said["step"] for said in loaded.values()} == {step}
        self._tell(new, {"event": "stop", **ends} if ends is not None else {"event": "resume", "move": move})
        self._tell(old, {"event": "stop", "reason": "moved"})
        for rank, ended in enumerate(old.ended().ranks):
            assert ended.exit_code == 0 or rank in old.lost, ended.output
        if ends is not None:
            new.ended().checked()
            self.generations.append(new)
            return Moved(0.0, 0, step)
        trains = self.all_say(new, "trains", move)
        self.moves.append(self._move)
        self.generations.append(new)
        for agent in self.agents.values():
            agent.forget(move)
        by_host = {new.hosts[rank]: said["bytes_network"] for rank, said in loaded.items()}
        return Moved(
            min(s["at_s"] for s in trains.values()) - max(s["at_s"] for s in quiesced.values()),
            sum(by_host.values()),
            step,
        )

    def recover(self, plan: str, hosts: str = "") -> int:
        """Kill all ranks and resume from the newest complete state snapshot; return its step."""
        old = self.now
        for rank in range(old.plan.ranks):
            os.kill(self.agents[old.hosts[rank]].pid(old.number, rank), signal.SIGKILL)
        old.run.result(HANG_S)
        names, step = self.newest_snapshot()
        new = self._made(plan, hosts)
        move = {
            "id": f"test.1.{new.number}",
            "shape": self.shape.to_dict(),
            "snapshot": {"names": names, "hosts": old.hosts},
            "old": old.side,
            "new": new.side,
            "fabric": {host: [host, 1] for host in self.hosts},
        }
        self._launch(new, move)
        loaded = self.all_say(new, "loaded", move["id"])
        assert {said["step"] for said in loaded.values()} == {step}
        self._tell(new, {"event": "resume", "move": move["id"]})
        self.all_say(new, "trains", move["id"])
        self.generations.append(new)
        return step

    def newest_snapshot(self) -> tuple[list[str], int]:
        """Names by rank, and the step; -1 if there is none yet."""
        whole = []
        for which in "01":
            names = [f"test.1.g{self.now.number}.snap{rank}.{which}" for rank in range(self.now.plan.ranks)]
            steps = {self.network.published[n][1]["step"] if n in self.network.published else -1 for n in names}
            if len(steps) == 1:
                whole.append((steps.pop(), names))
        step, names = max(whole, default=(-1, []))
        return names, step

    def checkpoint(self, directory: Path, host: str = "") -> Message:
        """Request a checkpoint, of one host's ranks if given, wait for it and return rank 0's report."""
        before = self.checkpoints()
        self.ask_for_checkpoint(directory, host)
        self.wait(lambda: self.checkpoints() == before + self.now.plan.ranks, "checkpointed")
        return self.said(self.now, "checkpointed", "")[0]

    def ask_for_checkpoint(self, directory: Path, host: str = "") -> None:
        """Request a checkpoint without waiting."""
        self._tell(self.now, {"event": "checkpoint", "path": str(directory)}, host)

    def use_cores(self, each: int) -> None:
        """Set the CPU threads without waiting."""
        self._tell(self.now, {"event": "cores", "each": each})

    def checkpoints(self) -> int:
        """Number of reports of a complete checkpoint."""
        heard = [m.get("said", {}) for agent in self.agents.values() for _, _, m in agent.heard]
        return sum(said.get("what") == "checkpointed" for said in heard)

    def checkpoint_fails(self, path: Path) -> list[str]:
        """Request a checkpoint that must fail, and return the reason in every rank's report."""
        self.ask_for_checkpoint(path)

        def why() -> list[str]:
            said = self.said(self.now, "checkpoint_failed", "").values()
            return [str(s["why"]) for s in said if s["path"] == str(path)]

        self.wait(lambda: len(why()) == self.now.plan.ranks, "all to fail")
        return why()

    def train(self, steps: int) -> None:
        """Wait until the current ranks have logged this many more steps."""
        last = self._last_step()

        def done() -> bool:
            if self.now.run.done():
                self.now.run.result()[0].checked()
            return self._last_step() >= last + steps

        self.wait(done)

    def evaluations(self) -> list[Message]:
        """Evaluations in the logs of all generations."""
        return [line for g in self.generations for line in Run([], g.directory / "0").evaluations.values()]

    def stop(self, *, done: bool = False) -> list[Message]:
        """End the job, `done` or not; return the steps of all generations, in order."""
        self._tell(self.now, {"event": "stop", "reason": "enough", "done": done})
        self.now.ended().checked()
        return [step for generation in self.generations for step in generation.steps()]

    def cancel(self, directory: Path) -> int:
        """End the job before its end, with a checkpoint; return the last step of these ranks, or 0."""
        self._tell(self.now, {"event": "stop", "reason": "cancelled", "save": str(directory)})
        self.now.ended().checked()
        return self._last_step()

    def all_say(self, generation: Generation, what: str, move: str) -> dict[int, Message]:
        """Wait for this report of every rank; fail at once if one reports a failure."""

        def done() -> bool:
            assert not (failed := self.said(generation, "failed", move)), failed
            if generation.run.done():
                generation.run.result()[0].checked()
            return len(self.said(generation, what, move)) == generation.living

        self.wait(done, what)
        return self.said(generation, what, move)

    def wait(self, what: Callable[[], bool], name: str = "") -> None:
        """Poll for a condition in other processes."""
        deadline = time.monotonic() + HANG_S
        while not what():
            assert time.monotonic() < deadline, (name, [a.heard[-5:] for a in self.agents.values()])
            self.network.wait_for(lambda: False, 0.02)

    def kill(self, *ranks: int, told: bool = False) -> dict[int, Message]:
        """Kill current ranks, and wait until all others have noticed.

        Args:
            told: the agent also notifies the others, as it does after some seconds.
        Returns:
            What these report: the step that each has done, and whether it can finish one more.
        """
        for rank in ranks:
            os.kill(self.agents[self.now.hosts[rank]].pid(self.now.number, rank), signal.SIGKILL)
        if told:
            self._tell(self.now, {"event": "peers_lost", "reason": "the test killed some"})
        left = self.now.plan.ranks - len(ranks)
        self.wait(lambda: len(self.said(self.now, "orphaned", "")) == left, "orphaned")
        return self.said(self.now, "orphaned", "")

    def said(self, generation: Generation, what: str, move: str) -> dict[int, Message]:
        """Newest report of that kind of each rank of a generation."""
        return {r: s for agent in self.agents.values() for r, s in agent.said(generation.number, what, move).items()}

    def _tell(self, generation: Generation, message: Message, only: str = "") -> None:
        for host, agent in self.agents.items():
            if only in ("", host):
                agent.send(generation.number, message)

    @property
    def last_step(self) -> int:
        """Last logged step of all generations."""
        return self._last_step()

    def _last_step(self) -> int:
        steps = self.now.steps()
        return int(steps[-1]["step"]) if steps else 0

    def _made(self, text: str, hosts: str) -> Generation:
        """Create the next generation without launching it."""
        plan = Plan.parse(text)
        placed = list(hosts or self.hosts[0] * plan.ranks)
        number = len(self._launched) + 1
        pool = self.pools[0] if not self.generations or self.now.pool is self.pools[1] else self.pools[1]
        kind = self.rank_file.get("device", {}).get("kind", "")
        return Generation(number, plan, placed, Future(), self.directory / str(number), pool, kind)

    def _launch(self, generation: Generation, move: Message | None) -> None:
        self._launched.append(generation)

        def more(rank: int) -> Message:
            here = {
                **self.rank_file,
                "generation": generation.number,
                "control_socket": str(self.agents[generation.hosts[rank]].path),
            }
            return here if move is None else {**here, "standby": True, "move": move}

        what = [{**self.options, "steps": STEPS}]
        generation.run = self._threads.submit(
            generation.pool.run_each, generation.directory, str(generation.plan), what, more=more, patience_s=HANG_S
        )
