"""States of released versions, which each later one must read: ``python -m tests.daemon.journal.kept_states 0.1.0``.

Run at each release; writes journals of head nodes in the middle of their work, and what their states said, to `kept/`.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from clusterd.core.state import State
from tests.soak.simulation import Simulation, in_simulation

KEPT = Path(__file__).parent / "kept"
SEEDS, BUSY_S = (5, 6, 11), 600.0
"""Simulations that are then in the middle of jobs of every kind."""


def summary(state: State) -> dict[str, Any]:
    """Jobs with their attempts, hosts, and who holds each device: what no version may read otherwise."""
    return {
        "jobs": {
            job.id: {
                "name": job.spec.name,
                "kind": job.spec.kind.value,
                "user": job.spec.user,
                "state": job.state.value,
                "submitted_s": job.submitted_s,
                "attempts": [
                    {
                        "state": attempt.state.value,
                        "generation": attempt.generation,
                        "plan": str(attempt.plan),
                        "devices": list(attempt.devices),
                    }
                    for attempt in job.attempts
                ],
            }
            for job in state.jobs.values()
        },
        "hosts": {host.id: host.state.value for host in state.hosts.values()},
        "holders": {device: [holder.job, holder.attempt] for device, holder in state.holders.items()},
    }


def keep(version: str) -> None:
    """Write the states of this version, unless they were kept at its release."""
    if any(KEPT.glob(f"{version}-*")):
        raise SystemExit(f"{KEPT} has states of {version}: give the version that is released now")
    KEPT.mkdir(exist_ok=True)
    for seed in SEEDS:
        outcome = in_simulation(seed, lambda simulation, seed=seed: _keep(simulation, KEPT / f"{version}-{seed}"))
        if outcome.wrong:
            raise SystemExit("\n".join(outcome.wrong))


async def _keep(simulation: Simulation, to: Path) -> None:
    await simulation.begin()
    users = asyncio.create_task(simulation.users.run())
    await asyncio.sleep(BUSY_S)
    users.cancel()
    assert simulation.life.engine is not None
    await simulation.life.engine.snapshot()
    with (
        closing(sqlite3.connect(simulation.life.directory / "journal.db")) as source,
        closing(sqlite3.connect(":memory:")) as copy,
    ):
        source.backup(copy)
        copy.execute("VACUUM")
        to.with_suffix(f"{to.suffix}.db.xz").write_bytes(lzma.compress(copy.serialize()))
    said = json.dumps(summary(simulation.state), indent=1, sort_keys=True)
    to.with_suffix(f"{to.suffix}.json").write_text(f"{said}\n")


if __name__ == "__main__":
    keep(sys.argv[1])
