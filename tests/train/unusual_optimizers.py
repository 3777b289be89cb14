"""Unusual optimizers and schedulers that plans must train correctly."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn

from clusterd.train.process.job import adapt_optimizer_factory


class CommonScale(torch.optim.SGD):
    """The update of a tensor depends on the largest gradient of all tensors."""

    def step(self, closure: Any = None) -> Any:
        largest = max(p.grad.abs().max() for g in self.param_groups for p in g["params"] if p.grad is not None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / largest
        return super().step(closure)


class Clipping(torch.optim.SGD):
    """Clips in the optimizer, but only huge gradients."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1000.0)
        return super().step(closure)


class LargeFactored(torch.optim.SGD):
    """Divides by row means, of matrices that are large along both dimensions."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for g in self.param_groups for p in g["params"] if p.dim() == 2 and min(p.shape) >= 128):
            p.grad /= p.grad.abs().mean(1, keepdim=True)
        return super().step(closure)


class LateRatio(torch.optim.SGD):
    """After five updates, scales every tensor's gradient to the tensor's norm."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 5 else ():
                p.grad *= p.detach().norm() / p.grad.norm()
        return super().step(closure)


class SomeRows(torch.optim.SGD):
    """Looks at whole tensors of the groups that ask for it."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for g in self.param_groups if g["rows"] for p in g["params"]):
            p.grad /= p.grad.norm()
        return super().step(closure)


class InParts(torch.optim.Optimizer):
    """Two inner optimizers, neither of which accepts an empty parameter list."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        matrices = SomeRows([{"params": [p for p in parameters if p.dim() == 2], "rows": True}], lr=0.1)
        self._parts = [matrices, torch.optim.AdamW([p for p in parameters if p.dim() != 2])]
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()


class Lookahead(torch.optim.SGD):
    """Every fifth update goes half the way back, elementwise."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["done"] % 5 == 0:
                    p.data.copy_(slow.lerp_(p.data, 0.5))


class SlowWeights(torch.optim.SGD):
    """Every second update goes half the way back to weights that it keeps in a list."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p, slow in zip((p for group in self.param_groups for p in group["params"]), self.kept, strict=True):
            p.data.copy_(slow.lerp_(p.data, 0.5))


class Anchored(torch.optim.SGD):
    """Draws each parameter to its initial value, kept in a dict."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.kept = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for p, first in self.kept.items():
            p.data.lerp_(first, 0.1)


class LateAverage(torch.optim.SGD):
    """Keeps an average of each parameter from the third update on, and is drawn to it from the fifth on."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 3 else ():
                average = self.state[p].setdefault("average", p.detach().clone())
                p.data.lerp_(average.lerp_(p.data, 0.1), 0.5 if group["done"] > 5 else 0.0)


class LateFunction(torch.optim.SGD):
    """After the third update it keeps an object that needs pickle."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            for p in group["params"] if group["done"] > 3 else ():
                self.state[p]["shape"] = lambda step: step


class Counting(torch.optim.SGD):
    """Keeps a counter for no parameter; its steps shrink with it."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = count = self.state.get("count", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / count
        return super().step(closure)


class OwnCount(Counting):
    """Keeps that counter in an attribute of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.state["count"], self.count = self.count, self.count + 1
        done = super().step(closure)
        del self.state["count"]
        return done


def cosine(optimizer: Any) -> Any:
    """Cosine schedule as commonly written: NumPy's cosine returns NumPy scalars."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 40)))


class Drawn(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler with a function in its state."""

    def __init__(self, optimizer: Any) -> None:
        self.shape = lambda step: 1 / (1 + step)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * self.shape(self.last_epoch) for base in self.base_lrs]


class StatelessScheduler:
    """A scheduler without state_dict."""

    def __init__(self, optimizer: Any) -> None:
        self._groups = optimizer.param_groups

    def step(self) -> None:
        for group in self._groups:
            group["lr"] *= 0.9


def warmup(optimizer: Any) -> Any:
    """Warm-up over ten steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))


