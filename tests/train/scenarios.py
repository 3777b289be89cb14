"""The job that test ranks train: a small GPT on random bytes, with variations."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import batch_models
import changing_models
import counting_models
import fsspec
import gradient_models
import recorded_state
import torch
import torch_limits
import unusual_models
import unusual_optimizers
import writing_models
from model import GPT
from stand_in import use_stand_in
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from clusterd.protocol.launch import SAME_VARIABLE
from clusterd.train import rank_main
from clusterd.train.loop.rank_training import Training
from clusterd.train.parallel import build
from clusterd.train.process.evaluation import Evaluation
from clusterd.train.process.job import Job
from tests.foreign import registry

VOCABULARY, CONTEXT = 64, 16


class Recorded(torch.utils.data.Dataset[Any]):
    """Random bytes that record the requested indices."""

    def __init__(self, samples: int, pace_s: float = 0.0) -> None:
        self.pace_s = pace_s  # between the batches of a rank, for jobs that a test acts on while they run
        self._tokens = torch.randint(VOCABULARY, (samples, CONTEXT + 1), generator=torch.Generator().manual_seed(7))
        # Some structure to learn, so that losses change.
        self._tokens[:, 1::2] = (self._tokens[:, 0:-1:2] * 3 + 1) % VOCABULARY
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def shift(self, count: int) -> None:
        """Begin with another sample."""
        self._tokens = self._tokens.roll(count, 0)

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        # Called by a data loader; the description of the model reads single samples.
        time.sleep(self.pace_s)
        self.asked += indices
        return [self[i] for i in indices]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[index, :-1], self._tokens[index, 1:]


class Streamed(torch.utils.data.IterableDataset[Any]):
    """The same samples as a stream, in another order in each epoch.

    Args:
        kind: "late": it counts a sample after it was used; "noisy": it draws from the global generator; "drawn": it
            draws its order from there; "once": it yields nothing after its end; "own": it draws from a generator of its
            own, whose state is a part of its position.
    """

    def __init__(self, samples: Recorded, kind: str = "") -> None:
        self.samples, self.kind = samples, kind
        self.read = self.epoch = 0
        self.asked: list[int] = []
        self.random = random.Random(5)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]
        self.random.setstate(state["random"])

    def __iter__(self) -> Iterator[Any]:
        generator = None if self.kind == "drawn" else torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(self.samples), generator=generator).tolist()
        while self.read < len(order):
            index = order[self.read]
            self.read += self.kind != "late"
            self.asked.append(index)
            time.sleep(self.samples.pace_s / 16)
            tokens, following = self.samples[index]
            if self.kind == "noisy":
                tokens = tokens.roll(int(torch.randint(8, ())))
            if self.kind == "own":
                tokens = tokens.roll(self.random.randrange(8))
            yield tokens, following
            self.read += self.kind == "late"
        if self.kind != "once":
            self.read = 0


class WithoutPosition(torch.utils.data.IterableDataset[Any]):
    """A stream that only has samples."""

    def __init__(self, samples: Recorded, _kind: str) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[i] for i in range(len(self.samples))])


STREAMS: dict[str, Any] = {"without": WithoutPosition}


class Steps:
    """A step log in memory."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def step(self, step: int, loss: float, time_s: float, details: dict[str, Any]) -> None:
        self.steps.append((step, loss))

    def evaluation(self, step: int, metrics: dict[str, float], time_s: float) -> None:
        """Nothing."""

    def metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Nothing."""


class Filed(Recorded):
    """The same samples, from a file of a data set that is opened by name."""

    RECORD_BYTES = CONTEXT + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with fsspec.open("clusterd://tokens/all.bin", "rb") as file:
            file.seek(index * self.RECORD_BYTES)
            tokens = torch.tensor(list(file.read(self.RECORD_BYTES)))
        return tokens[:-1], tokens[1:]

    def write(self, folder: Path) -> None:
        """Create the data set."""
        folder.mkdir()
        (folder / "all.bin").write_bytes(bytes(self._tokens.flatten().tolist()))


class RowNormalised(torch.optim.SGD):
    """An optimizer that is not elementwise: it normalises whole rows."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / (p.grad.norm() + 1e-6)
        return super().step(closure)


class Tied(GPT):
    """The output matrix is the embedding's."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head.out.weight = self.embed.token.weight


class Stray(GPT):
    """A parameter outside of all layers."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class Tables(GPT):
    """A computed table, neither trained nor saved, and a counter of samples, which no plan cuts."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        angles = torch.arange(CONTEXT)[:, None] * torch.arange(1, sizes["width"] + 1)[None, :] / CONTEXT
        self.embed.register_buffer("table", angles.sin(), persistent=False)
        self.embed.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.embed.register_forward_hook(self._add)

    @staticmethod
    def _add(embed: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        embed.seen = embed.seen + inputs[0].shape[0]  # a new tensor
        return output + embed.table


class Frozen(GPT):
    """A frozen block, and one that the forward pass skips."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.blocks[0].requires_grad_(False)
        self.head.spare = nn.Linear(3, 5)


