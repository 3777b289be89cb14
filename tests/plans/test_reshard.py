"""Any layout to any layout: every byte once, from a valid holder, with minimal network traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterd.plans.layout import Layout, LayoutMismatch, layout, zero1_owners
from clusterd.plans.model_shape import LayerShape, ModelShape, ParameterShape
from clusterd.plans.plan import Plan
from clusterd.plans.reshard import IncompleteLayout, Transfers, plan_transfers

PLANS = [
    Plan(),
    Plan(dp=2),
    Plan(dp=4),
    Plan(dp=3, zero=1),
    Plan(dp=2, zero=2),
    Plan(dp=4, zero=3),
    Plan(tp=2),
    Plan(tp=4),
    Plan(pp=2, accumulation=2),
    Plan(pp=3, accumulation=4),
    Plan(dp=2, tp=2),
    Plan(dp=2, tp=2, zero=3),
    Plan(dp=2, pp=2, zero=1, accumulation=2),
    Plan(tp=2, pp=2, accumulation=2),
    Plan(dp=2, tp=2, pp=2, zero=2, accumulation=2),
]


def gpt(layers: int = 3, width: int = 8, vocabulary: int = 11, ratio: float = 2.0) -> ModelShape:
    """A transformer's parameters, with a vocabulary that no shard count divides."""
    parameters = [ParameterShape("embed.weight", (vocabulary, width), 4, 0)]
    for i in range(layers):
        parameters += [
            ParameterShape(f"blocks.{i}.norm.weight", (width,), 4, i + 1),
            ParameterShape(f"blocks.{i}.qkv.weight", (3 * width, width), 4, i + 1, tp_dim=0),
            ParameterShape(f"blocks.{i}.qkv.bias", (3 * width,), 4, i + 1, tp_dim=0),
            ParameterShape(f"blocks.{i}.out.weight", (width, width), 4, i + 1, tp_dim=1),
        ]
    parameters.append(ParameterShape("head.weight", (vocabulary, width), 4, layers + 1))
    names = ["embed", *(f"blocks.{i}" for i in range(layers)), "head"]
    return ModelShape(
        parameters=tuple(parameters),
        layers=tuple(LayerShape(name) for name in names),
        global_batch=12,
        samples=100,
        pipeline=True,
        tp_plan=True,
        tp_degrees=(2, 4),
        optimizer_state_ratio=ratio,
    )


def hosts(ranks: int, per_host: int, first: int = 0) -> list[str]:
    return [f"host{first + r // per_host}" for r in range(ranks)]


def elements(moves: Transfers | Layout, rank: int, tensor: int, of: Layout, column: np.ndarray) -> np.ndarray:
    """Number of occurrences of each element of a tensor in the rank's boxes."""
    shape = of.tensors[tensor].shape
    counted = np.zeros(shape, dtype=np.int64)
    for row in np.flatnonzero((column == rank) & (moves.tensor == tensor)):
        counted[tuple(slice(moves.low[row, d], moves.high[row, d]) for d in range(len(shape)))] += 1
    return counted


def check(moves: Transfers) -> None:
    """Brute-force check: every element of every new box moves once, from a box that its source holds."""
    for rank in range(moves.new.ranks):
        for tensor in range(len(moves.new.tensors)):
            wanted = elements(moves.new, rank, tensor, moves.new, moves.new.rank)
            assert (elements(moves, rank, tensor, moves.new, moves.target) == wanted).all()
    held = {}
    for row in range(len(moves.old)):
        held.setdefault((int(moves.old.rank[row]), int(moves.old.tensor[row])), []).append(row)
    for i in range(len(moves)):
        rows = held[int(moves.source[i]), int(moves.tensor[i])]
        assert any(
            (moves.old.low[r] <= moves.low[i]).all() and (moves.old.high[r] >= moves.high[i]).all() for r in rows
        )


def bound(moves: Transfers) -> int:
    """Lower bound of network traffic: per host, elements that its new ranks need and none of its old ranks holds."""
    total = 0
    for host in dict.fromkeys(moves.new_hosts):
        for tensor, of in enumerate(moves.new.tensors):
            needed = np.zeros(of.shape, dtype=bool)
            here = np.zeros(of.shape, dtype=bool)
            for rank, name in enumerate(moves.new_hosts):
                if name == host:
                    needed |= elements(moves.new, rank, tensor, moves.new, moves.new.rank) > 0
            for rank, name in enumerate(moves.old_hosts):
                if name == host:
                    here |= elements(moves.old, rank, tensor, moves.old, moves.old.rank) > 0
            total += int((needed & ~here).sum()) * of.element_bytes
    return total


