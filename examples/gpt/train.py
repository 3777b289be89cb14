"""Trains a byte-level GPT on the source text of Python's own standard library."""

import argparse
import sysconfig
from pathlib import Path

import torch
from model import GPT
from torch.nn.functional import cross_entropy

from clusterd import train


class Windows(torch.utils.data.Dataset):
    """Stretches of the text, and the same shifted by one byte."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = bytearray().join(f.read_bytes() for f in files)
        self.context, self.text = context, torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[i * self.context : (i + 1) * self.context + 1].long()
        return window[:-1], window[1:]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"width": 64, "depth": 4, "heads": 4, "context": 64, "steps": 200, "batch": 16, "seed": 0, "workers": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--save", metavar="FILE", help="for the trained model")
    args = parser.parse_args()
    train.run(
        model=lambda: GPT(width=args.width, depth=args.depth, heads=args.heads, context=args.context),
        loss=lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        data=Windows(args.context),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        global_batch=args.batch, steps=args.steps, seed=args.seed, num_workers=args.workers,
        layers=GPT.LAYERS, tp_plan=GPT.TP_PLAN, clip_norm=1.0, save=args.save,
        precision=args.precision,
    )  # fmt: skip
