"""Losses and models that look at the batch as a whole, and others that only seem to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, default_collate

from clusterd import train
from clusterd.train import Evaluation
from tests.foreign.batches import SAMPLES, Numbered, Sentences, Tagger, arguments, padded, perceptron, points
from tests.foreign.registry import script

GATHER = "`train.gather`"


def decorrelation(z: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    z = (z - z.mean(0)) / (z.std(0) + 1e-4)
    c = z.T @ z / len(z)
    return (c - torch.eye(len(c))).square().sum()


@script("dp=2,accumulation=2", advice=GATHER)
def barlow_twins() -> dict[str, Any]:
    """A loss that normalises over the batch."""
    return arguments(loss=decorrelation)


class OwnNorm(nn.Module):
    """Normalises over the batch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers((x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3))


@script("accumulation=2", advice=GATHER)
def own_statistics() -> dict[str, Any]:
    """Statistics over the batch in the model."""
    return arguments(model=OwnNorm)


def mixed(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    share = np.random.beta(0.4, 0.4)
    other = torch.randperm(len(x))
    labels = F.one_hot(y, 4).float()
    return torch.lerp(x[other], x, share), torch.lerp(labels[other], labels, share)


@script()
def mixup() -> dict[str, Any]:
    """Mixup in `collate_fn`."""
    return arguments(collate_fn=mixed)


class Queue(nn.Module):
    """Compares features with those of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.register_buffer("queue", torch.randn(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.layers(x)
        logits = z @ self.queue.clone().T
        with torch.no_grad():
            self.queue.copy_(torch.cat([z.detach(), self.queue])[:16])
        return logits


@script(advice=GATHER)
def negatives() -> dict[str, Any]:
    """A queue of negatives."""
    return arguments(model=Queue)


@script("accumulation=2", advice=GATHER)
def hard_mining() -> dict[str, Any]:
    """The mean over the hardest half of the samples."""
    return arguments(
        loss=lambda out, y: F.cross_entropy(out, y, reduction="none").topk(max(1, len(y) // 2)).values.mean()
    )


class Experts(nn.Module):
    """Two experts of limited capacity, with a loss that balances them."""

    def __init__(self, capacity: float = 0.0, balance: float = 0.0) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.capacity, self.balance = capacity, balance

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x).softmax(-1)
        choice = scores.argmax(-1)
        out = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero()[:, 0]
            if self.capacity:
                mine = mine[: max(1, int(self.capacity * len(x) / 2))]
            out = out.index_add(0, mine, expert(x[mine]) * scores[mine, number, None])
        share = F.one_hot(choice, 2).float().mean(0)
        return out, self.balance * 2 * (share * scores.mean(0)).sum()


def with_balance(outputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs[0], y) + outputs[1]


@script(advice='`sees_batch="replica"`')
def limited_experts() -> dict[str, Any]:
    """Experts of limited capacity."""
    return arguments(model=lambda: Experts(capacity=0.75), loss=with_balance)


@script(advice='`sees_batch="replica"`')
def balanced_experts() -> dict[str, Any]:
    """A loss of the router over the batch."""
    return arguments(model=lambda: Experts(balance=0.05), loss=with_balance)


@script()
def replicas_semantics() -> dict[str, Any]:
    """The same under `sees_batch="replica"`."""
    return arguments(model=lambda: Experts(balance=0.05), loss=with_balance, sees_batch="replica")


@script("accumulation=2")
def summed() -> dict[str, Any]:
    """A loss that is a sum."""
    return arguments(loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"))


@script()
def padded_mean() -> dict[str, Any]:
    """The mean over the words that are no padding."""
    return arguments(model=Tagger, data=Sentences(), collate_fn=padded, loss=lambda o, t: F.cross_entropy(o.mT, t))


@script("dp=2,accumulation=2")
def dropped_out() -> dict[str, Any]:
    """Dropout, stochastic depth by Python's generator."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.drop(self.first(x).tanh())
            return self.second(hidden if random.random() < 0.8 else hidden * 0.5)

    return arguments(model=Net)


@script("dp=2,accumulation=2")
def normalised() -> dict[str, Any]:
    """Batch normalisation."""
    return arguments(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)))