a_move = given(
    old=st.sampled_from(PLANS),
    new=st.sampled_from(PLANS),
    old_per_host=st.integers(1, 4),
    new_per_host=st.integers(1, 4),
    shift=st.integers(0, 2),
)
"""Any plan to any plan, on hosts that hold one to four ranks each and overlap or not."""


@settings(deadline=None, max_examples=120)
@a_move
def test_every_byte_once_from_a_holder_at_the_lower_bound(
    old: Plan, new: Plan, old_per_host: int, new_per_host: int, shift: int
) -> None:
    """Any plan to any plan, hosts overlapping or not."""
    shape = gpt()
    before, after = layout(shape, old), layout(shape, new)
    moves = plan_transfers(before, after, hosts(old.ranks, old_per_host), hosts(new.ranks, new_per_host, shift))
    check(moves)
    assert moves.network_bytes == bound(moves)


@settings(deadline=None, max_examples=60)
@given(old=st.sampled_from(PLANS), new=st.sampled_from(PLANS), data=st.data())
def test_lost_ranks_are_replaced_by_replicas_or_named(old: Plan, new: Plan, data: st.DataObject) -> None:
    """Survivors together hold everything, or the error names the first incomplete tensor."""
    shape = gpt()
    before = layout(shape, old)
    lost = data.draw(st.sets(st.integers(0, old.ranks - 1), max_size=max(old.ranks - 1, 0)))
    left = before.without(sorted(lost))
    covered = all(
        sum((elements(left, r, t, left, left.rank) for r in range(left.ranks)), np.zeros(of.shape, int)).all()
        for t, of in enumerate(left.tensors)
    )
    plan = lambda: plan_transfers(left, layout(shape, new), hosts(old.ranks, 2), hosts(new.ranks, 2))  # noqa: E731
    if not covered:
        with pytest.raises(IncompleteLayout, match=r"blocks|embed|head"):
            plan()
        return
    moves = plan()
    check(moves)
    assert not set(moves.source.tolist()) & lost


def test_a_rank_that_stays_on_its_device_keeps_its_bytes() -> None:
    """Growing from two to four replicas: the first two read from themselves."""
    shape = gpt()
    moves = plan_transfers(
        layout(shape, Plan(dp=2)),
        layout(shape, Plan(dp=4)),
        ["a", "a"],
        ["a", "a", "b", "b"],
        ["a0", "a1"],
        ["a0", "a1", "b0", "b1"],
    )
    for transfer in moves:
        if transfer.target < 2:
            assert transfer.source == transfer.target


def test_replicas_share_the_sending() -> None:
    """Four replicas on four hosts feed a fifth host: none sends much more than a quarter."""
    shape = gpt(layers=12, width=32)
    moves = plan_transfers(layout(shape, Plan(dp=4)), layout(shape, Plan()), ["a", "b", "c", "d"], ["e"])
    sent = [int(moves.bytes[moves.source == rank].sum()) for rank in range(4)]
    assert max(sent) < 0.32 * sum(sent)
    assert min(sent) > 0.18 * sum(sent)


def test_digests_agree_between_those_who_compute_and_differ_between_moves() -> None:
    """The two sides exchange only the digest."""
    shape = gpt()

    def digest(new: Plan) -> str:
        return plan_transfers(layout(shape, Plan(dp=2)), layout(shape, new), ["a", "b"], hosts(new.ranks, 1)).digest

    assert digest(Plan(tp=2)) == digest(Plan(tp=2))
    assert digest(Plan(tp=2)) != digest(Plan(dp=2, zero=3))


def test_layouts_of_different_models_are_refused() -> None:
    """The error names the tensor."""
    with pytest.raises(LayoutMismatch, match=r"embed.weight .* was \(11, 8\)"):
        plan_transfers(layout(gpt(), Plan()), layout(gpt(vocabulary=13), Plan()), ["a"], ["a"])


def test_zero1_deals_out_the_largest_first() -> None:
    """Replicas have about equal shares of the optimizer state."""
    shape = gpt(layers=8)
    owners = zero1_owners(shape, Plan(dp=3, zero=1))
    held = [0, 0, 0]
    for index, owner in owners.items():
        held[owner] += shape.parameters[index].size_bytes
    assert max(held) < 1.3 * min(held)


def test_planning_grows_linearly() -> None:
    """Four times the layers give about four times the rows, which determine the time."""
    small = plan_transfers(layout(gpt(8), Plan(dp=4, zero=3)), layout(gpt(8), Plan(tp=4)), hosts(4, 2), hosts(4, 2))
    large = plan_transfers(layout(gpt(32), Plan(dp=4, zero=3)), layout(gpt(32), Plan(tp=4)), hosts(4, 2), hosts(4, 2))
    assert 3.0 < len(large) / len(small) < 4.5
