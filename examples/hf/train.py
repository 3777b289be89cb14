"""Trains a Llama of Hugging Face's transformers on the source text of Python's own standard library."""

import argparse
import sysconfig
from pathlib import Path

import torch
from llama import Llama, config, plans
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
    for name, default in {"width": 64, "depth": 4, "heads": 4, "context": 64, "steps": 200, "batch": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    args = parser.parse_args()
    llama = config(width=args.width, depth=args.depth, heads=args.heads, context=args.context)
    layers, tp_plan = plans(llama)
    train.run(
        model=lambda: Llama(llama),
        loss=lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        data=Windows(args.context),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        global_batch=args.batch, steps=args.steps, layers=layers, tp_plan=tp_plan, clip_norm=1.0,
        precision=args.precision,
    )  # fmt: skip
