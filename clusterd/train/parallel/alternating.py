"""Several losses and optimizers, each for a part of the model, as a GAN has them: updated in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from clusterd.train.parallel.optimizer_slots import PARTS_HOW_TO
from clusterd.train.process.exits import Refused
from clusterd.train.process.job import NAME, Job, OptimizerFactory, adapt_optimizer_factory


class AlternatingOptimizer(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """Optimizers of parts of a model, seen as one that has the parameter groups and the state of all.

    Attributes:
        parts: optimizer by the name of the submodule that it updates, or by its number, of those for one loss.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in parts.values() for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.defaults.update(next(iter(parts.values())).defaults)  # schedulers read momentum and betas there
        self.parts = dict(parts)
        self.param_groups = groups
        for optimizer in parts.values():
            optimizer.state = self.state

    def step(self, closure: Any = None, *, part: str = "") -> None:
        """Update a part of the model; by default all parts."""
        for name, optimizer in self.parts.items():
            if part in ("", name):
                optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, of which the parts get theirs."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for optimizer in self.parts.values():
            optimizer.state, optimizer.param_groups = self.state, list(islice(groups, len(optimizer.param_groups)))


def alternating_factory(factories: Mapping[str, Callable[[Any], torch.optim.Optimizer]]) -> OptimizerFactory:
    """Factory of an `AlternatingOptimizer` from those of its parts."""
    adapted = {name: adapt_optimizer_factory(factory) for name, factory in factories.items()}

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        of_part: dict[str, list[nn.Parameter]] = {name: [] for name in adapted}
        for parameter in parameters:
            path = getattr(parameter, NAME, "")
            owners = [name for name in adapted if path.startswith(f"{name}.")]
            if len(owners) != 1:
                where = "several" if owners else "none"
                raise Refused(f"{path} is in {where} of the optimizer's parts, {_listed(adapted)}: {PARTS_HOW_TO}")
            of_part[owners[0]].append(parameter)
        if empty := next((name for name, some in of_part.items() if not some), ""):
            raise Refused(f"the model has nothing to train in {empty!r}, a part of the optimizer: {PARTS_HOW_TO}")
        return AlternatingOptimizer({name: adapted[name](some) for name, some in of_part.items()})

    return make


def joined_factory(factory: OptimizerFactory) -> OptimizerFactory:
    """Factory whose list of optimizers, each for some of the parameters, is one that has all."""

    def make(parameters: list[nn.Parameter]) -> Any:
        made = factory(parameters)
        if not (isinstance(made, (list, tuple)) and all(isinstance(one, torch.optim.Optimizer) for one in made)):
            return made
        every = [id(p) for one in made for group in one.param_groups for p in group["params"]]
        if len(every) > len(set(every)) or not made:
            raise Refused("optimizer() returned a list in which several optimizers have the same parameter, or none")
        name = " and ".join(type(one).__name__ for one in made)  # for messages
        return type(name, (AlternatingOptimizer,), {})({str(number): one for number, one in enumerate(made)})

    return make


def check_parts(job: Job) -> None:
    """Check that losses and optimizers are of the same parts, and that an evaluation has a metric.

    Raises:
        Refused: they are not.
    """
    if list(job.losses) != list(job.optimizer_parts):
        has = f"loss is of {_listed(job.losses)}, optimizer of {_listed(job.optimizer_parts)}"
        raise Refused(f"{has}: {PARTS_HOW_TO}")
    if job.losses and job.evaluate is not None and job.evaluate.metric is None:
        no_single_loss()


def _listed(parts: Iterable[str]) -> str:
    return " and ".join(map(repr, parts)) or "the whole model"


def no_single_loss(*_: Any) -> Any:
    """Loss of a job that has several, where one is needed.

    Raises:
        Refused: always.
    """
    raise Refused("this job has several losses: an evaluation needs a `metric`")
