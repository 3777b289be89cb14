"""Trainers of 2026: progress bars, epochs, second loaders, state that passes leave for others, several optimizers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from clusterd import train
from clusterd.train import Evaluation
from tests.foreign.batches import SAMPLES, Graded, Stream, arguments, perceptron, points
from tests.foreign.cut_models import cut
from tests.foreign.own_loops import Made
from tests.foreign.registry import script


def progress(batches: Iterable[Any]) -> Iterator[Any]:
    """Batches, counted and passed on as a progress bar does."""
    for done, item in enumerate(batches, start=1):
        if done % 1000 == 0:
            print(f"{done} steps", flush=True)
        yield item


@script(advice="`run.register`")
def rate_behind_progress_bar() -> dict[str, Any]:
    """A loop through a progress bar, whose rate falls in a local variable."""
    made = Made()

    def loop(run: Any) -> None:
        rate, best = 0.1, math.inf
        for _, batch in progress(run):
            best = min(best, run.step(batch).loss)
            rate *= 0.9
            made.set_rate(rate)

    return made.factories(loop=loop)


def epoch_of(run: Any, batches: Iterator[Any], length: int) -> bool:
    """Train for an epoch; False: there are no more batches."""
    for _ in range(length):
        found = next(batches, None)
        if found is None:
            return False
        run.step(found[1])
    return True


@script(advice="`run.register`")
def rate_by_epoch() -> dict[str, Any]:
    """A function for each epoch, which takes batches by `next`, and a rate in a variable of its caller."""
    made = Made()

    def loop(run: Any) -> None:
        batches, rate = iter(run), 0.1
        while epoch_of(run, batches, 3):
            rate *= 0.8
            made.set_rate(rate)

    return made.factories(loop=loop)


class Consistent(nn.Module):
    """Labelled samples, and unlabelled ones in two views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, batch: Any) -> Any:
        return [self.layers(part) for part in batch] if isinstance(batch, tuple) else [self.layers(batch)] * 3


def consistency(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    labelled, weak, strong = outputs
    sure, guess = weak.detach().softmax(-1).max(-1)
    return F.cross_entropy(labelled, labels) + (F.cross_entropy(strong, guess, reduction="none") * (sure > 0.2)).mean()


@script()
def second_loader_by_loop() -> dict[str, Any]:
    """A second loader, of unlabelled samples, that the loop zips with the run (FixMatch)."""
    unlabelled = TensorDataset(torch.randn(128, 8, generator=torch.Generator().manual_seed(11)))

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from (x for (x,) in DataLoader(unlabelled, batch_size=16, shuffle=True))

    def loop(run: Any) -> None:
        more = endless()
        for (_, (x, y)), u in zip(run, more, strict=False):
            run.step(((x, u, u + 0.1), y))

    return arguments(model=Consistent, loss=consistency, loop=loop)


class Experts(nn.Module):
    """Experts that a biased router chooses, which counts their load."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Linear(8, 16), nn.Linear(16, 4, bias=False), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x).tanh()
        scores = self.gate(h).sigmoid()
        chosen = torch.zeros_like(scores).scatter(-1, (scores + self.bias).topk(2, -1).indices, 1.0)
        if self.training:
            with torch.no_grad():
                self.load += chosen.sum(0)
        weights = chosen * scores / (chosen * scores).sum(-1, keepdim=True)
        return self.head(h + sum(weights[:, i, None] * expert(h) for i, expert in enumerate(self.experts)))


@script(advice="count the load of gathered scores")
def balanced_by_bias() -> dict[str, Any]:
    """A router without a loss of its own, whose bias the loop moves by the load that passes count (DeepSeek)."""
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [Experts()]
        return made[0]

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            router = made[0]
            with torch.no_grad():
                router.bias += 0.05 * torch.sign(router.load.mean() - router.load)
                router.load.zero_()

    return arguments(model=model, loop=loop)


class FakeQuantize(nn.Module):
    """Observes a range, and rounds to it once it is told to, as that of `torch.ao`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rounds", torch.zeros(1, dtype=torch.uint8))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.high.lerp_(x.abs().amax(), 0.1)
        if not self.rounds[0]:
            return x
        step = self.high.clamp(min=1e-6) / 7
        return x + ((x / step).round().clamp(-8, 7) * step - x).detach()


@script(advice="observe gathered samples")
def rounded_later() -> dict[str, Any]:
    """Quantisation-aware training: ranges are observed from the start, and used from step 5 on."""
    made: list[Any] = []

    def model() -> nn.Module:
        made[:] = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), FakeQuantize(), nn.Linear(16, 4))]
        return made[0]

    def loop(run: Any) -> None:
        for step, batch in run:
            if step == 5:
                made[0][2].rounds.fill_(1)
            run.step(batch)

    return arguments(model=model, loop=loop)