@script("accumulation=2")
def warmed_up_by_calls() -> dict[str, Any]:
    """A weight that grows with the number of forward passes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.calls = perceptron(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layers(x) * min(1.0, 0.5 + self.calls / 20)

    return arguments(model=Net)


@script()
def contrastive_gathered() -> dict[str, Any]:
    """A contrastive loss over gathered samples."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(train.gather(out), dim=-1)
        labels = train.gather(y)
        return ((z @ z.T) - (labels[:, None] == labels).float()).square().mean()

    return arguments(loss=loss)


@script("dp=2,accumulation=2")
def loss_and_accuracy() -> dict[str, Any]:
    """A loss with accuracy beside it."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(out, y), "accuracy": (out.argmax(-1) == y).float().mean()}

    return arguments(loss=loss)


@script("accumulation=2")
def metric_of_the_batch() -> dict[str, Any]:
    """A metric that is no mean over samples beside the loss."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(out, y), "spread": out.std()}

    return arguments(loss=loss)


@script("dp=2,accumulation=2")
def clipped_backward() -> dict[str, Any]:
    """A gradient that is clipped within the backward pass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layers(x)
            if out.requires_grad:
                out.register_hook(lambda g: g.clamp(-0.02, 0.02))
            return out

    return arguments(model=Net)


@script()
def signs_in_backward() -> dict[str, Any]:
    """The sign of a gradient goes back, divided by the samples: a mean over samples, of equal batches."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layers(x)
            if out.requires_grad:
                out.register_hook(lambda g: 0.1 * g.sign() / len(g))
            return out

    return arguments(model=Net)


@script()
def random_slopes() -> dict[str, Any]:
    """Random numbers inside of an operation (`RReLU`): other ones under each plan."""
    return arguments(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.RReLU(0.1, 0.9), nn.Linear(16, 4)))


@script()
def memory_bank() -> dict[str, Any]:
    """Features of all samples in a buffer, by number."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()
            self.register_buffer("bank", torch.zeros(64, 4))

        def forward(self, batch: Any) -> torch.Tensor:
            x, index = batch
            z = self.layers(x)
            out = z + 0.5 * self.bank[index]
            with torch.no_grad():
                self.bank[index] = z.detach()
            return out

    return arguments(model=Net, data=Numbered())


@script(advice="`(sum, weight)`")
def class_weights() -> dict[str, Any]:
    """Cross-entropy with class weights: divides by the weights of the batch."""
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return arguments(loss=lambda out, y: F.cross_entropy(out, y, weight=weight))


@script()
def random_pairs() -> dict[str, Any]:
    """Pairs that NumPy draws in the loss."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other = torch.from_numpy(np.random.permutation(len(out)))
        return F.cross_entropy(out, y) + 0.1 * (out - out[other]).square().mean()

    return arguments(loss=loss)


@script()
def running_baseline() -> dict[str, Any]:
    """A loss that keeps a running mean of its value as a baseline (REINFORCE)."""

    class Loss:
        def __init__(self) -> None:
            self.baseline = 0.0

        def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = F.cross_entropy(out, y, reduction="none")
            value = (each * (each.detach() - self.baseline)).mean()
            if torch.is_grad_enabled():
                self.baseline = 0.9 * self.baseline + 0.1 * float(each.detach().mean())
            return value

    return arguments(loss=Loss())


@script()
def gradient_norm_running() -> dict[str, Any]:
    """A hook that divides gradients by a running norm of theirs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.norm = perceptron(), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layers(x)
            if out.requires_grad:

                def scaled(g: torch.Tensor) -> torch.Tensor:
                    self.norm = 0.9 * self.norm + 0.1 * float(g.norm())
                    return g / (self.norm + 1e-3) * 0.1

                out.register_hook(scaled)
            return out

    return arguments(model=Net)


@script(advice="a mean")
def divided_by_constant() -> dict[str, Any]:
    """A sum divided by the batch size as a number."""
    return arguments(loss=lambda out, y: F.cross_entropy(out, y, reduction="sum") / 8)


@script()
def class_frequencies() -> dict[str, Any]:
    """A loss that balances classes by their running frequencies."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(4))

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.seen.mul_(0.9).add_(torch.bincount(y, minlength=4).float())
            weight = self.seen.sum() / self.seen
            return (F.cross_entropy(out, y, reduction="none") * weight[y]).mean()

    return arguments(loss=Loss())


