"""Run simulations: ``python -m tests.soak --seconds 60``, ``--seeds 1-100``, or ``--seed 7`` to replay one."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.soak.simulation import FAULTS_S, Outcome, simulate

HASH_SEED = "0"


def main() -> int:
    """Parse the arguments, run, and print what was tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, help="begin no new seed after so many seconds")
    parser.add_argument("--seeds", default="1-", help="range of seeds: 1-100, or 500- for all from 500 on")
    parser.add_argument("--seed", type=int, help="replay one seed twice, and show its daemon's log")
    parser.add_argument("--faults", type=float, default=FAULTS_S, help="virtual seconds with faults in each seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:  # sets of text are iterated in an order that depends on it
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.soak", *sys.argv[1:]])
    if options.seed is not None:
        return _replay(options.seed, options.faults)
    first, _, last = options.seeds.partition("-")
    if not last and options.seconds is None:
        parser.error("an open range of seeds needs --seconds")
    seeds = range(int(first), int(last) + 1 if last else sys.maxsize)
    return _report(_run(seeds, options.seconds, options.faults, options.processes), options.faults)


def _run(seeds: Iterable[int], seconds: float | None, faults_s: float, processes: int) -> Iterator[Outcome]:
    until_s = time.monotonic() + seconds if seconds is not None else float("inf")

    def due() -> Iterator[tuple[int, float]]:
        for seed in seeds:
            if time.monotonic() >= until_s:
                return
            yield seed, faults_s

    if processes == 1:
        yield from map(_one, due())
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        pending = []
        given = due()
        while True:
            while len(pending) < 2 * processes and (task := next(given, None)) is not None:
                pending.append(pool.apply_async(_one, (task,)))
            if not pending:
                return
            yield pending.pop(0).get()


def _one(task: tuple[int, float]) -> Outcome:
    logging.getLogger("clusterd").propagate = False
    return simulate(*task)


def _report(outcomes: Iterable[Outcome], faults_s: float) -> int:
    total, failed, faults = Outcome(0), 0, Counter[str]()
    count, begun_s = 0, time.monotonic()
    for outcome in outcomes:
        count += 1
        faults += outcome.faults
        for name in ("jobs", "moves", "events", "checks", "lives", "requests", "virtual_s"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        if outcome.wrong:
            failed += 1
            print(f"seed {outcome.seed} fails; python -m tests.soak --seed {outcome.seed} --faults {faults_s:g}")
            for what in outcome.wrong[:5]:
                print(f"  {what[:400]}")
    print(f"{count} seeds in {time.monotonic() - begun_s:.0f} s, {failed} failed")
    print(
        f"{total.virtual_s / 3600:.1f} hours of virtual time, {total.lives} lives of the daemon, {total.requests} "
        f"requests of clients, {total.jobs} jobs, {total.moves} migrations, {total.events} events, "
        f"promises checked {total.checks} times"
    )
    for name, number in faults.most_common():
        print(f"{number:8} {name}")
    return 1 if failed else 0


def _replay(seed: int, faults_s: float) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    first = simulate(seed, faults_s)
    logging.getLogger("clusterd").propagate = False
    again = simulate(seed, faults_s)
    if first.trace != again.trace:
        print(f"seed {seed} had two traces: {first.trace}, {again.trace}")
        return 1
    print(f"seed {seed}, twice with trace {first.trace}")
    return _report([first], faults_s)


if __name__ == "__main__":
    sys.exit(main())
