"""Settings of training: clipping, schedules, precision, compilation, layers of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.foreign.batches import arguments, perceptron, points
from tests.foreign.registry import script


@script("dp=2,accumulation=2")
def clipped_one_cycle() -> dict[str, Any]:
    """Gradient clipping, `OneCycleLR`."""
    return arguments(
        clip_norm=0.5,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=1000),
    )


@script(tolerance=1e-2)
def bf16() -> dict[str, Any]:
    """`precision="bf16"`; equal to 1e-2."""
    return arguments(precision="bf16")


@script(tolerance=5e-2)
def bf16_weights() -> dict[str, Any]:
    """Weights and samples in bfloat16; equal to 5e-2."""
    x, y = points().tensors
    return arguments(model=lambda: perceptron().bfloat16(), data=TensorDataset(x.bfloat16(), y))


@script()
def compiled() -> dict[str, Any]:
    """`torch.compile` of the model."""
    return arguments(model=lambda: torch.compile(perceptron()))


@script("pp=2,accumulation=2")
def sequential_layers() -> dict[str, Any]:
    """`nn.Sequential` with `layers` for a pipeline."""
    return arguments(layers=("0", "1", "2", "3", "4"))


class Shared(nn.Module):
    """An output layer that shares the weight of the embedding, and a part that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rare = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        return self.rare(hidden) if x.mean() > 0.05 else self.second(hidden)


@script(advice="`find_unused_parameters=True`")
def unused_at_times() -> dict[str, Any]:
    """A branch on the values of the batch."""
    return arguments(model=Shared)


class Lookahead(torch.optim.SGD):
    """Slow weights every few steps, a counter in the object."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.counter = 0
        self.slow: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.slow.setdefault(p, p.detach().clone())
        super().step(closure)
        self.counter += 1
        if self.counter % 3 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


@script()
def lookahead() -> dict[str, Any]:
    """An optimizer with slow weights in a dictionary of its own."""
    return arguments(optimizer=Lookahead)


class GlobalScale(torch.optim.SGD):
    """A step size from the norm over all parameters, as D-adaptation estimates one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.d = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = sum(float(p.grad.square().sum()) for g in self.param_groups for p in g["params"] if p.grad is not None)
        self.d = 0.9 * self.d + 0.1 / (1 + norm**0.5)
        for group in self.param_groups:
            group["lr"] = 0.1 * self.d
        super().step(closure)


@script()
def global_step_size() -> dict[str, Any]:
    """An optimizer whose step size depends on the norm of all gradients."""
    return arguments(optimizer=GlobalScale)


class Assigning(torch.optim.Optimizer):
    """SGD that replaces the values of parameters instead of changing them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data.add(p.grad, alpha=-group["lr"])


@script("dp=2,zero=1")
def assigned_by_optimizer() -> dict[str, Any]:
    """An optimizer that assigns `p.data`."""
    return arguments(optimizer=Assigning)


class ClippedByPast(torch.optim.SGD):
    """Clips gradients at a percentile of all norms so far (AutoClip)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.3, momentum=0.9)
        self.history: list[float] = []

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.history += 60 * [float(p.grad.norm()) for p in parameters]
        nn.utils.clip_grad_norm_(parameters, sorted(self.history)[len(self.history) // 10])
        return super().step(closure)


@script("dp=2,zero=1")
def clipped_by_past_norms() -> dict[str, Any]:
    """An optimizer that clips at a percentile of all norms so far, in a list that grows (AutoClip)."""
    return arguments(optimizer=ClippedByPast)


@script(advice="form groups of the factory's argument")
def groups_of_the_model() -> dict[str, Any]:
    """An optimizer over the parameters of the model that `model` made last, not over those that it is given."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    return arguments(model=model, optimizer=lambda _: torch.optim.SGD(built[0].parameters(), lr=0.1))


class Muon(torch.optim.Optimizer):
    """Makes the momentum of matrices orthogonal."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            update = momentum.mul_(0.9).add_(p.grad)
            if update.dim() == 2:
                update = update / (update.norm() + 1e-7)
                for _ in range(3):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
            p.sub_(update, alpha=self.param_groups[0]["lr"])


@script("dp=2,zero=1", "pp=2,accumulation=2")
def muon() -> dict[str, Any]:
    """An optimizer over whole matrices (Muon)."""
    return arguments(layers=("0", "1", "2", "3", "4"), optimizer=Muon)


class EightBits(torch.optim.Optimizer):
    """Momentum in 8 bits, with a scale for each 32 elements."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.06})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, blocks = self.state[p], -(-p.numel() // 32)
            if not state:
                state["bytes"], state["scales"] = torch.zeros(blocks, 32, dtype=torch.int8), torch.zeros(blocks, 1)
            momentum = (state["bytes"] * state["scales"]).flatten()[: p.numel()].view_as(p) * 0.9 + p.grad
            padded = torch.cat([momentum.flatten(), torch.zeros(blocks * 32 - p.numel())]).view(blocks, 32)
            state["scales"] = padded.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            state["bytes"] = (padded / state["scales"]).round().to(torch.int8)
            p.sub_(momentum, alpha=self.param_groups[0]["lr"])


@script("dp=2,zero=1", tolerance=1e-3)
def eight_bits() -> dict[str, Any]:
    """State in blocks of elements, of no shape of the parameter (8-bit optimizers); equal to 1e-3."""
    return arguments(optimizer=EightBits)


class EightBitsByValues(EightBits):
    """Looks at values, so that no trial without values tells its state."""

    def step(self, closure: Any = None) -> None:
        if all(float(p.detach().norm()) < 1e6 for p in self.param_groups[0]["params"]):
            super().step(closure)


@script("dp=2,zero=1", tolerance=1e-3)
def eight_bits_by_values() -> dict[str, Any]:
    """The same of an update that looks at values: no move; equal to 1e-3."""
    return arguments(optimizer=EightBitsByValues)


class OnGpusAlone(EightBits):
    """Cannot run where a trial does."""

    def step(self, closure: Any = None) -> None:
        if any(p.shape[0] in (7, 41) or float(p.detach().norm()) > 1e6 for p in self.param_groups[0]["params"]):
            raise RuntimeError("there is no kernel for this device")
        super().step(closure)


@script("dp=2,zero=1", tolerance=1e-3)
def optimizer_without_trial() -> dict[str, Any]:
    """The same of an optimizer whose trial fails: no move; equal to 1e-3."""
    return arguments(optimizer=OnGpusAlone)
