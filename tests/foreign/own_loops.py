"""Loops of the script's own, which change something between steps: rates, weights, batches, attributes, data."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import Dataset, WeightedRandomSampler, default_collate

from tests.foreign.batches import SAMPLES, Graded, arguments, perceptron, points
from tests.foreign.registry import script


class Annealed(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.0

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + self.beta * out.square().mean()


@script()
def annealed_by_loop() -> dict[str, Any]:
    """A weight of the loss that the loop sets by the step (KL annealing)."""
    loss = Annealed()

    def loop(run: Any) -> None:
        for step, batch in run:
            loss.beta = min(1.0, step / 50)
            run.step(batch)

    return arguments(loss=loss, loop=loop)


@script("dp=2,zero=1")
def rate_by_loop() -> dict[str, Any]:
    """Learning rates that the loop sets by the step."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made[:] = [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]
        return made[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            for group in made[0].param_groups:
                group["lr"] = 0.1 / (1 + step / 5)
            run.step(batch)

    return arguments(optimizer=optimizer, loop=loop)


class Seen:
    """Number of samples so far."""

    samples = 0

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


@script(advice="count by `global_batch`")
def rate_by_tokens() -> dict[str, Any]:
    """A loop whose rate falls by the samples, or tokens, that it counts in its batches."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made[:] = [torch.optim.SGD(parameters, lr=0.1)]
        return made[0]

    def loop(run: Any) -> None:
        seen = Seen()
        run.register("seen", seen)
        for _, (x, y) in run:
            made[0].param_groups[0]["lr"] = 0.1 / (1 + seen.samples / 20)
            run.step((x, y))
            seen.samples += len(x)

    return arguments(optimizer=optimizer, loop=loop)


@script("dp=1,offload=optimizer")
def clamped_by_loop() -> dict[str, Any]:
    """Weights that the loop clamps after each step (WGAN)."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            with torch.no_grad():
                for p in built[0].parameters():
                    p.clamp_(-0.2, 0.2)

    return arguments(model=model, loop=loop)


@script("dp=2,zero=1")
def assigned_by_loop() -> dict[str, Any]:
    """Weights that the loop replaces after each step by `.data`."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            for p in built[0].parameters():
                p.data = p.data.clamp(-0.2, 0.2)

    return arguments(model=model, loop=loop)


@script(advice="mix in `collate_fn` or in the model, where it is compared")
def mixup_by_loop() -> dict[str, Any]:
    """A loop that mixes samples of its batch."""

    def loop(run: Any) -> None:
        for _, (x, y) in run:
            run.step((0.7 * x + 0.3 * x.flip(0), y))

    return arguments(loop=loop)


@script()
def scaled_by_loop() -> dict[str, Any]:
    """A loop that scales its batch by a constant."""

    def loop(run: Any) -> None:
        for _, (x, y) in run:
            run.step((2 * x, y))

    return arguments(loop=loop)


@script(advice="compute it in the loss")
def weight_by_batch() -> dict[str, Any]:
    """A weight of the loss that the loop computes from its batch."""
    loss = Annealed()

    def loop(run: Any) -> None:
        for _, batch in run:
            loss.beta = float(batch[0].abs().mean())
            run.step(batch)

    return arguments(loss=loss, loop=loop)


@script()
def weight_drawn_by_loop() -> dict[str, Any]:
    """A weight of the loss that the loop draws."""
    loss = Annealed()

    def loop(run: Any) -> None:
        for _, batch in run:
            loss.beta = random.random()
            run.step(batch)

    return arguments(loss=loss, loop=loop)


@script()
def curriculum_by_loop() -> dict[str, Any]:
    """A loop that makes the samples harder."""
    data = Graded()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            data.difficulty = step / 10

    return arguments(data=data, loop=loop)


@script(advice="`run.register`")
def rate_in_a_variable() -> dict[str, Any]:
    """A loop whose rate falls from step to step, by a local variable."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made[:] = [torch.optim.SGD(parameters, lr=0.1, momentum=0.9)]
        return made[0]

    def loop(run: Any) -> None:
        rate = 0.1
        for _, batch in run:
            run.step(batch)
            rate *= 0.9
            for group in made[0].param_groups:
                group["lr"] = rate

    return arguments(optimizer=optimizer, loop=loop)


@script(advice="dp")
def group_added_by_loop() -> dict[str, Any]:
    """A parameter group that the loop adds at the second step."""
    made: list[torch.optim.Optimizer] = []
    rest: list[nn.Parameter] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        made[:] = [torch.optim.SGD(every[4:], lr=0.1, momentum=0.9)]
        rest[:] = every[:4]
        return made[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            if step == 2:
                made[0].add_param_group({"params": rest, "lr": 0.05})
            run.step(batch)

    return arguments(optimizer=optimizer, loop=loop)


@script("dp=2,zero=1")
def frozen_by_loop() -> dict[str, Any]:
    """A layer that the loop freezes after the second step."""
    built: list[Any] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            if step == 3:
                built[0][0].requires_grad_(False)
            run.step(batch)

    return arguments(model=model, loop=loop)


@script("dp=2,zero=1", "tp=2")
def thawed_by_loop() -> dict[str, Any]:
    """A loop that thaws one layer after another, by the groups of its optimizer (gradual unfreezing)."""
    made: list[torch.optim.Optimizer] = []

    def optimizer(named_parameters: Any) -> torch.optim.Optimizer:
        layers: dict[str, list[Any]] = {}
        for name, p in named_parameters:
            layers.setdefault(name.rpartition(".")[0], []).append(p)
        made[:] = [torch.optim.AdamW([{"params": layer} for layer in layers.values()], lr=0.02)]
        return made[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            for number, group in enumerate(reversed(made[0].param_groups)):
                for p in group["params"]:
                    p.requires_grad_(step > 5 * number)
            run.step(batch)

    return arguments(optimizer=optimizer, tp_plan={"0": "colwise", "2": "rowwise"}, loop=loop)


@script("dp=2,tp=2")
def probed_by_loop() -> dict[str, Any]:
    """A loop with backward passes of its own between steps (Fisher information, gradient noise)."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loop(run: Any) -> None:
        x, y = points()[:4]
        for _, batch in run:
            run.step(batch)
            built[0].zero_grad()
            F.cross_entropy(built[0](x), y).backward()

    return arguments(model=model, tp_plan={"0": "colwise", "2": "rowwise"}, loop=loop)


@script()
def swapped_activation() -> dict[str, Any]:
    """A loop that replaces an activation of the model at the third step."""
    built: list[Any] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            if step == 3:
                built[0][1] = nn.ReLU()
            run.step(batch)

    return arguments(model=model, loop=loop)


@script(advice="ZeRO up to stage 1")
def average_by_loop() -> dict[str, Any]:
    """A moving average of the weights that the loop keeps, registered, which the loss uses as a teacher."""
    built: list[Any] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loop(run: Any) -> None:
        ema = torch.optim.swa_utils.AveragedModel(
            built[0], multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        run.register("ema", ema)
        for step, batch in run:
            run.step(batch)
            ema.update_parameters(built[0])
            if step % 4 == 0:
                with torch.no_grad():
                    for p, q in zip(built[0].parameters(), ema.module.parameters(), strict=True):
                        p.lerp_(q, 0.5)

    return arguments(model=model, loop=loop)


@script(advice="the same on all ranks")
def weight_of_rank_zero() -> dict[str, Any]:
    """A weight of the loss that rank 0 alone sets."""
    loss = Annealed()

    def loop(run: Any) -> None:
        for step, batch in run:
            if run.is_main:
                loss.beta = step / 10
            run.step(batch)

    return arguments(loss=loss, loop=loop)


@script()
def late_batch_by_loop() -> dict[str, Any]:
    """A loss that compares samples once the loop says so."""
    loss = Annealed()

    def mined(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(out, y, reduction="none")
        return each.mean() if loss.beta < 1 else each.topk(max(1, len(each) // 2)).values.mean()

    def loop(run: Any) -> None:
        for step, batch in run:
            loss.beta = float(step >= 5)
            run.step(batch)

    return arguments(loss=mined, loop=loop)


beta = 0.0


@script()
def weight_in_a_global() -> dict[str, Any]:
    """A weight of the loss in a global variable, and another in a map, that the loop sets by the step."""
    weights = {"l2": 0.0}

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + beta * out.square().mean() + weights["l2"] * out.abs().mean()

    def loop(run: Any) -> None:
        global beta
        for step, batch in run:
            beta, weights["l2"] = min(1.0, step / 50), 0.1 * (step // 3)
            run.step(batch)

    return arguments(loss=loss, loop=loop)


class Replay(Dataset[Any]):
    """Rewards of states, in a tensor of half precision."""

    def __init__(self) -> None:
        self.points, self.rewards = points(), torch.zeros(SAMPLES, dtype=torch.bfloat16)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        return self.points[index][0], self.rewards[index].float()


@script()
def replay_filled_by_loop() -> dict[str, Any]:
    """A replay data set, in whose tensor the loop writes rewards (DQN)."""
    data = Replay()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            data.rewards[step % SAMPLES] += 1.0

    return arguments(data=data, loss=lambda out, rewards: F.mse_loss(out.mean(1), rewards), loop=loop)


class Mined(Dataset[Any]):
    """Samples whose weights the script keeps beside them, in an array, a list or a map, and their times."""

    def __init__(self, weights: Any) -> None:
        self.points, self.weights = points(), weights
        self.times = np.arange(1 << 16).astype("datetime64[s]")

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        x, y = self.points[index]
        return x * float(self.weights[index]), y


def mined(weights: Any) -> dict[str, Any]:
    """Arguments of a script whose loop raises the weights of some samples, by the object that it made."""

    def loop(run: Any) -> None:
        for step, batch in run:
            weights[step % SAMPLES] += run.step(batch).loss
            weights[(step * 7) % SAMPLES] += 0.5

    return arguments(data=Mined(weights), loop=loop)


class Rollouts(Dataset[Any]):
    """Samples that a loop rolls out anew from time to time."""

    def __init__(self) -> None:
        self.inputs, self.targets = points().tensors

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class Environment:
    """A state that goes on from one rollout to the next."""

    def __init__(self) -> None:
        self.at = 0.0

    def roll_out(self, samples: Rollouts) -> None:
        self.at += 0.25
        samples.inputs.copy_(points().tensors[0] * self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@script()
def rolled_out_before_the_loop() -> dict[str, Any]:
    """A loop that rolls samples out, once before its first step, and again after each sixth (PPO)."""
    data = Rollouts()

    def loop(run: Any) -> None:
        environment = Environment()
        run.register("environment", environment)
        environment.roll_out(data)
        for step, batch in run:
            run.step(batch)
            if step % 6 == 0:
                environment.roll_out(data)

    return arguments(data=data, loop=loop)


@script()
def weights_in_an_array() -> dict[str, Any]:
    """Weights of samples in an array of NumPy, which the loop changes (hard examples)."""
    return mined(np.ones(SAMPLES))


@script()
def weights_in_a_list() -> dict[str, Any]:
    """Weights of samples in a list, which the loop changes."""
    return mined([1.0] * SAMPLES)


@script()
def weights_in_a_map() -> dict[str, Any]:
    """Weights of samples in a map, which the loop changes."""
    return mined(dict.fromkeys(range(SAMPLES), 1.0))


@script()
def replay_of_megabytes() -> dict[str, Any]:
    """A replay buffer of some megabytes, in which the loop writes."""
    weights = np.ones((SAMPLES, 1 << 13), dtype=np.float32)

    def loop(run: Any) -> None:
        for step, batch in run:
            weights[step % SAMPLES] += run.step(batch).loss

    class Large(Mined):
        def __getitem__(self, index: int) -> Any:
            x, y = self.points[index]
            return x * float(self.weights[index].mean()), y

    return arguments(data=Large(weights), loop=loop)


@script()
def weight_in_a_shared_map() -> dict[str, Any]:
    """A map that the loss holds and the loop changes, by the object that it made."""
    settings = {"weight": 1.0}

    class Weighted:
        def __init__(self, settings: dict[str, float]) -> None:
            self.settings = settings

        def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(out, y) * self.settings["weight"]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            settings["weight"] *= 0.97

    return arguments(loss=Weighted(settings), loop=loop)


class Masking:
    """A `collate_fn` that hides entries of samples by a share."""

    def __init__(self) -> None:
        self.share = 0.0

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return x * (torch.linspace(0, 1, x.shape[1]) >= self.share), y


@script()
def masked_more_by_loop() -> dict[str, Any]:
    """A `collate_fn` that hides more from step to step, by an attribute that the loop sets."""
    collate = Masking()

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            collate.share += 0.03

    return arguments(collate_fn=collate, loop=loop)


@script()
def reweighted_by_loop() -> dict[str, Any]:
    """A `WeightedRandomSampler` whose weights the loop changes from step to step."""
    sampler = WeightedRandomSampler([1.0] * SAMPLES, 16)

    def loop(run: Any) -> None:
        for step, batch in run:
            sampler.weights[step % SAMPLES] += 5 * run.step(batch).loss

    return arguments(sampler=sampler, loop=loop)


@script()
def skips_batches() -> dict[str, Any]:
    """A loop that leaves out batches by their values."""

    def loop(run: Any) -> None:
        for _, (x, y) in run:
            if float(x.mean()) > 0:
                run.step((x, y))

    return arguments(loop=loop)


@script("dp=2,zero=1")
def evaluated_by_an_average() -> dict[str, Any]:
    """A loop that evaluates with an average of the weights, and trains on with the weights themselves."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [perceptron()]
        return made[0]

    def loop(run: Any) -> None:
        average = [p.detach().clone() for p in made[0].parameters()]
        for step, batch in run:
            run.step(batch)
            with torch.no_grad():
                for a, p in zip(average, made[0].parameters(), strict=True):
                    a.lerp_(p.detach(), 0.2)
                if step % 2 == 0:
                    own = [p.detach().clone() for p in made[0].parameters()]
                    for a, p in zip(average, made[0].parameters(), strict=True):
                        p.copy_(a)
                    run.log(val=run.evaluate(points()))
                    for o, p in zip(own, made[0].parameters(), strict=True):
                        p.copy_(o)

    return arguments(model=model, loop=loop)


class Averaging:
    """Keeps an average of the weights, with which it goes on from step 8."""

    def __init__(self) -> None:
        self.average: nn.Module | None = None

    def fit(self, run: Any, model: nn.Module) -> None:
        for step, batch in run:
            run.step(batch)
            if self.average is None:
                self.average = copy.deepcopy(model)
            with torch.no_grad():
                for a, p in zip(self.average.parameters(), model.parameters(), strict=True):
                    a.lerp_(p, 0.3)
                    if step == 8:
                        p.copy_(a)


@script("dp=2,zero=1")
def average_in_an_object() -> dict[str, Any]:
    """An average of the weights that an object of the loop keeps, not registered."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [perceptron()]
        return made[0]

    return arguments(model=model, loop=lambda run: Averaging().fit(run, made[0]))


@script("dp=2,zero=1")
def average_in_a_variable() -> dict[str, Any]:
    """The same by torch's `AveragedModel`, in a variable."""
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made[:] = [perceptron()]
        return made[0]

    def loop(run: Any) -> None:
        average = None
        for step, batch in run:
            run.step(batch)
            average = average or torch.optim.swa_utils.AveragedModel(made[0])
            average.update_parameters(made[0])
            if step == 8:
                made[0].load_state_dict(average.module.state_dict())

    return arguments(model=model, loop=loop)


class ScheduleFree(torch.optim.SGD):
    """Weights that are trained lie between an average, for evaluation, and a fast iterate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.2)

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["z"], state["x"] = p.clone(), p.clone()
                    if p.grad is not None:
                        state["z"].sub_(p.grad, alpha=group["lr"])
                        state["x"].lerp_(state["z"], 0.1)
                        p.copy_(torch.lerp(state["z"], state["x"], 0.9))

    def eval(self) -> None:
        self._set(1.0)

    def train(self) -> None:
        self._set(0.9)

    def _set(self, weight: float) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if state := self.state[p]:
                        p.copy_(torch.lerp(state["z"], state["x"], weight))


@script("dp=2,zero=1", "dp=1,offload=optimizer")
def schedule_free() -> dict[str, Any]:
    """An optimizer without schedule, which the loop tells when to evaluate."""
    made: list[Any] = []

    def optimizer(parameters: Any) -> Any:
        made[:] = [ScheduleFree(parameters)]
        return made[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            if step % 2 == 0:
                made[0].eval()
                run.log(val=run.evaluate(points()))
                made[0].train()

    return arguments(optimizer=optimizer, loop=loop)


class Made:
    """Model and optimizer that the factories of a script have made, which its loop uses."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def factories(self, **options: Any) -> dict[str, Any]:
        """Factories that keep what they make."""

        def model() -> nn.Module:
            self.model = perceptron()
            return self.model

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            return self.optimizer

        return arguments(model=model, optimizer=optimizer, **options)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate


@script(advice="`session.register`, or `scheduler`")
def schedule_in_a_variable() -> dict[str, Any]:
    """A cosine schedule that the loop makes and steps."""
    made = Made()

    def loop(run: Any) -> None:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made.optimizer, 20)
        for _, batch in run:
            run.step(batch)
            schedule.step()

    return made.factories(loop=loop)


@script()
def schedule_registered() -> dict[str, Any]:
    """A warm-up that the loop makes, registers and steps."""
    made = Made()

    def loop(run: Any) -> None:
        schedule = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda step: min(1.0, (step + 1) / 10))
        run.register("schedule", schedule)
        for _, batch in run:
            run.step(batch)
            schedule.step()

    return made.factories(loop=loop)


class Trainer:
    """A trainer that lowers its rate every second step."""

    def __init__(self, made: Made) -> None:
        self.made, self.rate, self.waited = made, 0.1, 0

    def fit(self, run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            self.waited += 1
            if self.waited % 2 == 0:
                self.rate *= 0.7
                self.made.set_rate(self.rate)


@script(advice="`session.register`")
def trainer_with_attributes() -> dict[str, Any]:
    """A trainer object whose attributes set the rate."""
    made = Made()
    return made.factories(loop=Trainer(made).fit)


@script(advice="a buffer of the model")
def rewound_by_loop() -> dict[str, Any]:
    """Weights that the loop keeps before its first step and goes back to (lottery tickets, a reference model)."""
    made = Made()

    def loop(run: Any) -> None:
        initial = {name: value.clone() for name, value in made.model.state_dict().items()}
        for step, batch in run:
            run.step(batch)
            if step == 8:
                made.model.load_state_dict(initial)

    return made.factories(loop=loop)


SEEN = {"steps": 0}


@script(advice="`session.register`")
def counted_in_a_global_of_the_loop() -> dict[str, Any]:
    """A counter in a global variable that the loop alone reads, and by which it sets the rate."""
    made = Made()

    def loop(run: Any) -> None:
        for _, batch in run:
            SEEN["steps"] += 1
            made.set_rate(0.1 / SEEN["steps"])
            run.step(batch)

    return made.factories(loop=loop)


@script()
def set_before_the_loop() -> dict[str, Any]:
    """Weights, a rate and a number of the loss that are set before the loop, and change in it."""
    made, loss = Made(), Annealed()

    def loop(run: Any) -> None:
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
        made.set_rate(0.2)
        loss.beta = 0.1
        for _, batch in run:
            run.step(batch)
            loss.beta += 0.01
            made.set_rate(0.9 * made.optimizer.param_groups[0]["lr"])

    return made.factories(loss=loss, loop=loop)


@script()
def harder_before_each_step() -> dict[str, Any]:
    """A loop that makes the samples harder between a batch and its step."""
    data = Graded()

    def loop(run: Any) -> None:
        for _, batch in run:
            data.difficulty += 0.05
            run.step(batch)

    return arguments(data=data, loop=loop)


@script(advice="all layers in `model`")
def grown_by_loop() -> dict[str, Any]:
    """A layer that the loop adds at the third step (progressive growing)."""
    made = Made()

    def loop(run: Any) -> None:
        for step, batch in run:
            if step == 3:
                made.model.append(nn.Linear(4, 4))
                made.optimizer.add_param_group({"params": made.model[-1].parameters()})
            run.step(batch)

    return made.factories(loop=loop)


@script(advice="prune in `model`")
def pruned_by_loop() -> dict[str, Any]:
    """A loop that prunes a layer at the third step, which adds a mask to the model."""
    made = Made()

    def loop(run: Any) -> None:
        for step, batch in run:
            if step == 3:
                prune.l1_unstructured(made.model[2], "weight", 0.5)
            run.step(batch)

    return made.factories(loop=loop)


def norm_of(model: nn.Module) -> float:
    return float(sum(p.detach().square().sum() for p in model.parameters())) ** 0.5


@script(advice="on all ranks, with `run.is_main` around the writing alone")
def norm_on_main() -> dict[str, Any]:
    """A loop that logs the norm of the weights every third step, on rank 0."""
    made = Made()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            if step % 3 == 0 and run.is_main:
                run.log(norm=norm_of(made.model))

    return made.factories(loop=loop)


@script()
def norm_on_all() -> dict[str, Any]:
    """The same on all ranks."""
    made = Made()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            if step % 3 == 0:
                run.log(norm=norm_of(made.model))

    return made.factories(loop=loop)


@script(advice="a loop of the script's own")
def norm_by_callback() -> dict[str, Any]:
    """`on_step` logs the norm of the weights."""
    made = Made()
    return made.factories(on_step=lambda step, entry: print(f"norm {norm_of(made.model):.4f}") if step % 3 == 0 else 0)
