"""Trains a small residual network on pictures of noise with a coloured square; its class is the square's place."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

from clusterd import train


class Squares(torch.utils.data.Dataset):
    """Pictures that are made when they are asked for, always the same ones."""

    def __init__(self, size: int, count: int = 20_000) -> None:
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(i)
        picture = 0.3 * torch.randn(3, self.size, self.size, generator=random)
        place, half = int(torch.randint(4, (1,), generator=random)), self.size // 2
        y, x = divmod(place, 2)
        picture[i % 3, y * half + 2 : y * half + half - 2, x * half + 2 : x * half + half - 2] += 1.0
        return picture, torch.tensor(place)


class Block(nn.Module):
    """Two convolutions beside a shortcut; group norm, which does not care how a batch is cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return relu(x + self.norm2(self.second(relu(self.norm1(self.first(x))))))


class Head(nn.Module):
    """Mean over the picture, then the classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(x.mean(dim=(2, 3)))


class ConvNet(nn.Module):
    """A stem, blocks, a head."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = Head(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"width": 32, "depth": 4, "size": 32, "steps": 200, "batch": 16, "seed": 0, "workers": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    train.run(
        model=lambda: ConvNet(args.width, args.depth),
        loss=cross_entropy,
        data=Squares(args.size),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=args.batch, steps=args.steps, seed=args.seed, num_workers=args.workers,
        layers=["stem", "blocks", "head"],
    )  # fmt: skip
