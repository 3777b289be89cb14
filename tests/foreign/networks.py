"""Networks in plain torch: convolutions, recurrence, two optimizers, losses with parameters."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import TensorDataset

from tests.foreign import batches
from tests.foreign.registry import script

SAMPLES = 64


def pictures() -> TensorDataset:
    """Pictures and their classes."""
    random = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(SAMPLES, 3, 8, 8, generator=random), torch.randint(4, (SAMPLES,), generator=random)
    )


def arguments(model: Any, **others: Any) -> dict[str, Any]:
    """Arguments that the scripts of this module have in common."""
    return {
        "model": model,
        "loss": F.cross_entropy,
        "data": pictures(),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "global_batch": 8,
        "steps": 12,
        **others,
    }


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def resnet() -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, Residual(8), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


@script(advice="GroupNorm")
def resnet_batch_norm() -> dict[str, Any]:
    """ResNet with BatchNorm."""
    return arguments(resnet)


class Denoiser(nn.Module):
    """A small UNet that predicts the noise in its input; the step of the noise is random."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.down, self.up = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.randint(10, (len(pictures),), device=pictures.device)
        noise = torch.randn_like(pictures)
        share = ((steps + 1) / 10).view(-1, 1, 1, 1)
        noisy = (1 - share) * pictures + share * noise
        hidden = F.silu(self.norm(self.down(noisy) + self.time(steps)[:, :, None, None]))
        return self.out(torch.cat([self.up(hidden), noisy], 1)), noise


@script(advice="draw timesteps and noise in the data set, by sample")
def unet_random_timesteps() -> dict[str, Any]:
    """UNet that draws timesteps and noise in its forward pass."""
    return arguments(Denoiser, loss=lambda output, _: F.mse_loss(*output))


class Classifier(nn.Module):
    """An LSTM over packed sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(32, 16), nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, lengths = batch
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of 3 to 10 words, and their classes."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(4)
        self.lengths = torch.randint(3, 11, (SAMPLES,), generator=random)
        self.tokens = [torch.randint(1, 32, (int(n),), generator=random) for n in self.lengths]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.tokens[index], index % 4


def padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[Any, torch.Tensor]:
    """Sentences padded to the longest one, with their lengths."""
    tokens = nn.utils.rnn.pad_sequence([s for s, _ in samples], batch_first=True)
    lengths = torch.tensor([len(s) for s, _ in samples])
    return (tokens, lengths), torch.tensor([label for _, label in samples])


@script("dp=2,accumulation=2")
def lstm_packed() -> dict[str, Any]:
    """LSTM over packed sequences of different lengths."""
    return arguments(Classifier, data=Sentences(), collate_fn=padded)


class Adversaries(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)


def judged(adversaries: Adversaries, batch: Any) -> torch.Tensor:
    """Loss of the discriminator, which tells real samples from generated ones."""
    noise, real = batch
    judge, judgement = adversaries.discriminator, F.binary_cross_entropy_with_logits
    genuine, forged = judge(real), judge(adversaries.generator(noise).detach())
    return judgement(genuine, torch.ones_like(genuine)) + judgement(forged, torch.zeros_like(forged))


def fooled(adversaries: Adversaries, batch: Any) -> torch.Tensor:
    """Loss of the generator."""
    forged = adversaries.discriminator(adversaries.generator(batch[0]))
    return F.binary_cross_entropy_with_logits(forged, torch.ones_like(forged))


def noise_and_real() -> TensorDataset:
    random = torch.Generator().manual_seed(6)
    return TensorDataset(*(torch.randn(SAMPLES, n, generator=random) for n in (8, 16)))


@script("dp=2,accumulation=2", advice="dp and accumulation")
def gan() -> dict[str, Any]:
    """GAN: `loss` and `optimizer` are dicts with a discriminator and a generator."""
    return arguments(
        Adversaries,
        data=noise_and_real(),
        loss={"discriminator": judged, "generator": fooled},
        optimizer={
            "discriminator": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
            "generator": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
        },
    )


@script("dp=2,accumulation=2", advice="dp and accumulation")
def critic_more_often() -> dict[str, Any]:
    """GAN whose loop updates the generator in each third step only (n_critic, delayed policies)."""

    def loop(run: Any) -> None:
        for step, batch in run:
            run.step(batch, only="discriminator" if step % 3 else ())

    return gan() | {"loop": loop}


class ArcFace(nn.Module):
    """Angular-margin loss, which has the centres of the classes as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 8))

    def forward(self, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        cosine = F.linear(F.normalize(features), F.normalize(self.centres)).clamp(-0.99, 0.99)
        margin = torch.cos(cosine.acos() + 0.2)
        return F.cross_entropy(10 * torch.where(F.one_hot(target, 4).bool(), margin, cosine), target)


def features() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 8))


