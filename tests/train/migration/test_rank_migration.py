"""Live migration from plan to plan changes no loss.

Real ranks and real segments; agents and daemon are test doubles (`agent_double`, `migration_driver`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recorded_state
from cases import slow
from migration_driver import Mover
from scenarios import Filed

from clusterd.plans.plan import Plan
from clusterd.train.state.next_steps import STEPS

TOLERANCE = 1e-4
PLANS = [
    "dp=1",
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=3",
    "tp=2",
    "pp=2,accumulation=2",
    "dp=2,offload=optimizer",
    "dp=4",
    "dp=4,zero=1",
    "dp=4,zero=3",
    "tp=4",
    "pp=4,accumulation=4",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=1",
    "dp=2,tp=2,zero=3",
    "dp=2,pp=2,accumulation=2",
    "dp=2,pp=2,zero=3,accumulation=2",
    "tp=2,pp=2,accumulation=2",
    "dp=2,zero=3,offload=parameters",
    "dp=3,shares=2:5:9",
    "dp=3,zero=3,shares=4:4:8,accumulation=2,checkpointing",
]


def assert_undisturbed(steps: list[dict[str, Any]], expected: list[float]) -> None:
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert [s["loss"] for s in steps] == pytest.approx(expected[: len(steps)], rel=TOLERANCE)


def walk_through(mover: Mover, walk: list[str], *, hosts: list[str] | None = None) -> list[dict[str, Any]]:
    """Migrate from plan to plan with a few steps in between, and ten at the end; return all logged steps."""
    hosts = hosts or [""] * len(walk)
    mover.start(walk[0], hosts[0])
    for plan, places in zip(walk[1:], hosts[1:], strict=True):
        mover.train(2)
        moved = mover.move(plan, places)
        assert moved is not None
    mover.train(10)
    return mover.stop()


def all_pairs(plans: list[str]) -> list[str]:
    """A round trip that contains each ordered pair of plans once (Hierholzer)."""
    left = {plan: [other for other in plans if other != plan] for plan in plans}
    trip: list[str] = []
    stack = [plans[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            trip.append(stack.pop())
    return trip[::-1]


TRIP, HOPS = all_pairs(PLANS), 21
WALKS = [
    ["dp=2", "tp=2", "dp=2,zero=3", "pp=2,accumulation=2"],
    *(
        pytest.param(TRIP[start : start + HOPS + 1], marks=pytest.mark.slow, id=f"pairs from {start}")
        for start in range(0, len(TRIP) - 1, HOPS)
    ),
]


@pytest.mark.parametrize("walk", WALKS, ids=" > ".join)
def test_moves_change_no_loss(
    walk: list[str], moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    """Between one, two, three and four processes, including all pairs of plans."""
    expected = undisturbed(steps=1500)
    assert_undisturbed(walk_through(moving(), walk), expected)


@pytest.mark.slow
def test_a_job_of_mixed_precision_moves_as_any_other(
    moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    """Losses equal those of one process to the precision, and the state is equal exactly."""
    expected = undisturbed(precision="bf16")
    steps = walk_through(moving(precision="bf16"), ["pp=2,accumulation=2", "dp=2,zero=3", "dp=1"])
    losses = [s["loss"] for s in steps]
    assert losses == pytest.approx(expected[: len(steps)], rel=0.02)
    assert losses[:3] != pytest.approx(undisturbed()[:3], rel=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "options, walk",
    [
        slow(
            {"model": "tables", "optimizer": "two groups", "warmup": True},
            ["dp=2,zero=1", "tp=2", "pp=2,accumulation=2"],
        ),
        slow(
            {"model": "frozen", "optimizer": "nesterov"},
            ["pp=2,accumulation=2", "dp=3,zero=3,shares=4:4:8", "tp=2", "dp=2"],
        ),
        ({"optimizer": "adafactor"}, ["pp=2,accumulation=2", "dp=2,zero=1", "dp=1"]),
        slow({"model": "tied"}, ["dp=2,zero=3", "dp=2", "dp=2,zero=2"]),
        slow({"model": "stray"}, ["dp=2,zero=3", "dp=2", "dp=3,zero=3,shares=4:4:8"]),
        slow({"loss": "centred"}, ["dp=1", "dp=1,checkpointing"]),
        (
            {"model": "masked", "optimizer": "counting", "schedule": "cosine"},
            ["dp=2,zero=1", "pp=2,accumulation=2", "dp=1"],
        ),
    ],
    ids=lambda v: " ".join(map(str, v.values())) if isinstance(v, dict) else "",
)
def test_every_bit_of_the_state_arrives(
    options: dict[str, Any],
    walk: list[str],
    moving: Callable[..., Mover],
    undisturbed: Callable[..., list[float]],
    tmp_path: Path,
) -> None:
    """Frozen, unused and tied parameters, slots of odd shapes, groups, schedules, tables and counters."""
    expected = undisturbed(**options)
    mover = moving(**options, record=str(tmp_path / "state"))
    steps = walk_through(mover, walk)
    for number in range(2, 1 + len(walk)):
        left = recorded_state.read(tmp_path / "state", f"test.1.{number}-old")
        arrived = recorded_state.read(tmp_path / "state", f"test.1.{number}-new")
        recorded_state.assert_equal(left, arrived)
    assert_undisturbed(steps, expected)


@pytest.mark.parametrize("seed", [*map(slow, range(6))])
def test_a_chain_of_random_moves_over_two_hosts(
    seed: int, moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    """Only bytes that a host lacks cross the network: once before the switch, for the proof, and once at it."""
    rng = random.Random(seed)
    expected = undisturbed(warmup=True)
    mover = moving("ab", warmup=True)
    walk = rng.choices(PLANS[:8] if seed == 0 else PLANS, k=6)
    hosts = ["".join(rng.choices("ab", k=Plan.parse(p).ranks)) for p in walk]
    assert_undisturbed(walk_through(mover, walk, hosts=hosts), expected)
    bound = sum(g.transfers.network_bytes for g in mover.moves)
    assert mover.network.sent_bytes == 2 * bound > 0


@pytest.mark.slow
def test_no_sample_of_an_epoch_is_skipped_or_seen_twice(
    moving: Callable[..., Mover], undisturbed: Callable[..., list[float]], tmp_path: Path
) -> None:
    """Over plans with other replicas and shares; 53 samples make epochs of three batches of 16, five are left."""
    expected = undisturbed(samples=53)
    Filed(53).write(tmp_path / "tokens")
    mover = moving(rank_file={"datasets": {"tokens": str(tmp_path / "tokens")}}, samples=53, filed=True)
    steps = walk_through(mover, ["dp=2,shares=5:11", "tp=2", "dp=3,zero=3,shares=2:5:9", "dp=2,pp=2,accumulation=2"])
    assert_undisturbed(steps, expected)
    ledger: dict[int, list[int]] = {}
    for generation in mover.generations:
        plan, logged = generation.plan, [s["step"] for s in generation.steps()]
        shares = plan.batch_shares(16)
        for number, rank in enumerate(generation.run.result()[0].ranks):
            at = plan.coordinates(number)
            if (at.stage, at.shard) != (0, 0):
                continue
            share = shares[at.replica]
            repeated = STEPS * share * (generation.number > 1)
            asked = rank.result["asked"][repeated:]
            assert len(asked) == len(logged) * share
            for place, step in enumerate(logged):
                ledger.setdefault(step, []).extend(asked[place * share : (place + 1) * share])
    assert sorted(ledger) == list(range(1, len(steps) + 1))
    for first in range(1, len(steps) - 2, 3):
        epoch = [sample for step in range(first, first + 3) for sample in ledger[step]]
        assert len(epoch) == len(set(epoch)) == 48


@pytest.mark.slow
@pytest.mark.parametrize("after", [pytest.param("prepared", marks=pytest.mark.slow), "quiesced"])
def test_an_undone_move_leaves_the_old_ranks_as_they_were(
    after: str, moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    expected = undisturbed()
    mover = moving()
    mover.start("dp=2")
    for _ in range(2):
        mover.train(2)
        mover.move("tp=2", abort_after=after)
        assert not mover.agents["a"].segments()
    mover.train(2)
    mover.move("dp=2,zero=3")  # the next migration must find a clean state
    mover.train(5)
    assert_undisturbed(mover.stop(), expected)


@pytest.mark.parametrize("end", ["save", pytest.param("keep", marks=pytest.mark.slow)])
def test_a_stop_before_the_resume_leaves_the_state_that_has_moved(
    end: str, moving: Callable[..., Mover], tmp_path: Path
) -> None:
    """Regression: the target ranks took it for the end of a migration that had failed, and nobody had the state."""
    mover = moving()
    mover.start("dp=2")
    mover.train(3)
    saved = tmp_path / "saved"
    moved = mover.move("tp=2", ends={"reason": "cancelled", **({"save": str(saved)} if end == "save" else {end: True})})
    assert moved is not None
    if end == "save":
        assert mover.said(mover.now, "checkpointed", "")[0]["step"] >= moved.step
        assert (saved / ".metadata").exists()
    else:
        assert mover.newest_snapshot()[1] >= moved.step


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "old, dies, new, makes_room",
    [
        ("dp=2,tp=2", [1], "dp=2", False),
        ("dp=2", [1], "dp=1", True),
        pytest.param("dp=2", [0], "dp=1", False, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", [2], "dp=2,zero=3", True, marks=pytest.mark.slow),
        pytest.param("dp=2,pp=2,accumulation=2", [0, 3], "tp=2", False, marks=pytest.mark.slow),
    ],
)
def test_replicas_take_over_from_ranks_that_died(
    old: str,
    dies: list[int],
    new: str,
    makes_room: bool,
    moving: Callable[..., Mover],
    undisturbed: Callable[..., list[float]],
) -> None:
    """Every rank notices, also one that waits for a live rank that itself waits.

    If the target ranks do not fit beside the source ranks, these publish first and free their memory.
    """
    expected = undisturbed()
    mover = moving()
    mover.start(old)
    mover.train(3)
    steps = {said["step"] for said in mover.kill(*dies).values()}
    moved = mover.move(new, lost=dies, step=max(steps), makes_room=makes_room)
    assert moved is not None
    assert moved.step == max(steps)
    mover.train(10)
    logged = mover.stop()
    assert [s["step"] for s in logged if s["step"] > moved.step] == list(range(moved.step + 1, logged[-1]["step"] + 1))
    for step in logged:
        if step["loss"] is not None:
            assert step["loss"] == pytest.approx(expected[step["step"] - 1], rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, hosts",
    [
        ("dp=2,zero=3", "tp=2", ["ab", "bb"]),
        pytest.param("dp=2,tp=2,zero=1", "dp=3,zero=3,shares=4:4:8", ["aabb", "aba"], marks=pytest.mark.slow),
        pytest.param("pp=2,accumulation=2", "dp=2,offload=optimizer", ["aa", "ab"], marks=pytest.mark.slow),
    ],
)
def test_a_job_that_lost_all_its_ranks_goes_on_from_a_snapshot(
    old: str, new: str, hosts: list[str], moving: Callable[..., Mover], undisturbed: Callable[..., list[float]]
) -> None:
    expected = undisturbed(warmup=True)
    mover = moving("ab", {"snapshot_every": 3}, warmup=True)
    mover.start(old, hosts[0])
    mover.wait(lambda: mover.newest_snapshot()[1] >= 6)
    before = mover.now
    step = mover.recover(new, hosts[1])
    assert step % 3 == 0
    mover.train(10)
    mover.stop()
    after = mover.now.steps()
    assert [s["step"] for s in after] == list(range(step + 1, step + 1 + len(after)))
    logged = [*before.steps(), *after]
    assert [s["loss"] for s in logged] == pytest.approx([expected[s["step"] - 1] for s in logged], rel=TOLERANCE)
