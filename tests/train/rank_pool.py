"""Real ranks for tests, forked from one process that has imported torch, like the fork server on hosts.

`RankPool` is the tests' side. The other side is this file run as a program: it reads one request per line, forks the
ranks, each with its own rank file, output file and result file, and answers when all have exited.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterd.agent.host.rank_environment import SURVIVES_PEERS
from clusterd.plans.plan import Plan
from tests.hang import HANG_S

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]

ABORTED_S = 30.0
"""Time for a rank that hangs to write the stacks of its threads."""

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONPATH": str(ROOT),
}
VARIES_WHAT_IS_COMPUTED = (
    "model", "loss", "script", "stream", "own_loop", "unlike", "unseeded", "sees_batch", "precision", "layers", "way",
)  # fmt: skip
"""Options of a scenario by which a plan may compute something else; without them it is not compared each time."""

_CHANCE = random.SystemRandom()  # parallel tests seed the global generator alike


@dataclass(frozen=True)
class Rank:
    """Exit code, output and result of one rank."""

    exit_code: int  # negative: the signal
    output: str
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """All ranks of one run."""

    ranks: list[Rank]
    directory: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Steps in rank 0's log."""
        return [line for line in self._lines() if not {"evaluated", "logged"} & line.keys()]

    @property
    def evaluations(self) -> dict[int, dict[str, Any]]:
        """Evaluations in rank 0's log, by step."""
        found = [line for line in self._lines() if "evaluated" in line]
        assert len({line["evaluated"] for line in found}) == len(found), found
        return {line["evaluated"]: line for line in found}

    @property
    def logged(self) -> dict[int, dict[str, Any]]:
        """Metrics that the script logged, by step."""
        return {line["logged"]: line["metrics"] for line in self._lines() if "logged" in line}

    def _lines(self) -> list[dict[str, Any]]:
        path = self.directory / "steps.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        """Loss of every step."""
        return [s["loss"] for s in self.steps]

    def checked(self) -> Run:
        """The run itself, if every rank exited with 0."""
        for number, rank in enumerate(self.ranks):
            assert rank.exit_code == 0, f"rank {number} ended with {rank.exit_code}:\n{rank.output}"
        return self


class RankPool:
    """Starts ranks; one run at a time.

    Args:
        gpus: number of the host's GPUs that ranks may see; more ranks share them.
        modules: to import once, before ranks are forked.
    """

    def __init__(self, *, gpus: int = 0, modules: Sequence[str] = ()) -> None:
        self._gpus = gpus
        folders = [str(ROOT), str(ROOT / "examples/gpt"), str(ROOT / "examples/hf"), str(HERE.parent)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **(SURVIVES_PEERS if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
            "PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._server = subprocess.Popen(
            [sys.executable, str(HERE), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, directory: Path, plan: str, **options: Any) -> Run:
        """Train the scenario of `options` (see `scenarios.job`) under `plan`, one process per rank."""
        return self.run_each(directory, plan, [options])[0]

    def run_each(
        self,
        directory: Path,
        plan: str,
        variations: list[dict[str, Any]],
        *,
        world_size: int = 0,
        port: int = 0,
        control_socket: str = "",
        more: Callable[[int], dict[str, Any]] = lambda _: {},
        patience_s: float = 5.0,
    ) -> list[Run]:
        """Train several scenarios under `plan`, one after another in the same processes.

        Args:
            world_size: processes to start; default: the number of ranks of the plan.
            port: of the rendezvous; default: a free one.
            more: additional rank-file entries of each rank.
            patience_s: time for which the others may live on after one has failed.
        """
        world_size = world_size or Plan.parse(plan).ranks
        directories = [directory / str(i) for i in range(len(variations))]
        is_plain = set().union(*variations).isdisjoint(VARIES_WHAT_IS_COMPUTED)
        known = {"proven": [Plan.parse(plan).family]} if is_plain else {}
        for each in directories:
            each.mkdir(parents=True, exist_ok=True)
            _write_rank_files(each, plan, world_size, port or free_port(), control_socket, lambda r: known | more(r))
        request = {
            "directory": str(directory),
            "world_size": world_size,
            "gpus": self._gpus,
            "patience_s": patience_s,
            "runs": [[str(d), v] for d, v in zip(directories, variations, strict=True)],
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        return [
            Run([_read_rank(directory, each, r, code) for r, code in enumerate(codes)], each) for each in directories
        ]

    def close(self) -> None:
        """Stop the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=HANG_S)
        self._server.stdout.close()


def free_port() -> int:
    """A currently free TCP port below the kernel's ephemeral range."""
    while True:
        port = _CHANCE.randrange(12000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


def _write_rank_files(
    directory: Path,
    plan: str,
    world_size: int,
    port: int,
    control_socket: str,
    more: Callable[[int], dict[str, Any]],
) -> None:
    for rank in range(world_size):
        rank_file = {
            "job": "test",
            "attempt": 1,
            "generation": 1,
            "rank": rank,
            "world_size": world_size,
            "local_rank": rank,
            "master_addr": "127.0.0.1",
            "master_port": port,
            "interface": "lo",
            "plan": Plan.parse(plan).to_dict(),
            "device": {"kind": "cpu", "uuid": f"cpu{rank}", "cores": [], "threads": 1},
            "steps_file": str(directory / "steps.jsonl"),
            "directory": str(directory),
            "control_socket": control_socket,
            "token": "secret",
            **more(rank),
        }
        (directory / f"rank-{rank}.json").write_text(json.dumps(rank_file))


def _read_rank(directory: Path, run: Path, rank: int, code: int) -> Rank:
    output = (directory / f"rank-{rank}.log").read_text(errors="replace")
    result = run / f"rank-{rank}.result.json"
    return Rank(code, output, json.loads(result.read_text()) if result.exists() else {})


def _serve() -> None:
    import scenarios  # noqa: F401

    import clusterd.train.process.preload  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


def _run(request: dict[str, Any]) -> list[int]:
    """Exit codes of the ranks; hanging ones are killed, and their logs say where they were."""
    ranks, ending = {}, signal.SIGABRT
    for rank in range(request["world_size"]):
        pid = os.fork()
        if pid == 0:
            if 0 < request["gpus"] < request["world_size"]:
                _share_gpus(rank)
            _become_rank(Path(request["directory"]), rank, request["runs"])
        ranks[pid] = rank
    codes = [0] * len(ranks)
    waiting = {os.pidfd_open(pid): pid for pid in ranks}
    deadline = time.monotonic() + HANG_S
    while waiting:
        ended, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            for pid in waiting.values():
                os.kill(pid, ending)
            deadline, ending = time.monotonic() + ABORTED_S, signal.SIGKILL
        for descriptor in ended:
            pid = waiting.pop(descriptor)
            os.close(descriptor)
            codes[ranks[pid]] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if codes[ranks[pid]]:
                # The others wait for it in a collective; give them time to notice.
                deadline = min(deadline, time.monotonic() + request["patience_s"])
    return codes


def _share_gpus(rank: int) -> None:
    """Let several ranks use one GPU: NCCL refuses that for ranks of one host, so each is a host of its own to it."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"  # from NCCL 2.30 on


def _become_rank(directory: Path, rank: int, runs: list[tuple[str, dict[str, Any]]]) -> None:
    code = 1
    try:
        log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.enable(log)
        import scenarios

        for run, options in runs:
            os.environ["CLUSTERD_RANK_FILE"] = f"{run}/rank-{rank}.json"
            scenarios.rank(Path(run) / f"rank-{rank}.result.json", **options)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
