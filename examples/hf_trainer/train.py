"""Hugging Face's own Trainer, which clusterd may stop and start again at another number of replicas.

What makes it so is the callback: it saves and leaves when asked to, after a step that all replicas agree on, and tells
how far it is. Random weights, random tokens: nothing is downloaded.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from clusterd.train.checkpointable import Requests

WORLD = int(os.environ.get("WORLD_SIZE", 1))


class Asked(TrainerCallback):
    """Between the Trainer and clusterd; outside of it, nothing is ever asked."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests

    def on_step_end(self, args, state, control, **_) -> None:
        """Replicas hear of a request at different moments, and must save after the same step."""
        wishes = torch.tensor([self.requests.save, self.requests.stop], dtype=torch.float32, device=args.device)
        if WORLD > 1:
            dist.all_reduce(wishes)
        control.should_save |= bool(wishes.any())
        control.should_training_stop |= bool(wishes[1])

    def on_save(self, args, state, control, **_) -> None:
        """The Trainer has written a checkpoint."""
        self.requests.saved(state.global_step, str(folder(args.output_dir, state.global_step)))

    def on_log(self, args, state, control, logs=None, **_) -> None:
        """For `clusterd ls`; `logging_steps=1` makes it every step."""
        if "loss" in (logs or {}):
            self.requests.progress(state.global_step, float(logs["loss"]), samples=BATCH, steps=state.max_steps)


class Tokens(torch.utils.data.Dataset):
    """Random walks around a ring of tokens."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        steps = torch.randint(-1, 2, (32,), generator=torch.Generator().manual_seed(i))
        tokens = (i + steps.cumsum(0)) % 64
        return {"input_ids": tokens, "labels": tokens}


def folder(directory: str, step: int) -> Path:
    """Where the Trainer puts the checkpoint of a step."""
    return Path(directory) / f"checkpoint-{step}"


def newest(directory: str) -> str | None:
    """The newest checkpoint that is whole: the Trainer's own state is what it writes last."""
    steps = [int(f.parent.name.rpartition("-")[2]) for f in Path(directory).glob("checkpoint-*/trainer_state.json")]
    return str(folder(directory, max(steps))) if steps else None


BATCH = 8

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="for checkpoints, shared by all hosts")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    with Requests() as requests:
        trainer = Trainer(
            model=LlamaForCausalLM(small),
            train_dataset=Tokens(),
            callbacks=[Asked(requests)],
            args=TrainingArguments(
                output_dir=options.directory,
                max_steps=options.steps,
                per_device_train_batch_size=BATCH // WORLD,  # the global batch stays the same
                learning_rate=3e-3,
                logging_steps=1,
                save_strategy="no",  # but when asked
                save_total_limit=2,
                use_cpu=not torch.cuda.is_available(),
                report_to="none",
                disable_tqdm=True,
                ddp_find_unused_parameters=False,
            ),
        )
        last = newest(options.directory)
        print(f"goes on from {last}" if last else "starts", "with", WORLD, "replicas", flush=True)
        trainer.train(resume_from_checkpoint=last)
        if not requests.stop:
            trainer.save_model(str(Path(options.directory) / "trained"))
