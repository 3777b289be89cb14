"""A pipeline is cut so that its heaviest stage is lightest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd.plans.stages import split_layers


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_lighter_heaviest_stage(weights: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))
    cut = split_layers(weights, stages)
    assert [i for stage in cut for i in stage] == list(range(len(weights)))
    assert len(cut) == stages
    heaviest = max(sum(weights[i] for i in stage) for stage in cut)
    for ends in itertools.combinations(range(1, len(weights)), stages - 1):
        bounds = [0, *ends, len(weights)]
        assert heaviest <= max(sum(weights[a:b]) for a, b in itertools.pairwise(bounds))


def test_layers_without_parameters_make_no_stage() -> None:
    """An activation function on a device of its own would leave its optimizer nothing to do."""
    assert split_layers([5, 0, 0, 5], 2) == [range(1), range(1, 4)]
    with pytest.raises(ValueError, match="there are 2"):
        split_layers([5, 0, 5], 3)
