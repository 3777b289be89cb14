"""Construction of a rank's module: from the factory, cut to a stage, every tensor under its global name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from clusterd.plans.plan import Plan
from clusterd.plans.stages import split_layers
from clusterd.train.process.exits import PlanRefused, Refused
from clusterd.train.process.seeding import seed_everything

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class Stage(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Consecutive layers of a model, applied in order, each at the path it has in the whole model.

    A layer ``blocks.7`` of the model is ``blocks.7`` here too, so that parameter names stay global on every stage.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self._layer_paths = tuple(layers)
        # In the model's order: of the names of a shared parameter, both know it by the same one.
        for path in (name for name, _ in model.named_modules(remove_duplicate=False) if name in layers):
            parent: nn.Module = self
            *containers, last = path.split(".")
            for name in containers:
                if name not in parent._modules:
                    parent.add_module(name, nn.Module())
                parent = parent.get_submodule(name)
            parent.add_module(last, model.get_submodule(path))

    def forward(self, *inputs: Any) -> Any:
        """Apply the layers; a tuple is passed on as several arguments."""
        for path in self._layer_paths:
            outputs = self.get_submodule(path)(*inputs)
            inputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return inputs if len(inputs) > 1 else inputs[0]


class Elsewhere(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """Tensor of another stage, without values: the script may change it, which has no effect, but not read it.

    Random numbers for it are drawn and dropped, as those that follow are then those of one process.
    """

    stage: Any = None  # of this rank

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        name, options = function.__name__, options or {}
        target = arguments[0] if arguments else options.get("tensor")  # by keyword in torch.nn.init
        if function == torch.Tensor.is_meta.__get__:
            return False  # some functions of torch.nn.init draw nothing for such a tensor
        changes = name == "__set__" or (name.endswith("_") and not name.startswith("__"))
        if name in _NO_VALUES or function == torch.Tensor.requires_grad.__set__:
            changes = False
        if changes and isinstance(target, (list, tuple)):
            own = [i for i, tensor in enumerate(target) if not isinstance(tensor, Elsewhere)]
            lists = [[a[i] for i in own] if isinstance(a, (list, tuple)) else a for a in arguments]
            return function(*lists, **options) if own else None
        if isinstance(target, Elsewhere):
            if any(draw in name for draw in _DRAWS) and (changes or name.endswith("_like")):
                arguments, options = tree_map_only(Elsewhere, cls._zeros, (arguments, options))
                drawn = function(*arguments, **options)
                return target if changes else drawn
            if changes:
                return target
            if function == torch.Tensor.grad.__get__ and target.requires_grad:
                return target.detach()  # there is a gradient on the other stage, not None
        given = (part for part in tree_leaves((arguments, options)) if isinstance(part, torch.Tensor))
        try:
            if name != "__reduce_ex__" and all(isinstance(part, Elsewhere) for part in given):
                return super().__torch_function__(function, types, arguments, options)
        except (RuntimeError, TypeError):  # it has no values
            pass
        raise PlanRefused(
            f"the script computes with a parameter or a buffer of another stage of the pipeline ({name.strip('_')}), "
            "of which this rank has no values; plans without pp leave the model whole"
        )

    @classmethod
    def _zeros(cls, tensor: torch.Tensor) -> torch.Tensor:
        device = next((own.device for own in cls.stage.parameters()), None)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


_DRAWS = ("normal", "uniform", "random", "bernoulli", "exponential", "rand")
_NO_VALUES = ("requires_grad_", "t_", "transpose_", "squeeze_", "unsqueeze_")
"""Functions that change a tensor, and not its values."""


def stage_of(model: nn.Module, layers: Sequence[str], plan: Plan, stage: int, weights: Sequence[int] = ()) -> Stage:
    """Stage of a pipeline; the rest of the model loses its values, as they would not be trained on this rank.

    Args:
        weights: of the layers, as whoever plans knows them; none: as the model has them.
    Raises:
        PlanRefused: there are fewer layers with parameters than stages.
    """
    paths = layer_paths(model, layers)
    try:
        cut = split_layers(weights[: len(paths)] or layer_weights(model, paths), plan.pp)[stage]
    except ValueError as error:
        raise PlanRefused(str(error)) from None
    made = Stage(model, [paths[i] for i in cut])
    Elsewhere.stage = made
    own = {id(tensor) for tensor in (*made.parameters(), *made.buffers())}
    for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values():
        if id(tensor) not in own:
            other = torch.empty_like(tensor, device="meta").as_subclass(Elsewhere)
            other._is_param = isinstance(tensor, nn.Parameter)
            other.requires_grad_(tensor.requires_grad)
            with suppress(RuntimeError):  # something else holds its memory
                torch.utils.swap_tensors(tensor, other)
    return made


def build_model(factory: Callable[[], nn.Module], seed: int, *, meta: bool = False) -> nn.Module:
    """Build the whole model under the job's seed, the same on every rank.

    Args:
        meta: without memory and values, for descriptions and layouts.
    Raises:
        Refused: the factory does not return a usable module.
    """
    seed_everything(seed)
    if meta:
        with torch.device("meta"):
            model = factory()
    else:
        model = factory()
    if not isinstance(model, nn.Module):
        raise Refused(f"model() returned {type(model).__name__}; it must return a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise Refused("model() returned a TorchScript module, which cannot be split; return the original module")
    if lazy := next((name for name, p in model.named_parameters() if is_lazy(p)), ""):
        raise Refused(f"{lazy} has no shape yet: call the lazy modules once in model(), or give them their sizes")
    if not model.training:  # as from `from_pretrained`; a model with some submodules in evaluation mode keeps them
        model.train()
    return model


def layer_paths(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Paths of the layers in order; a ModuleList counts as its items.

    Raises:
        Refused: a name is no submodule of the model.
    """
    paths: list[str] = []
    for name in layers:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            have = ", ".join(n for n, _ in model.named_children())
            raise Refused(f"layers names {name!r}, which is no submodule of the model; it has {have}") from None
        if isinstance(module, nn.ModuleList):
            paths += [f"{name}.{i}" for i in range(len(module))]
        else:
            paths.append(name)
    return paths


