"""Checkpoints whose ranks write on hosts of their own, and which the first rank's host keeps."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from clusterd.train.checkpoint.dcp_files import Staged, StagedTensor, read, write

ROWS = 3


def save(rank: int, store: str, directories: list[str], answers: list[str]) -> None:
    """One of two ranks, each with some rows of a matrix."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rows = torch.full((ROWS, 4), float(rank))
    part = StagedTensor(("w",), (2 * ROWS, 4), ((ROWS * rank, ROWS * rank + ROWS), (0, 4)), rows)
    try:
        write(Staged(1, [part], {}), directories[rank], dist.group.WORLD, collects=True)
        answers[rank] = "saved"
    except OSError as error:
        answers[rank] = type(error).__name__


def saved(tmp_path: Path, directories: list[Path]) -> list[str]:
    context = multiprocessing.get_context("fork")
    answers = context.Manager().list(["", ""])
    arguments = (str(tmp_path / "store"), [str(each) for each in directories], answers)
    ranks = [context.Process(target=save, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return list(answers)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("is_shared", [False, True])
def test_the_first_host_has_all_of_it_and_the_others_nothing(tmp_path: Path, is_shared: bool) -> None:
    """Of ranks that share a folder nothing is sent, and nothing removed."""
    directories = [tmp_path / "a" / "checkpoint", tmp_path / ("a" if is_shared else "b") / "checkpoint"]
    assert saved(tmp_path, directories) == ["saved", "saved"]
    found = torch.full((2 * ROWS, 4), -1.0)
    read(str(directories[0]), {"w": ((2 * ROWS, 4), ((0, 2 * ROWS), (0, 4)), found)}, {})
    assert found[:, 0].tolist() == [0.0] * ROWS + [1.0] * ROWS
    assert sorted(os.listdir(tmp_path / "a")) == ["checkpoint"]
    assert sorted(os.listdir(directories[0])) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert is_shared or os.listdir(tmp_path / "b") == []


def test_a_file_that_the_first_host_cannot_take_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "checkpoint.part" / "__1_0.distcp").mkdir(parents=True)
    directories = [tmp_path / "a" / "checkpoint", tmp_path / "b" / "checkpoint"]
    assert saved(tmp_path, directories) == ["IsADirectoryError", "IsADirectoryError"]
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []
