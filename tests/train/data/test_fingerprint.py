"""Other data in some process of a job: found before it trains on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from migration_driver import Mover
from rank_pool import RankPool

from clusterd.train.data.fingerprint import difference, fingerprint_of


class Samples:
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Cropped(Samples):
    """Random crops, from the global generator or one that the data set seeds itself."""

    def __init__(self, start: Callable[[], float]) -> None:
        super().__init__(*[torch.arange(100.0) + 1000 * i for i in range(8)])
        self.start = start

    def __getitem__(self, index: int) -> torch.Tensor:
        low = int(self.start() * 50)
        return self.samples[index][low : low + 50]


PAIRS = [({"words": [i, i + 1], "text": f"{i}", "image": np.full((4, 4), i, np.uint8)}, i % 3) for i in range(20)]


def test_equal_data_have_no_difference_and_others_have() -> None:
    first = fingerprint_of(Samples(*PAIRS), "1")
    assert difference(first, fingerprint_of(Samples(*PAIRS), "1")) == ""
    assert "19 samples instead of 20" in difference(first, fingerprint_of(Samples(*PAIRS[1:]), "1"))
    assert "sample 0 is another one" in difference(first, fingerprint_of(Samples(*PAIRS[1:], PAIRS[0]), "1"))


def test_decoders_may_differ_in_the_last_digits() -> None:
    image = torch.rand(3, 32, 32)
    first, second = fingerprint_of([image], "1"), fingerprint_of([image * (1 + 1e-6)], "1")
    assert difference(first, second) == ""
    assert difference(first, fingerprint_of([image.flip(0)], "1")) != ""


def test_augmentation_is_no_difference() -> None:
    unseeded = random.SystemRandom()
    for start in (random.random, lambda: float(torch.rand(())), np.random.random, unseeded.random):
        assert difference(fingerprint_of(Cropped(start), "1"), fingerprint_of(Cropped(start), "1")) == ""


class Record:
    """A sample that is an object of the script's own."""

    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values, self.around = name, values, self


def test_objects_of_the_script_are_compared_by_what_they_hold() -> None:
    """By their type alone, three data sets in another order passed as one."""
    records = [Record(f"{i}", {"points": torch.full((3,), float(i))}) for i in range(10)]
    first = fingerprint_of(Samples(*records), "1")
    assert difference(first, fingerprint_of(Samples(*records), "1")) == ""
    assert "is another one" in difference(first, fingerprint_of(Samples(*reversed(records)), "1"))


def test_a_random_part_does_not_hide_what_is_not_random() -> None:
    """One random sample ended the comparison."""

    class Called(Samples):
        def __getitem__(self, index: int) -> Any:
            image, label = random.SystemRandom().random(), self.samples[index]
            return torch.tensor(image), label

    first = fingerprint_of(Called(*range(20)), "1")
    assert difference(first, fingerprint_of(Called(*range(20)), "1")) == ""
    assert "is another one" in difference(first, fingerprint_of(Called(*reversed(range(20))), "1"))


def test_a_data_set_that_is_slow_to_read_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = fingerprint_of(Samples(*PAIRS), "1")
    monkeypatch.setattr("clusterd.train.data.fingerprint.LIMIT_S", -1.0)
    some = fingerprint_of(Samples(*PAIRS), "1")
    assert "reading 1 of the 9 samples that ranks compare took 0 seconds" in capsys.readouterr().out
    assert difference(every, some) == difference(some, every) == ""


def test_a_coin_that_is_tossed_for_each_sample_is_no_difference() -> None:
    """Some samples look alike by chance in both readings."""
    tosses = [iter(map(int, text)) for text in ("010000000000000000", "110111111111111111")]
    first, second = (fingerprint_of(Cropped(lambda coins=coins: next(coins)), "1") for coins in tosses)
    assert difference(first, second) == ""


def test_draws_from_the_global_generators_are_found() -> None:
    """Their numbers depend on the plan, those of a generator of the data set's own do not."""
    own = random.Random(1)
    for start in (random.random, lambda: float(torch.rand(())), np.random.random):
        assert (fingerprint_of(Cropped(start), "1") or {})["draws"]
    assert not (fingerprint_of(Cropped(own.random), "1") or {})["draws"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("plan", "count"), [("dp=1", 0), ("dp=2", 1)])
def test_other_augmentations_under_replicas_are_reported(
    ranks: RankPool, tmp_path: Path, plan: str, count: int
) -> None:
    """Losses differed and the log did not say why."""
    run = ranks.run(tmp_path, plan, script="augmented", steps=2).checked()
    assert sum(rank.output.count("the data set draws from the global random generators") for rank in run.ranks) == count


def test_reading_samples_leaves_no_trace() -> None:
    """The data set may draw from a generator of its own, whose numbers training must not miss."""
    own = random.Random(1)
    torch.manual_seed(5)
    fingerprint_of(Cropped(own.random), "1")
    assert own.random() == random.Random(1).random()
    assert torch.initial_seed() == 5


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_ranks_with_other_data_are_refused_with_the_way_out(ranks: RankPool, tmp_path: Path, plan: str) -> None:
    run = ranks.run(tmp_path, plan, unlike="rank", steps=2)
    for rank in run.ranks:
        assert rank.exit_code == 92
        assert "the data of rank 1 and rank 0 differ: sample 0 is another one" in rank.output
        assert "seeded generator" in rank.output
    assert run.steps == []


@pytest.mark.slow
def test_a_migration_to_ranks_with_other_data_fails_and_training_goes_on(moving: Callable[..., Mover]) -> None:
    mover = moving(unlike="generation")
    mover.start("dp=2")
    mover.train(2)
    with pytest.raises(AssertionError, match="not those that this job has trained on so far"):
        mover.move("dp=1")
    mover.undo()
    mover.train(3)
    mover.stop()


@pytest.mark.slow
def test_a_restart_from_a_checkpoint_of_other_data_is_refused(
    moving: Callable[..., Mover], ranks: RankPool, tmp_path: Path
) -> None:
    mover = moving()
    mover.start("dp=2")
    mover.train(2)
    mover.checkpoint(tmp_path / "saved")
    mover.stop()

    def restart(job: str, **options: Any) -> Any:
        more = {"restore": str(tmp_path / "saved"), "job": job, "generation": 5}
        run = {"depth": 2, "steps": 6, **options}
        return ranks.run_each(tmp_path / job, "dp=1", [run], more=lambda _: more)[0]

    refused = restart("test", unlike="generation").ranks[0]
    assert refused.exit_code == 92
    assert "not those that this job has trained on so far: sample 0 is another one" in refused.output
    # A new job may go on with other data.
    other = restart("2", unlike="generation").checked()
    assert "the data are not those that the state was trained on" in other.ranks[0].output