def layer_weights(model: nn.Module, paths: Sequence[str]) -> list[int]:
    """Weight of each layer, by which `plans.stages` cuts pipelines: bytes of the parameters that it computes with.

    They tell of its operations. The table of an embedding is looked up, so it weighs a byte. A parameter that several
    layers share counts for the first of them.
    """
    weights = [0] * len(paths)
    tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    looked_up = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    for name, parameter in named_parameters(model):
        if (layer := layer_of(name, paths)) >= 0:
            weights[layer] += min(parameter.nbytes, 1) if id(parameter) in looked_up else parameter.nbytes
    return weights


def layer_of(name: str, paths: Sequence[str]) -> int:
    """Index of the layer that contains a parameter or a buffer; -1: none."""
    return next((i for i, path in enumerate(paths) if name.startswith(path + ".")), -1)


def block_paths(model: nn.Module) -> list[str]:
    """Paths of the repeated blocks (items of the outermost module lists): the units of sharding and recomputation.

    The blocks of a list of lists are the items of the inner lists. A model without a list has its direct children as
    blocks. A container that is never called is no block: no hook would gather its parameters.
    """
    found: list[str] = []

    def walk(module: nn.Module, prefix: str, listed: bool) -> None:
        for name, child in module.named_children():
            if listed and _is_called(child):
                found.append(f"{prefix}{name}")
                continue
            # A stage holds the items of a list in a plain container with numbered children.
            numbered = type(child) is nn.Module and all(n.isdigit() for n, _ in child.named_children())
            items = numbered or isinstance(child, (nn.ModuleList, nn.Sequential))
            walk(child, f"{prefix}{name}.", listed or items)

    walk(model, "", listed=False)
    return found or [name for name, child in model.named_children() if _is_called(child)]


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)  # set by torch.compile


def global_name(name: str) -> str:
    """Name of a parameter without the prefixes that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Parameters under their global names, each once."""
    for name, parameter in module.named_parameters():
        yield global_name(name), parameter


def fingerprint(model: nn.Module) -> int:
    """Number that almost surely differs when initial weights do: a few values of every parameter and buffer, hashed."""
    total = 0
    tensors = [*(parameter for _, parameter in named_parameters(model)), *model.buffers()]
    for index, tensor in enumerate(tensor for tensor in tensors if not (tensor.is_complex() or tensor.is_sparse)):
        flat = tensor.detach().reshape(-1)
        probe = flat[:: max(1, flat.numel() // 16)][:16].double()
        bits = probe.view(torch.int64)
        total = (total * 31 + int(bits.sum()) + index) % (1 << 62)
    return total
