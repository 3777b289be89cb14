"""Global variables of a script: compared by their values, whatever else its modules hold."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
import torch

from clusterd.train.process import script_variables as variables
from clusterd.train.process.script_variables import differences, script_variables


class Asked(types.ModuleType):
    """A module that imports another when it is asked for an attribute, as some of libraries do."""

    def __getattr__(self, name: str) -> object:
        raise ImportError(f"no {name} here")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setitem(sys.modules, "asked_for", Asked("asked_for"))
    module = types.ModuleType("users_script")
    module.__file__ = "/home/ann/users_script.py"
    monkeypatch.setitem(sys.modules, "users_script", module)
    monkeypatch.setattr(variables, "VARIABLES_MAX", 1 << 20)  # those of all modules of tests count, too
    return module


def own() -> dict[str, str]:
    found = script_variables().items()
    return {name.partition(".")[2]: text for name, text in found if name.startswith("users_script.")}


def test_what_differs_is_named_with_both_values(script: types.ModuleType) -> None:
    vars(script).update(seen=3, best=math.nan, mean=np.ones(4), parts=[torch.ones(2), torch.ones(2)], made=object())
    before = own()
    assert before == {"seen": "3", "best": "nan", "mean": "of norm 2", "parts": "2 tensors of norm 2"}
    assert differences([before, before], own()) == ""
    vars(script).update(seen=4, parts=[torch.ones(2), torch.zeros(2)])
    parts = "parts (2 tensors of norm 2 there, 2 tensors of norm 1.41421356 here)"
    assert differences([before, before], own()) == f"seen (3 there, 4 here), {parts}"
    assert "seen" not in differences([before, own()], own())
    assert differences([{}], own()) == ""


def test_large_tensors_are_left_out_together(script: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read between two steps of the training."""
    monkeypatch.setattr(variables, "NUMBERS_MAX", 100)
    vars(script).update(first=torch.ones(64), second=torch.ones(64), third=torch.ones(36), count=1)
    assert own() == {"first": "of norm 8", "third": "of norm 6", "count": "1"}