def leave_gradients_of_samples(model: nn.Module) -> nn.Module:
    """Have linear layers leave the gradient of each sample on their parameters, as Opacus does."""

    def before(layer: Any, inputs: Any, _: Any) -> None:
        layer.seen = inputs[0].detach()

    def after(layer: Any, _: Any, gradients: Any) -> None:
        each = gradients[0].detach() * len(gradients[0])
        layer.weight.of_samples, layer.bias.of_samples = torch.einsum("bi,bj->bij", each, layer.seen), each

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(before)
            layer.register_full_backward_hook(after)
    return model


class PrivateSGD(torch.optim.SGD):
    """Clips the gradient of each sample, and adds noise to their mean (DP-SGD)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if hasattr(p, "of_samples")]
        if parameters:
            norms = torch.stack([p.of_samples.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
            scale = (0.1 / (norms + 1e-6)).clamp(max=1.0)
            for p in parameters:
                p.grad = torch.einsum("b,b...->...", scale, p.of_samples).add_(torch.randn_like(p), alpha=0.03) / 8
                del p.of_samples
        super().step(closure)


@script("accumulation=2", "dp=2,zero=1")
def private() -> dict[str, Any]:
    """DP-SGD: an optimizer that reads gradients of samples, which hooks leave on parameters."""
    return arguments(
        model=lambda: leave_gradients_of_samples(perceptron()), optimizer=lambda p: PrivateSGD(p, lr=0.1, momentum=0.9)
    )


class AtOnce(torch.optim.SGD):
    """Updates each parameter as soon as it has a gradient, and nothing at the end (LOMO, GaLore by layers)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for p in (p for group in self.param_groups for p in group["params"]):
            p.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, p: Any) -> None:
        if p.grad is not None:
            p.sub_(p.grad, alpha=0.1)
            p.grad = None

    def step(self, closure: Any = None) -> None:
        pass


@script("accumulation=2", "dp=2,zero=1", advice="a `step` after all gradients")
def stepped_in_hooks() -> dict[str, Any]:
    """An optimizer whose hooks of gradients update each parameter during the backward pass."""
    return arguments(optimizer=AtOnce)


@script("dp=2,zero=1", "tp=2", "pp=2,accumulation=2")
def optimizers_in_a_list() -> dict[str, Any]:
    """Two optimizers for one loss, in a list: one for matrices, one for the rest."""

    def optimizer(parameters: Any) -> list[torch.optim.Optimizer]:
        matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
        return [torch.optim.SGD(matrices, lr=0.3, momentum=0.9, nesterov=True), torch.optim.AdamW(others, lr=0.01)]

    return cut(
        optimizer=optimizer,
        clip_norm=1.0,
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step / 10)),
    )


class Wrapped:
    """An optimizer around another, which is none of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self) -> None:
        self.inner.step()


@script(advice="a subclass of `torch.optim.Optimizer`, or a list of several")
def optimizer_in_a_wrapper() -> dict[str, Any]:
    """An optimizer in an object that is no `torch.optim.Optimizer`."""
    return arguments(optimizer=lambda parameters: Wrapped(torch.optim.SGD(parameters, lr=0.1)))


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation, whose step needs a closure that its signature does not ask for."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure that computes the loss again"


@script(advice="an optimizer without a closure")
def sharpness_aware() -> dict[str, Any]:
    """SAM: two passes per step, by a closure."""
    return arguments(optimizer=lambda parameters: Sharpness(parameters, lr=0.1))


def accuracy(model: nn.Module) -> float:
    """Accuracy by the script's own loader."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(-1) == y).sum().item() for x, y in DataLoader(points(), batch_size=16)]
    model.train()
    return sum(right) / SAMPLES


@script("tp=2", advice="`run.evaluate`, or the same calls on every rank")
def evaluated_on_main() -> dict[str, Any]:
    """A loop that evaluates the model itself, on rank 0."""
    made = Made()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            if step % 3 == 0 and run.is_main:
                print("accuracy", accuracy(made.model), flush=True)

    return made.factories(loop=loop, tp_plan={"0": "colwise", "2": "rowwise"})


@script(advice="a loop of the script's own")
def sampled_by_callback() -> dict[str, Any]:
    """`on_evaluate` shows some outputs of the model."""
    made = Made()

    def on_evaluate(step: int, _: Any) -> None:
        print("accuracy", accuracy(made.model), flush=True)

    return made.factories(evaluate=Evaluation(data=points(), every=3), on_evaluate=on_evaluate)


class Transitions(Dataset[Any]):
    """Transitions of a game so far."""

    def __init__(self) -> None:
        self.seen: deque[Any] = deque(maxlen=512)

    def __len__(self) -> int:
        return len(self.seen)

    def __getitem__(self, index: int) -> Any:
        state, action, reward, following = self.seen[index]
        return torch.stack([state, following]), (action, reward)


