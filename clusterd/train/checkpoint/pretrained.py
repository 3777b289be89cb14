"""Start from given weights: each rank reads its shards of them, under any plan."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from clusterd.plans.model_shape import ModelShape
from clusterd.train.checkpoint import export
from clusterd.train.checkpoint.weight_files import Part, Weights, global_names
from clusterd.train.parallel import build
from clusterd.train.process.exits import Refused
from clusterd.train.process.run_in_fork import run_in_fork
from clusterd.train.state.local_shards import local_shards
from clusterd.train.state.training import Training

NAMES_SHOWN = 5


def covers(weights: Weights, factory: Callable[[], nn.Module], seed: int) -> bool:
    """True if the files have every parameter and buffer of the model, so that it needs no values of its own."""
    found = global_names(weights)

    def has_all() -> bool:
        try:
            model = build.build_model(factory, seed, meta=True)
        except Refused:
            raise
        except Exception:  # it needs real tensors
            return False
        names = {name for name, _ in build.named_parameters(model)}
        buffers = {build.global_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
        return names | buffers <= set(found)

    return run_in_fork(has_all)


def load(training: Training, weights: Weights, *, strict: bool) -> None:
    """Fill parameters and buffers of this rank.

    Args:
        strict: the files must have all that the model saves, and nothing else.
    Raises:
        Refused: they differ from the model; with names.
    """
    shape, found = training.shape, global_names(weights)
    tied = {name: list(names) for names in shape.tied for name in names}
    unsaved = set(export.unsaved_names(training.parallel.module))
    live = {key: held for key, held in local_shards(training, shape).items() if key[1] in ("parameter", "buffer")}
    parts: dict[str, Part] = {}
    missing: list[str] = []
    for (name, _), held in live.items():
        there = next((found[other] for other in (name, *tied.get(name, ())) if other in found), None)
        local = held.tensors[0]
        assert local is not None
        if there is None:
            missing += [name] if name not in unsaved else []
            continue
        if weights.sizes[there] != (size := _whole_size(shape, name, tuple(local.shape))):
            raise Refused(f"{_place(training)} has {name} of shape {weights.sizes[there]}, but the model needs {size}")
        parts[there] = held.box, local
    known = {p.name for p in shape.parameters} | {b.name for b in shape.buffers} | {*tied}
    unexpected = sorted(set(found) - known)
    if missing or unexpected:
        text = f"{_place(training)} {' and '.join(filter(None, (_names('lacks', missing), _names('has', unexpected))))}"
        if strict:
            raise Refused(f"{text}, unlike the model; init_strict=False starts from what both have")
        if training.context.rank == 0:
            print(f"clusterd: {text}, unlike the model; the rest of it is as made", flush=True)
    weights.read(parts)
    for held in live.values():
        if held.mirror is not None and (local := held.tensors[0]) is not None:
            held.mirror.copy_(local)


def _place(training: Training) -> str:
    return f"init_from {training.job.init_from!r}"


def _names(verb: str, names: Collection[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(sorted(names)[:NAMES_SHOWN])
    return f"{verb} {shown}{f' and {len(names) - NAMES_SHOWN} more' if len(names) > NAMES_SHOWN else ''}"


def _whole_size(shape: ModelShape, name: str, local: tuple[int, ...]) -> tuple[int, ...]:
    return next((tuple(p.shape) for p in shape.parameters if p.name == name), local)