class Huge(GPT):
    """Requests more memory than any machine has, as an accelerator would refuse it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        torch.empty(1 << 60)
        return super().forward(tokens)


class Broken(GPT):
    """Fails in the first step."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a mistake of the script's own")


class Named(GPT):
    """Takes the entries of a batch by name."""

    def forward(self, tokens: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(tokens)


class Graphs:
    """A batch of graphs, as some libraries have it: a slice of it is a list."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, which: Any) -> list[torch.Tensor]:
        return list(self.tokens[which])


class LabelledGraphs(Graphs):
    """A batch of graphs with their labels, as PyG's loaders make it."""

    def __init__(self, tokens: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(tokens)
        self.y = y

    def to(self, device: Any, non_blocking: bool = False) -> LabelledGraphs:
        return LabelledGraphs(self.tokens.to(device), self.y.to(device))


class OfGraphs(GPT):
    """Takes a batch of graphs."""

    def forward(self, graphs: Graphs) -> torch.Tensor:
        return super().forward(graphs.tokens)


def named(samples: list[Any]) -> dict[str, Any]:
    tokens, following = default_collate(samples)
    return {"tokens": tokens, "labels": {"next": following}}


def of_graphs(samples: list[Any]) -> tuple[Graphs, torch.Tensor]:
    tokens, following = default_collate(samples)
    return Graphs(tokens), following


def triple(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    return *default_collate(samples), 1


def of_labelled_graphs(samples: list[Any]) -> LabelledGraphs:
    return LabelledGraphs(*default_collate(samples))


COLLATE_FNS = {
    "labelled graphs": of_labelled_graphs,
    "turned": unusual_models.turned,
    "mapping": named,
    "graphs": of_graphs,
    "triple": triple,
}

MODELS = {
    "mapping": Named, "graphs": OfGraphs, "labelled graphs": OfGraphs, "triple": GPT,
    "huge": Huge, "broken": Broken, "gpt": GPT, "tied": Tied, "stray": Stray, "tables": Tables, "frozen": Frozen,
    **unusual_models.MODELS, **writing_models.MODELS, **gradient_models.MODELS,
    **counting_models.MODELS, **changing_models.MODELS, **batch_models.MODELS,
}  # fmt: skip
OPTIMIZERS = {
    **unusual_optimizers.OPTIMIZERS,
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": [q for q in p if q.dim() > 1], "weight_decay": 0.1}, {"params": [q for q in p if q.dim() <= 1]}],
        lr=3e-3,
    ),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rows": lambda p: RowNormalised(p, lr=0.01),
}


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """Cross entropy over all bytes."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)


def masked(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over the larger bytes, and their number."""
    counts = target > 20
    return cross_entropy(logits, target.where(counts, -100), reduction="sum"), counts.sum()


class Counted(nn.Module):
    """A loss that counts its calls and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.times = 0

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.times += 1
        self.centre.lerp_(logits.detach().mean(), 0.1)
        return cross_entropy(logits, target) * (1 + 1 / self.times)


class Centred:
    """A loss, no module, that subtracts a running mean, as a new tensor each time."""

    def __init__(self) -> None:
        self.centre = torch.zeros(VOCABULARY)

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(logits - self.centre, target)
        self.centre = self.centre * 0.5 + logits.detach().mean((0, 1))
        return loss


class CentredModule(nn.Module):
    """The same with a buffer that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(VOCABULARY))
        self.register_buffer("large", torch.zeros(1 << 17))

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(logits - self.centre.clone(), target)
        self.centre.mul_(0.5).add_(logits.detach().mean((0, 1)))
        self.large += 1
        return loss


LOSSES = {
    **batch_models.LOSSES,
    "centred": Centred(),
    "centred module": CentredModule(),
    "mean": cross_entropy,
    "sum": lambda logits, target: cross_entropy(logits, target, reduction="sum") / 256,
    "of each sample": lambda logits, target: (
        cross_entropy(logits, target, reduction="none").view(len(target), -1).mean(1)
    ),
    "counted": Counted(),
    "in a list": lambda logits, target: cross_entropy(logits, target)[None],
    "labelled": lambda logits, batch: cross_entropy(logits, batch.y),
    "mapping": lambda logits, batch: cross_entropy(logits, batch["labels"]["next"]),
    "pair": lambda logits, target: masked(logits, target),
    "dict": lambda logits, target: {
        "loss": masked(logits, target),
        "right": right_bytes(logits, target)["right"],
        "mean": cross_entropy(logits, target),
    },
    "without": lambda logits, target: {"entropy": cross_entropy(logits, target)},
    "some words": lambda logits, target: cross_entropy(logits, target.where(target > 20, -100)),
}


def job(
    data: Any,
    *,
    model: str = "gpt",
    optimizer: str = "adamw",
    steps: int = 20,
    global_batch: int = 16,
    clip_norm: float | None = None,
    warmup: bool = False,
    schedule: str = "",
    find_unused_parameters: bool = False,
    sees_batch: str = "global",
    layers: bool = True,
    tp_plan: bool = True,
    depth: int = 4,
    width: int = 32,
    num_workers: int = 0,
    unseeded: bool = False,
    precision: str = "fp32",
    save: str | None = None,
    save_format: str = "torch",
    init_from: str | None = None,
    init_strict: bool = True,
    loss: str = "mean",
    evaluate: dict[str, Any] | None = None,
    script: str = "",
) -> Job:
    """The job; every option is a variation that some test uses.

    Args:
        script: the job of this script of `tests.foreign` instead.
    """
    if script:
        return registry.job_of(script, steps)
    sizes = {"width": width, "depth": depth, "heads": 4, "context": CONTEXT, "vocabulary": VOCABULARY}
    make = MODELS.get(model)
    names, cuts = GPT.LAYERS, getattr(make, "TP_PLAN", GPT.TP_PLAN)
    if model == "llama":
        import llama  # needs Hugging Face's transformers, which may not be installed

        names, cuts = llama.plans(llama.config(**sizes))

        def make(**_: int) -> nn.Module:
            return llama.Llama(llama.config(**sizes))

    if model == "qwen3":
        import qwen3

        names, cuts, make = (), qwen3.tp_plan(**sizes), qwen3.Logits

    def factory() -> nn.Module:
        if unseeded:
            torch.seed()
        return make(**sizes)

    return Job(
        model=factory,
        loss=LOSSES[loss],
        data=data,
        optimizer=OPTIMIZERS[optimizer],
        global_batch=global_batch,
        steps=steps,
        seed=3,
        layers=names if layers else (),
        tp_plan=cuts if tp_plan else None,
        scheduler=unusual_optimizers.SCHEDULERS.get("warmup" if warmup else schedule),
        clip_norm=clip_norm,
        num_workers=num_workers,
        collate_fn=COLLATE_FNS.get(model, default_collate),
        precision=precision,
        find_unused_parameters=find_unused_parameters,
        sees_batch=sees_batch,
        save=save,
        save_format=save_format,
        init_from=init_from,
        init_strict=init_strict,
        evaluate=evaluation(**evaluate) if evaluate is not None else None,
    )


class Validation(Recorded):
    """Other samples of the same kind; a reading takes `pace_s`."""

    def __init__(self, samples: int, pace_s: float = 0.0) -> None:
        super().__init__(samples, pace_s)
        self._tokens = self._tokens.roll(5, 1)


def right_bytes(logits: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """Share of right bytes among the larger ones, as sum and weight, and the loss."""
    counts = target > 20
    right = (logits.argmax(-1) == target) & counts
    return {"right": (right.sum(), counts.sum()), "loss": cross_entropy(logits, target)}


def root(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Root of a mean, which is no mean."""
    return cross_entropy(logits, target).sqrt() + (logits.argmax(-1) == target).float().mean().square()


class Seen:
    """Counts samples in itself, as metrics of torchmetrics do."""

    samples = 0

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> float:
        self.samples += len(target)
        return float(self.samples)


METRICS: dict[str, Any] = {
    "": None,
    "root": root,
    "seen": Seen(),
    "right": right_bytes,
    "worse": lambda logits, target: float(next(WORSE)),
}
WORSE = iter(range(1_000_000))


def evaluation(*, samples: int = 37, pace_s: float = 0.0, metric: str = "", **options: Any) -> Evaluation:
    """An evaluation of the job."""
    return Evaluation(data=Validation(samples, pace_s), metric=METRICS[metric], **options)


def rank(
    result: Path,
    *,
    samples: int = 128,
    pace_s: float = 0.0,
    way: str = "",
    record: str = "",
    filed: bool = False,
    unlike: str = "",
    stream: str | None = None,
    own_loop: dict[str, Any] | None = None,
    stand_in: bool | str = False,
    refuses: bool = False,
    **options: Any,
) -> None:
    """Train on one rank, and save the requested samples and the final parameters.

    Args:
        way: run this one of `torch_limits` instead.
        record: folder for the complete state at both ends of every migration.
        filed: read samples from a data set that is opened by name.
        own_loop: train in a loop of the script's own; see `loop_of_its_own`.
        stand_in: train as if on a GPU, and save what its stand-in recorded; "alone": no other process reads its memory.
        refuses: refuse a first step with another loss, as after `clusterd resume`.
        unlike: entry of the rank file; processes in which it differs have other data.
        stream: read the samples as a stream of this kind; see `Streamed`.
    """
    if way:
        rank_file = json.loads(Path(os.environ["CLUSTERD_RANK_FILE"]).read_text())
        torch_limits.attempt(way, rank_file["rank"], rank_file["master_port"])
        return
    if refuses:
        os.environ[SAME_VARIABLE] = "1"
    gpu = use_stand_in() if stand_in else None
    if gpu is not None:
        gpu.refuses_handles = stand_in == "alone"
    if record:
        recorded_state.record(Path(record))
    data = (Filed if filed else Recorded)(samples, pace_s)
    if unlike:
        data.shift(json.loads(Path(os.environ["CLUSTERD_RANK_FILE"]).read_text())[unlike])
    if stream is not None:
        data = STREAMS.get(stream, Streamed)(data, stream)
    left: dict[str, Any] = {"called": []}

    def on_end(training: Training) -> None:
        left["parameters"] = {name: projections(p) for name, p in build.named_parameters(training.parallel.module)}
        left["sums"] = {n: whole(p).double().sum().item() for n, p in build.named_parameters(training.parallel.module)}
        left["step"], left["saved"] = training.step, Path(training.job.save or "").is_file()
        left["buffers"] = {
            build.global_name(name): b.double().sum().item() for name, b in training.parallel.module.named_buffers()
        }
        left["optimizer"] = {
            name: {slot: list(getattr(value, "shape", ())) for slot, value in slots.items()}
            for name, slots in training.optimizer.state_by_name().items()
        }

    try:
        # The data of a foreign script is its own.
        pause_s = pace_s if options.get("script") else 0.0
        task = job(data, **options)
        task = replace(task, **callbacks(task, left["called"], pause_s))
        if (loop := registry.LOOPS.get(options.get("script", ""))) is not None:
            run_loop(task, on_end, loop)
        elif own_loop is None:
            rank_main.run(task, on_end)
        else:
            with rank_main.session(task, on_end) as run:
                loop_of_its_own(run, left, **own_loop)
            left["outcome"] = run.outcome.step if run.outcome is not None else None
    finally:
        if gpu is not None:
            left["gpu"] = {
                "calls": gpu.calls,
                "limits": gpu.limits,
                "registered": len(gpu.registered),
                "opened": len(gpu.opened),
                "waits": gpu.places.waits,
            }
        result.write_text(json.dumps({**left, "asked": getattr(data, "asked", [])}))


def run_loop(task: Job, on_end: Any, loop: Any) -> None:
    """Train in the loop of a script; variables here change no more than a script's would."""
    with rank_main.session(task, on_end) as run:
        loop(run)


class Counter:
    """Counts, and keeps a small table, as an object of a script would."""

    def __init__(self) -> None:
        self.count, self.table = 0, torch.zeros(3, dtype=torch.float64)

    def add(self) -> None:
        self.count += 1
        self.table[self.count % 3] += self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.table = state["count"], state["table"]


def loop_of_its_own(
    run: Any,
    left: dict[str, Any],
    *,
    evaluate_every: int = 0,
    leave_after: int = 0,
    skip: int = 0,
    reads: bool = True,
    alone: str = "",
) -> None:
    """A loop as users write it: losses, evaluation and logging between steps."""
    counter = Counter()
    run.register("counter", counter)
    left["losses"] = []
    for step, batch in run:
        if step == skip:
            continue
        out = run.step(batch)
        counter.add()
        left["count"], left["table"] = counter.count, counter.table.tolist()
        if reads:
            left["losses"].append(out.loss)
        if evaluate_every and step % evaluate_every == 0:
            run.log(val=run.evaluate(Validation(37)), both=run.evaluate(Validation(37), right_bytes))
        if step == 3 and alone == "evaluates" and run.is_main:
            run.evaluate(Validation(37))
        if step == leave_after or (step == 3 and alone == "leaves" and run.is_main):
            break


def callbacks(task: Job, called: list[Any], pause_s: float = 0.0) -> dict[str, Any]:
    """Callbacks that record their calls, pause the training, and call the job's own."""

    def record(name: str, *arguments: Any) -> None:
        called.append([name, *arguments])
        time.sleep(pause_s)
        if (own := getattr(task, name)) is not None:
            own(*arguments)

    return {name: partial(record, name) for name in ("on_step", "on_evaluate", "on_checkpoint")}


def projections(parameter: Any) -> list[float]:
    """A few numbers that depend on every element of a parameter, whole or sharded."""
    flat = whole(parameter).cpu().double().reshape(-1)
    directions = torch.randn(3, flat.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    return (directions @ flat).tolist()


def whole(parameter: Any) -> torch.Tensor:
    """A parameter gathered from its shards."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