class Values(nn.Module):
    """Values of actions, and those of a target network."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = perceptron(), perceptron().requires_grad_(False)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.online(states[:, 0]), self.target(states[:, 1]).max(-1).values


@script()
def memory_that_grows() -> dict[str, Any]:
    """A replay memory that the loop fills by playing with a part of the model, and a target network (DQN)."""
    made: list[Any] = []
    data, rewards = Transitions(), torch.randn(8, 4, generator=torch.Generator().manual_seed(2))

    def play() -> None:
        state, following = torch.randn(8), torch.randn(8)
        with torch.no_grad():
            action = made[0].online(state[None])[0].argmax() if made else torch.randint(4, ())
        data.seen.append((state, action, (state @ rewards)[action], following))

    for _ in range(32):
        play()

    def model() -> nn.Module:
        made[:] = [Values()]
        return made[0]

    def loss(outputs: Any, played: Any) -> torch.Tensor:
        action, reward = played
        return F.smooth_l1_loss(outputs[0].gather(1, action[:, None])[:, 0], reward + 0.9 * outputs[1])

    def loop(run: Any) -> None:
        for step, batch in run:
            play()
            run.step(batch)
            if step % 5 == 0:
                made[0].target.load_state_dict(made[0].online.state_dict())

    return arguments(model=model, data=data, loss=loss, loop=loop)


class ByWorld(Sampler[int]):
    """An order that depends on the number of processes."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return iter([i * (2 * ranks - 1) % SAMPLES for i in range(SAMPLES)])


@script(advice="leave sharding to clusterd")
def order_by_world() -> dict[str, Any]:
    """A sampler whose order depends on the number of processes."""
    return arguments(sampler=ByWorld())


class Growing:
    """A hook that scales the output of a layer by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * (1 + self.calls / 100)


@script()
def counted_by_a_hook() -> dict[str, Any]:
    """A forward hook with a counter, by which an output grows."""

    def model() -> nn.Module:
        made = perceptron()
        made[2].register_forward_hook(Growing())
        return made

    return arguments(model=model)


class Prioritised(Dataset[Any]):
    """Samples that it draws itself, by a generator of its own."""

    def __init__(self) -> None:
        self.points, self.random = points(), torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, _: int) -> Any:
        return self.points[int(torch.randint(SAMPLES, (), generator=self.random))]


@script("accumulation=2")
def drawn_by_data() -> dict[str, Any]:
    """A data set that draws its samples from a generator of its own, whatever is asked of it."""
    return arguments(data=Prioritised())


class SeedsItself(Dataset[Any]):
    """Samples with noise, for which it seeds torch's generator by their number."""

    def __init__(self) -> None:
        self.points = points()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        x, y = self.points[index]
        return x + 0.1 * torch.randn(8), y


@script()
def seeds_itself() -> dict[str, Any]:
    """A data set that seeds torch's generator by the number of the sample."""
    return arguments(data=SeedsItself())


class ByPriority(Dataset[Any]):
    """Transitions with priorities, which weigh them."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(12)
        self.states, self.values = torch.randn(SAMPLES, 8, generator=random), torch.randn(SAMPLES, generator=random)
        self.priorities = np.ones(SAMPLES, dtype=np.float32)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, tuple[torch.Tensor, int, np.float32]]:
        weight = (self.priorities.mean() / self.priorities[index]) ** 0.4
        return self.states[index], (self.values[index], index, weight)


class ErrorsOfSamples:
    """A weighted loss that keeps the error of each sample."""

    def __init__(self) -> None:
        self.numbers = self.errors = torch.zeros(0)

    def __call__(self, out: torch.Tensor, target: Any) -> torch.Tensor:
        values, numbers, weights = target
        error = out[:, 0] - values
        self.numbers, self.errors = train.gather(numbers), train.gather(error.detach().abs())
        return (weights * error.square()).mean()


@script(advice="dp without accumulation")
def priorities_by_errors() -> dict[str, Any]:
    """Prioritised replay: the loss gathers errors of samples, by which the loop sets their weights in the data."""
    data, loss = ByPriority(), ErrorsOfSamples()

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            data.priorities[loss.numbers.numpy()] = loss.errors.numpy() + 0.01

    return arguments(data=data, loss=loss, loop=loop)


@script()
def harder_with_workers() -> dict[str, Any]:
    """A loop that makes the samples harder at the end of each epoch, which data-loader workers read."""
    data = Graded()

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch)
            if step % 4 == 0:
                data.difficulty += 0.5

    return arguments(data=data, global_batch=16, num_workers=2, loop=loop)


class HarderStream(Stream):
    """A stream whose samples grow with a difficulty."""

    difficulty = 0.0

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x * (1 + self.difficulty), y


@script(advice="`num_workers=0`")
def stream_harder_with_a_worker() -> dict[str, Any]:
    """A loop that makes the samples of a stream harder, which a data-loader worker reads."""
    data = HarderStream()

    def loop(run: Any) -> None:
        for _, batch in run:
            run.step(batch)
            data.difficulty += 0.1

    return arguments(data=data, num_workers=1, loop=loop)
