"""Seeding of the global random generators: for building the model, and for every step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from clusterd.plans.sample_order import mix

UPDATE_STAGE = 0xFFFD
"""Stage number of the optimizer's update in `seed_step`: no pipeline stage draws the same numbers."""

LOOP_STAGES = 0xFFFB, 0xFFFC
"""The same of the script's own loop after a step, and before the next one."""


def seed_everything(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    torch.manual_seed(seed)
    _seed_python(seed)


def generator_states() -> tuple[Any, ...]:
    """States of Python's and NumPy's generators, to see whether numbers were drawn from them."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), of_numpy["pos"], of_numpy["key"].tobytes()


def all_generator_states() -> tuple[Any, ...]:
    """The same with torch's, where its operations are real."""
    of_gpu = (torch.cuda.get_rng_state().numpy().tobytes(),) if torch.cuda.is_initialized() else ()
    return *generator_states(), torch.get_rng_state().numpy().tobytes(), *of_gpu


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Context after which all generators go on as if nothing had been drawn in it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def seed_step(seed: int, step: int, replica: int, stage: int) -> None:
    """Seed all generators for one step: random numbers depend on (seed, step, replica, stage) only.

    Shards of one replica draw the same numbers, which keeps replicated tensors equal; a repeated step does too.
    """
    number = mix(mix(seed & 0xFFFFFFFF) ^ (step << 32 | replica << 16 | stage)) >> 1
    # torch.manual_seed formats a stack trace for each kind of device that is not in use.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)
    _seed_python(number)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
