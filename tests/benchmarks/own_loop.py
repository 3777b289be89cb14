"""The example GPT with a loop of the script's own, run in the example's folder: the arguments of its `train.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import torch
from model import GPT
from torch.nn.functional import cross_entropy
from train import Windows

from clusterd import train


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("steps", "width", "depth", "batch"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    with train.session(
        model=lambda: GPT(width=args.width, depth=args.depth, heads=4, context=64),
        loss=lambda logits, target: cross_entropy(logits.flatten(0, 1), target.flatten()),
        data=Windows(64),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        global_batch=args.batch,
        steps=args.steps,
        layers=GPT.LAYERS,
        clip_norm=1.0,
    ) as run:
        for _, batch in run:
            run.step(batch)


if __name__ == "__main__":
    main()