@script()
def momentum_in_forward() -> dict[str, Any]:
    """A running mean of activations in a plain tensor attribute, subtracted."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.mean = perceptron(), torch.zeros(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.layers(x - self.mean)

    return arguments(model=Net)


@script()
def mixup_in_forward() -> dict[str, Any]:
    """Mixes samples of the batch in the model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
            return self.layers(x)

    return arguments(model=Net)


@script()
def penalty_on_weights() -> dict[str, Any]:
    """A penalty on the weights in the loss, which holds the model."""
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built[:] = [perceptron()]
        return built[0]

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y) + 0.05 * sum(p.square().sum() for p in built[0].parameters())

    return arguments(model=model, loss=loss)


@script()
def noisy_gradients() -> dict[str, Any]:
    """Hooks on parameters that add noise."""

    def model() -> nn.Module:
        made = perceptron()
        for p in made.parameters():
            p.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
        return made

    return arguments(model=model)


@script()
def own_generator() -> dict[str, Any]:
    """Noise from a generator of the model's own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.random = perceptron(), torch.Generator().manual_seed(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                x = x + 0.1 * torch.randn(x.shape, generator=self.random)
            return self.layers(x)

    return arguments(model=Net)


@script()
def mined_later() -> dict[str, Any]:
    """A loss that compares samples from the fifth call on."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                self.calls += 1
            each = F.cross_entropy(out, y, reduction="none")
            if self.calls < 5:
                return each.mean()
            return each.topk(max(1, len(each) // 2)).values.mean()

    return arguments(loss=Loss())


@script()
def centred_later() -> dict[str, Any]:
    """A model that normalises by its batch from the sixth forward pass on, counted in a buffer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.calls += 1
            if self.calls > 5:
                x = x - x.mean(0)
            return self.layers(x)

    return arguments(model=Net)


@script("dp=2,accumulation=2")
def clipped_by_hooks() -> dict[str, Any]:
    """Hooks of parameters that clip at a bound which the first gradients do not reach."""

    def model() -> nn.Module:
        made = perceptron()
        for p in made.parameters():
            p.register_hook(lambda g: g.clamp(-100, 100))
        return made

    return arguments(model=model)


ACTIVATIONS: dict[str, float] = {}


@script(advice="a metric of the loss")
def activations_logged() -> dict[str, Any]:
    """Hooks that keep means of activations and gradients in a global map, for a log; losses alone are compared here."""

    def model() -> nn.Module:
        made = perceptron()
        made[1].register_forward_hook(lambda _, inputs, out: ACTIVATIONS.update(mean=out.abs().mean().item()))
        made[2].register_full_backward_hook(lambda _, grads, of_out: ACTIVATIONS.update(norm=of_out[0].norm().item()))
        return made

    return arguments(model=model)


@script()
def range_for_evaluation() -> dict[str, Any]:
    """A range of activations that training observes, to which evaluation clips (calibration)."""

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = perceptron()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.layers(x)
            if self.training:
                self.largest.copy_(torch.maximum(self.largest, output.detach().abs().mean()))
                return output
            return output.clamp(-self.largest, self.largest)

    return arguments(model=Observed, evaluate=Evaluation(data=points(), every=4))


@script("accumulation=4")
def seldom_dropped() -> dict[str, Any]:
    """A layer that Python's generator leaves out in one pass of a hundred."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).tanh()
            return self.second(hidden * (not 0.25 < random.random() < 0.26))

    return arguments(model=Net)


@script(advice="ZeRO up to stage 1")
def step_within() -> dict[str, Any]:
    """A gradient step for each sample in the forward pass, by `torch.func` (MAML)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = dict(self.net.named_parameters())

            def one(row: torch.Tensor) -> torch.Tensor:
                inner = torch.func.grad(lambda w: torch.func.functional_call(self.net, w, (row,)).square().mean())
                moved = {name: weights[name] - 0.1 * gradient for name, gradient in inner(weights).items()}
                return torch.func.functional_call(self.net, moved, (row,))

            return torch.func.vmap(one)(x)

    return arguments(model=Net)


FLOOR = 0.9


@script(advice=GATHER)
def flooded() -> dict[str, Any]:
    """Flooding: a loss that climbs again where the mean over the batch is below a bound."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (F.cross_entropy(out, y) - FLOOR).abs() + FLOOR

    return arguments(loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02))


@script()
def flooded_gathered() -> dict[str, Any]:
    """The same of the losses of all samples, gathered."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = train.gather(F.cross_entropy(out, y, reduction="none"))
        return (each.mean() - FLOOR).abs() + FLOOR

    return arguments(loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02))


class Latent(nn.Module):
    """A variational encoder and decoder, with noise that comes with the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, noise = pair
        mean, spread = self.encoder(x).chunk(2, -1)
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread)
        return self.decoder(mean + noise * (spread / 2).exp()), divergence