@script(advice="compute the loss in the model, as `arcface_in_model`")
def arcface() -> dict[str, Any]:
    """ArcFace: the loss has parameters, which the optimizer gets."""
    loss = ArcFace()
    return arguments(
        features, loss=loss, optimizer=lambda parameters: torch.optim.SGD([*parameters, *loss.parameters()], lr=0.05)
    )


@script(advice="compute the loss in the model, as `arcface_in_model`")
def arcface_untrained() -> dict[str, Any]:
    """ArcFace: the loss has parameters, which no optimizer gets."""
    return arguments(features, loss=ArcFace())


class WithCentres(nn.Module):
    """Features and ArcFace in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.arcface = features(), ArcFace()

    def forward(self, picture: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return self.arcface(self.features(picture), label)


@script()
def arcface_in_model() -> dict[str, Any]:
    """ArcFace as a part of the model, which returns the loss."""

    def named(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"picture": torch.stack([x for x, _ in samples]), "label": torch.stack([y for _, y in samples])}

    return arguments(WithCentres, loss=lambda output, batch: output, collate_fn=named)


@script()
def stateful_recurrence() -> dict[str, Any]:
    """A hidden state that goes from batch to batch (truncated backpropagation)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(8, 16), nn.Linear(16, 4)
            self.hidden: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.hidden if self.hidden is not None and len(self.hidden) == len(x) else None
            hidden = self.cell(x, before)
            if self.training:
                self.hidden = hidden.detach()
            return self.out(hidden)

    return batches.arguments(model=Net)


@script()
def mean_teacher() -> dict[str, Any]:
    """A teacher that follows the student in the forward pass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = (
                nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)) for _ in range(2)
            )
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():
                    for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                        t.lerp_(s, 0.1)
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x), target

    def loss(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out[0], y) + 0.1 * (out[0] - out[1]).square().mean()

    return batches.arguments(model=Net, loss=loss)


@script()
def spectral() -> dict[str, Any]:
    """Spectral normalisation: power iteration in each forward pass."""
    return batches.arguments(
        model=lambda: nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16)), nn.Tanh(), nn.Linear(16, 4)
        )
    )


@script()
def orthogonal() -> dict[str, Any]:
    """An orthogonal parametrization."""
    return batches.arguments(
        model=lambda: nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.utils.parametrizations.orthogonal(nn.Linear(16, 16)), nn.Linear(16, 4)
        )
    )


@script()
def complex_weights() -> dict[str, Any]:
    """Complex parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.view_as_complex(torch.randn(5, 2) * 0.5))
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.mix, n=8))

    return batches.arguments(model=Net)


@script()
def sparse_embedding() -> dict[str, Any]:
    """An embedding with sparse gradients."""
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(50, (64, 5), generator=g), torch.randint(4, (64,), generator=g))
    return batches.arguments(
        data=data,
        model=lambda: nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 4)),
    )


@script("dp=2,zero=1")
def sparse_adam() -> dict[str, Any]:
    """The same under `SparseAdam`, beside Adam for the other weights."""

    def optimizer(named_parameters: Any) -> list[torch.optim.Optimizer]:
        named = list(named_parameters)
        tables, rest = [p for n, p in named if n == "0.weight"], [p for n, p in named if n != "0.weight"]
        return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.Adam(rest, lr=0.01)]

    return {**sparse_embedding(), "optimizer": optimizer}


@script(advice="one call in `model`")
def lazy_layers() -> dict[str, Any]:
    """`LazyLinear` layers."""
    return batches.arguments(model=lambda: nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4)))


@script()
def gradient_penalty() -> dict[str, Any]:
    """A penalty on the gradient by the input: backward twice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = batches.perceptron()

        def forward(self, x: torch.Tensor) -> Any:
            if not torch.is_grad_enabled():
                return self.layers(x), x.new_zeros(len(x))
            x = x.requires_grad_()
            out = self.layers(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out, g.square().sum(1)

    return batches.arguments(model=Net, loss=lambda out, y: F.cross_entropy(out[0], y) + 0.1 * out[1].mean())


@script()
def applied_twice() -> dict[str, Any]:
    """A block that is applied twice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            for _ in range(3):
                x = x + torch.tanh(self.block(x))
            return self.last(x)

    return batches.arguments(model=Net)


@script()
def dropped_layers() -> dict[str, Any]:
    """Layers that Python's `random` leaves out (LayerDrop)."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                if not self.training or random.random() > 0.3:
                    x = x + torch.tanh(block(x))
            return self.last(x)

    return batches.arguments(model=Net, find_unused_parameters=True)


@script()
def initialised_by_data() -> dict[str, Any]:
    """A scale and a shift that the first batch sets (ActNorm)."""

    class Act(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
            self.register_buffer("done", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and not self.done.item():
                with torch.no_grad():
                    self.shift.copy_(-x.mean(0))
                    self.scale.copy_(1 / x.std(0))
                    self.done.fill_(1)
            return (x + self.shift) * self.scale

    return batches.arguments(model=lambda: nn.Sequential(Act(), batches.perceptron()))