def by_marks(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One group for parameters with the attribute, and one for the others."""
    marked = [p for p in parameters if hasattr(p, "rate")]
    others = [p for p in parameters if not hasattr(p, "rate")]
    return torch.optim.SGD([{"params": marked, "lr": 0.5}, {"params": others, "lr": 0.05}], momentum=0.5)


def by_names(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The first block has a higher learning rate than the rest."""
    first = [p for name, p in named_parameters if name.startswith("blocks.0.")]
    others = [p for name, p in named_parameters if not name.startswith("blocks.0.")]
    return torch.optim.SGD([{"params": first, "lr": 0.5}, {"params": others, "lr": 0.05}], momentum=0.5)


def backbone_and_head(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups, of which those are left out that would be empty on a stage of a pipeline."""
    head = [p for name, p in named_parameters if name.startswith("head.")]
    others = [p for name, p in named_parameters if not name.startswith("head.")]
    groups = [{"params": others, "lr": 0.05}, {"params": head, "lr": 0.5}]
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.5)


def warmup_then_cosine(optimizer: Any) -> Any:
    """Schedulers within a scheduler, as many as there are groups."""
    of = torch.optim.lr_scheduler
    parts = [of.LinearLR(optimizer, 0.1, total_iters=4), of.CosineAnnealingLR(optimizer, 300)]
    return of.SequentialLR(optimizer, parts, [4])


def plateau(optimizer: Any) -> Any:
    """Driven by the evaluation's metric."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)


class ByEpochs:
    """A scheduler of timm's kind: no torch scheduler, told of updates and of epochs, of which it uses one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.base_values = optimizer, [group["lr"] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def step(self, epoch: int, metric: float | None = None) -> None:
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = base / (1 + epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """Nothing: it counts epochs."""


class ByNumber(ByEpochs):
    """The same, told of the number of the step only."""

    step_update: Any = None


def sgd_with_the_scripts_schedule(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """In a job that was submitted with ``--schedule script``."""
    os.environ["CLUSTERD_SCHEDULE"] = "script"
    return torch.optim.SGD(parameters, lr=0.1)


def of_the_head(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Only the head is trained."""
    return torch.optim.SGD([p for name, p in named_parameters if name.startswith("head.")], lr=0.1)


def rows_by_names(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """The blocks' matrices as a whole, all else elementwise."""
    rows = [p for name, p in named_parameters if name.startswith("blocks.") and p.dim() == 2]
    others = [p for name, p in named_parameters if not (name.startswith("blocks.") and p.dim() == 2)]
    return SomeRows([{"params": rows, "rows": True}, {"params": others, "rows": False}], lr=0.1)


def rows_by_marks(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The same for parameters with the attribute."""
    rows = [p for p in parameters if hasattr(p, "rate")]
    others = [p for p in parameters if not hasattr(p, "rate")]
    return SomeRows([{"params": rows, "rows": True}, {"params": others, "rows": False}], lr=0.1)


OPTIMIZERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "lbfgs": torch.optim.LBFGS,
    "with the loss": lambda p: torch.optim.AdamW([*p, nn.Parameter(torch.ones(3))]),
    "common scale": lambda p: CommonScale(p, lr=0.01),
    "by marks": by_marks,
    "sgd, schedule of the script": sgd_with_the_scripts_schedule,
    "by names": adapt_optimizer_factory(by_names),
    "backbone and head": adapt_optimizer_factory(backbone_and_head),
    "of the head": adapt_optimizer_factory(of_the_head),
    "rows by names": adapt_optimizer_factory(rows_by_names),
    "rows by marks": rows_by_marks,
    "rows and others": InParts,
    "clipping": lambda p: Clipping(p, lr=0.1),
    "large factored": lambda p: LargeFactored(p, lr=0.1),
    "late ratio": lambda p: LateRatio(p, lr=0.1),
    "slow weights": lambda p: SlowWeights(p, lr=0.1),
    "anchored": lambda p: Anchored(p, lr=0.1),
    "late average": lambda p: LateAverage(p, lr=0.1, momentum=0.9),
    "late function": lambda p: LateFunction(p, lr=0.1),
    "lookahead": lambda p: Lookahead(p, lr=0.1),
    "own count": lambda p: OwnCount(p, lr=0.1),
    "counting": lambda p: Counting(p, lr=0.1),
}


def onecycle(optimizer: Any) -> Any:
    """Momentum, or the first beta, is cycled too."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=12)


SCHEDULERS = {
    "cosine": cosine, "onecycle": onecycle, "plateau": plateau, "by epochs": ByEpochs, "by number": ByNumber,
    "sequential": warmup_then_cosine, "by hand": StatelessScheduler, "drawn": Drawn, "warmup": warmup,
}  # fmt: skip
