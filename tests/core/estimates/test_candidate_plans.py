"""A candidate plan that fits, or the reason why none does."""

from __future__ import annotations

from clusterd.core.estimates.first_fit import ChosenPlan, Impossible, choose
from clusterd.plans.plan import Plan
from tests.plans.shapes import gpt

GIB = 1 << 30


def test_the_simplest_plan_that_fits_is_taken() -> None:
    """Plenty of memory: plain replicas."""
    choice = choose(gpt(), 2, "cuda", 80 * GIB)
    assert isinstance(choice, ChosenPlan)
    assert choice.plan == Plan(dp=2)
    assert "the simplest that fits" in choice.reason


def test_a_model_that_does_not_fit_as_it_is_gets_a_plan_that_saves_memory() -> None:
    """Wide layers on small devices."""
    shape = gpt(width=2048, depth=24)
    small = choose(shape, 4, "cuda", 10 * GIB)
    assert isinstance(small, ChosenPlan)
    assert small.plan != Plan(dp=4)
    assert small.memory.device_bytes < 10 * GIB


def test_a_plan_that_cannot_fit_names_what_it_needs_and_what_there_is() -> None:
    """Before it takes a device."""
    answer = choose(gpt(width=4096, depth=48), 2, "cuda", 2 * GIB, Plan(dp=2))
    assert isinstance(answer, Impossible)
    assert "its plan dp=2 cannot fit: a rank needs" in answer.reason
    assert "a device has 2.0 GiB" in answer.reason
    assert "zero=3" in answer.reason


def test_a_model_that_fits_under_no_plan_names_the_least_it_needs() -> None:
    """More devices would help, and it says so."""
    answer = choose(gpt(width=8192, depth=48), 2, "cuda", 2 * GIB)
    assert isinstance(answer, Impossible)
    assert "no plan on 2 devices fits: the least memory is" in answer.reason
    assert "ask for more devices" in answer.reason


def test_a_number_of_devices_that_no_plan_uses_says_why() -> None:
    """A batch of sixteen, and six layers, over seven."""
    answer = choose(gpt(), 7, "cuda", 80 * GIB)
    assert isinstance(answer, Impossible)
    assert "16 cannot be cut into 7 equal shares" in answer.reason