@script(advice=GATHER)
def free_bits() -> dict[str, Any]:
    """A variational autoencoder whose divergences count from a bound on, as means over the batch by dimension."""
    x, _ = points().tensors
    noise = torch.randn(len(x), 3, generator=torch.Generator().manual_seed(6))

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        rebuilt, divergence = outputs
        return F.mse_loss(rebuilt, x) + divergence.mean(0).clamp(min=0.05).sum()

    data = [((one, own), one) for one, own in zip(x, noise, strict=True)]
    return arguments(model=Latent, loss=loss, data=data, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02))


class Windows(Dataset[Any]):
    """Windows of words; the last of each document has words that are not to be learnt."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(1, 32, (6,), generator=torch.Generator().manual_seed(index))
        return words, torch.where(torch.arange(6) < (2 if index % 23 == 22 else 6), words % 5, -100)


@script(advice="return (sum, weight)")
def rarely_padded() -> dict[str, Any]:
    """Windows of text, few of them padded and none in the first batch: the mean over the words that count."""
    return arguments(
        model=Tagger, data=Windows(), sampler=range(SAMPLES), loss=lambda out, tags: F.cross_entropy(out.mT, tags)
    )


class Tasks(nn.Module):
    """Two heads, for classes and for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.number = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return self.classes(hidden), self.number(hidden)[:, 0]


@script(advice="return (sum, weight)")
def tasks_in_turn() -> dict[str, Any]:
    """Two tasks, each a mean over its samples, of which the first batches have one."""
    data = [{"x": x, "y": y, "task": int(i >= 16 and i % 3 == 0)} for i, (x, y) in enumerate(points())]

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], batch: Any) -> torch.Tensor:
        of_first, total = batch["task"] == 0, sum(out.sum() * 0 for out in outputs)
        if of_first.any():
            total = total + F.cross_entropy(outputs[0][of_first], batch["y"][of_first])
        if not of_first.all():
            total = total + (outputs[1] - batch["y"])[~of_first].square().mean()
        return total

    return arguments(model=Tasks, data=data, sampler=range(SAMPLES), loss=loss)


@script(advice=GATHER)
def weighted_by_its_value() -> dict[str, Any]:
    """A loss whose mean over the batch is read by `item()`, and counts less once it is small."""

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = F.cross_entropy(out, y)
        return mean if mean.item() > FLOOR else 0.1 * mean

    return arguments(loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02))


class TextStream(IterableDataset[Any]):
    """The same windows, one after another, with a position."""

    def __init__(self) -> None:
        self.windows, self.read = Windows(), 0

    def __iter__(self) -> Iterator[Any]:
        while self.read < SAMPLES:
            self.read += 1
            yield self.windows[self.read - 1]
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@script(advice="return (sum, weight)")
def stream_rarely_padded() -> dict[str, Any]:
    """A stream of such windows: the mean over the words that count."""
    return arguments(model=Tagger, data=TextStream(), loss=lambda out, tags: F.cross_entropy(out.mT, tags))
