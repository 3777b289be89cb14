"""Objects that modules, the optimizer and the loss hold: helpers, containers, closures, classes; and generators.

Found anew at each call, by the names under which they are held, so that a helper that was replaced counts as the same.
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

OBJECTS_MAX, DEPTH_MAX, ITEMS_MAX = 2000, 6, 100
"""Limits for the objects of one rank, for how deep they are held, and for the items of a container."""

_CODE_OF_OTHERS = frozenset({
    "torch", "numpy", "builtins", "abc", "typing", "threading", "_thread", "queue", "logging", "io", "_io", "pathlib",
    "weakref", "multiprocessing", "concurrent", "asyncio", "socket", "ssl", "subprocess", "re", "enum", "tqdm",
    "clusterd",
})  # fmt: skip
"""Packages whose objects and classes are not looked into."""

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_TORCHS = frozenset({*vars(nn.Module()), "forward"})
"""Attributes of modules that are torch's own, and the wrapped forward method."""

_SAVED_ELSEWHERE = frozenset({"state", "param_groups"})
"""Attributes of an optimizer that are saved by other means."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF = "_optimizer_"
"""Beginning of the names under which an optimizer has hooks: what they keep may be of this plan's shards."""

SIMPLE = (bool, int, float, str, type(None), np.bool_, np.integer, np.floating)
_CONTAINERS = (list, tuple, deque, dict)
_SETS = (set, frozenset)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

VALUES_MAX = 20_000
"""Limit for a list or map; a longer one is a table."""


class Owner(NamedTuple):
    """An object, and its attributes as they are now."""

    value: Any
    attributes: dict[str, Any]

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Attributes, and the objects behind bound methods, partial functions and hooks."""
        for name, value in self.attributes.items():
            yield name, _behind(value)
        if isinstance(self.value, nn.Module):
            hooks = [_behind(hook) for kind in _HOOKS for hook in vars(self.value)[kind].values()]
            own = [hook for hook in hooks if not _is_of_others(hook)]  # plans add some
            yield from ((f"(hook {i})", hook) for i, hook in enumerate(own))


def owners(roots: Mapping[str, object]) -> dict[str, Owner]:
    """The roots, and the objects and user classes that they hold, by name."""
    found: dict[str, Owner] = {}
    seen = {id(root) for root in roots.values()}
    level = list(roots.items())
    for _ in range(DEPTH_MAX):
        following: list[tuple[str, object]] = []
        for name, value in level:
            found[name] = Owner(value, attributes(value))
            for kind in _user_classes(type(value)):  # type: ignore[arg-type]
                if id(kind) not in seen:
                    seen.add(id(kind))
                    found[f"(class) {kind.__module__}.{kind.__qualname__}"] = Owner(kind, attributes(kind))
            for attribute, part in found[name].parts():
                if isinstance(part, SIMPLE) or id(part) in seen or not _is_owner(part):
                    continue
                if len(found) + len(following) < len(roots) + OBJECTS_MAX:
                    seen.add(id(part))
                    following.append((path(name, attribute), part))
        level = following
    return found


def path(owner: str, attribute: str) -> str:
    """Name of what an owner holds."""
    owner = owner.rstrip(".")
    return f"{owner}{attribute}" if attribute.startswith("[") or not owner else f"{owner}.{attribute}"


def attributes(owner: object) -> dict[str, Any]:
    """Attributes of an object, a module's without torch's own; items of a container; variables of a closure."""
    if isinstance(owner, (list, tuple, deque)):
        return {f"[{i}]": value for i, value in enumerate(owner)} if len(owner) <= ITEMS_MAX else {}
    if isinstance(owner, dict):
        return {f"[{key!r}]": v for key, v in owner.items()} if len(owner) <= ITEMS_MAX else {}
    if isinstance(owner, types.FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        own = vars(owner) | {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
        defaults = {f"[{i}]": value for i, value in enumerate(owner.__defaults__ or ())} | (owner.__kwdefaults__ or {})
        return {k: v for k, v in defaults.items() if is_container(v) or isinstance(v, (torch.Tensor, np.ndarray))} | own
    if isinstance(owner, Globals):
        held = {name: owner.namespace[name] for name in sorted(owner.names & owner.namespace.keys())}
        return {name: value for name, value in held.items() if is_plain(value) or _is_state(value)}
    if isinstance(owner, type):
        return {k: v for k, v in vars(owner).items() if not k.startswith("__") and not hasattr(v, "__get__")}
    left_out = _SAVED_ELSEWHERE if isinstance(owner, torch.optim.Optimizer) else _TORCHS
    own = {n: v for n, v in getattr(owner, "__dict__", {}).items() if n not in left_out and not n.startswith(_HOOKS_OF)}
    for name in _slots(type(owner)):  # type: ignore[arg-type]
        if hasattr(owner, name):
            own[name] = getattr(owner, name)
    return own


class Globals:
    """Global variables of the script that functions of a model or a loss read.

    Attributes:
        namespace: of their module.
        names: of the variables.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.names: set[str] = set()


def script_globals(roots: Iterable[object]) -> dict[str, Globals]:
    """Global variables that the code of `roots` and functions it calls read, by module of the script."""
    found: dict[str, Globals] = {}
    kinds = {kind for root in roots for kind in _user_classes(type(root))}  # type: ignore[arg-type]
    hooks = [hook for root in roots if isinstance(root, nn.Module) for k in _HOOKS for hook in vars(root)[k].values()]
    waiting: list[Any] = [*roots, *hooks, *(value for kind in kinds for value in vars(kind).values())]
    seen: set[types.CodeType] = set()
    while waiting:
        function = _behind(getattr(value := waiting.pop(), "__wrapped__", value))
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        codes, namespace = [function.__code__], function.__globals__
        if not is_of_script(function.__module__, sys.modules.get(function.__module__)):
            continue
        while codes:
            code = codes.pop()
            seen.add(code)
            codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
            for name in set(code.co_names) & namespace.keys():
                found.setdefault(f"(script) {function.__module__}", Globals(namespace)).names.add(name)
                waiting.append(namespace[name])
        waiting += attributes(function).values()
    return found


def is_of_script(name: str, module: object) -> bool:
    """True for a module that is neither clusterd's nor a library's."""
    # Not by getattr: some modules import others when they are asked.
    file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
    if not isinstance(file, str) or name.partition(".")[0] == "clusterd":
        return False
    return not file.startswith(_LIBRARIES) and "/site-packages/" not in file and "/dist-packages/" not in file


class _Cells(dict[str, Any]):
    """Variables of a closure, as they are now."""

    def get(self, name: str, default: Any = None) -> Any:
        return self[name].cell_contents if name in self and _is_filled(self[name]) else default


def variables(owner: Any) -> Mapping[Any, Any]:
    """The attributes of an object, a map, a closure or a module, as they are now and will be later."""
    if isinstance(owner, types.FunctionType):
        return _Cells(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))
    if isinstance(owner, Globals):
        return owner.namespace
    found: Mapping[Any, Any] = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    return found


def places(roots: Mapping[str, object]) -> dict[str, tuple[Any, Any]]:
    """Numbers and texts that objects hold, by name: a map that has it now and will have it later, and the key there."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, owner in owners(roots).items():
        holder = variables(owner.value)
        for attribute, value in owner.attributes.items():
            at = path(name, attribute)
            if isinstance(value, SIMPLE) and attribute in holder:
                found[at] = holder, attribute
            elif isinstance(value, dict) and len(value) <= ITEMS_MAX and is_plain(value):
                found |= {f"{at}[{key!r}]": (value, key) for key, v in value.items() if isinstance(v, SIMPLE)}
    return found


def put(holder: Any, key: Any, value: Any) -> None:
    """Set what a place has, unless it is of a class."""
    if isinstance(holder, _Cells):
        holder[key].cell_contents = value
    elif not isinstance(holder, types.MappingProxyType):
        holder[key] = value


def assign(owner: Any, attribute: str, value: Any) -> None:
    """Set what `attributes` gave under this name; what cannot be set any more is left out.

    A list, a map, an array or a tensor of the same form gets the content: the script may hold the object itself.
    """
    now = attributes(owner).get(attribute)
    if type(now) is type(value) and _set_content(now, value):
        return
    if isinstance(owner, (list, deque)):
        if (index := int(attribute[1:-1])) < len(owner):
            owner[index] = value
    elif isinstance(owner, dict):
        key = next((key for key in owner if f"[{key!r}]" == attribute), None)
        if key is not None:
            owner[key] = value
    elif isinstance(owner, types.FunctionType):
        cells = dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))
        if attribute in cells:
            cells[attribute].cell_contents = value
        else:
            setattr(owner, attribute, value)
    elif isinstance(owner, Globals):
        owner.namespace[attribute] = value
    elif not isinstance(owner, tuple):
        setattr(owner, attribute, value)


def _set_content(now: Any, value: Any) -> bool:
    """Give an object the content of another of its type; False: it has another form, or cannot be changed."""
    if isinstance(now, (torch.Tensor, np.ndarray)):
        if now.shape != value.shape or now.dtype != value.dtype or (isinstance(now, torch.Tensor) and now.is_meta):
            return False
        if isinstance(now, np.ndarray):
            now[...] = value
        else:
            now.detach().copy_(value)
        return True
    if not isinstance(now, (list, deque, dict, set)):
        return False
    content = copy.copy(value)
    now.clear()
    (now.extend if isinstance(now, (list, deque)) else now.update)(content)
    return True


def is_plain(value: Any) -> bool:
    """True for numbers and text, and lists and maps of these."""
    return isinstance(value, SIMPLE) or (is_container(value) and _count(value) <= VALUES_MAX)


def is_container(value: Any) -> bool:
    """True for lists, tuples, queues, maps and sets."""
    return isinstance(value, (*_CONTAINERS, *_SETS))


def _count(value: Any) -> int:
    """Number of values inside; above the limit if some are not plain."""
    if isinstance(value, SIMPLE):
        return 1
    if not is_container(value) or hasattr(value, "_fields") or len(value) > VALUES_MAX:
        return VALUES_MAX + 1
    if isinstance(value, dict) and not all(isinstance(key, (int, str)) for key in value):
        return VALUES_MAX + 1
    parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
    total = 0
    for part in parts:
        total += _count(part)
        if total > VALUES_MAX:
            break
    return total


def has_state(value: object) -> bool:
    """True for an object that saves and loads its own state, other than those that are saved by other means."""
    others = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, type)
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, others) and all(map(callable, methods))


def generator_state(value: object) -> str | None:
    """State of a generator of any library as text; None: it is none, or draws from the system."""
    if isinstance(value, torch.Generator):
        return base64.b64encode(value.get_state().numpy().tobytes()).decode()
    if isinstance(value, np.random.Generator):
        return json.dumps(value.bit_generator.state, default=_listed)
    if isinstance(value, np.random.RandomState):
        return json.dumps(value.get_state(legacy=False), default=_listed)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return json.dumps(value.getstate())
    return None


def set_generator_state(value: Any, state: str) -> None:
    """Go on with a state of `generator_state`."""
    if isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
        return
    parsed = json.loads(state)
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = parsed
    elif isinstance(value, np.random.RandomState):
        value.set_state(parsed)
    else:
        value.setstate((parsed[0], tuple(parsed[1]), parsed[2]))


def seed_generator(value: Any, seed: int) -> None:
    """Seed a generator of any library."""
    if isinstance(value, torch.Generator):
        value.manual_seed(seed)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = type(value.bit_generator)(seed).state
    else:
        value.seed(seed % (1 << 32))


def generators(roots: Mapping[str, object]) -> dict[str, Any]:
    """Generators that objects hold, by name."""
    return {
        path(name, attribute): part
        for name, owner in owners(roots).items()
        for attribute, part in owner.parts()
        if isinstance(part, GENERATORS)
    }


@contextmanager
def preserved(root: object) -> Iterator[Callable[[], bool]]:
    """Context after which plain attributes of what an object holds, and its generators, are as before.

    Yields what tells whether some of these attributes have changed.
    """
    before = owners({"": root})
    plain = {name: copy.deepcopy({k: v for k, v in o.attributes.items() if is_plain(v)}) for name, o in before.items()}
    drawing = [part for owner in before.values() for _, part in owner.parts() if isinstance(part, GENERATORS)]
    states = [generator_state(part) for part in drawing]

    def changed() -> Iterator[tuple[Any, str, Any]]:
        for name, values in plain.items():
            now = attributes(before[name].value)
            for attribute, value in values.items():
                if attribute in now and now[attribute] != value:
                    yield before[name].value, attribute, value

    yield lambda: any(True for _ in changed())
    for owner, attribute, value in changed():
        assign(owner, attribute, value)
    for part, state in zip(drawing, states, strict=True):
        if state is not None:
            set_generator_state(part, state)


def keeps_something(function: Any) -> bool:
    """True for a hook that may keep something: a method, an object, or a function with variables of its own."""
    behind = _behind(function)
    return not isinstance(behind, types.FunctionType) or behind.__closure__ is not None


def _behind(value: Any) -> Any:
    if isinstance(value, SIMPLE):
        return value
    while True:
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)) and value.__self__ is not None:
            value = value.__self__
        else:
            return value


def _is_of_others(hook: Any) -> bool:
    """True for a hook of a library that is not looked into."""
    kind = hook if isinstance(hook, types.FunctionType) else type(hook)
    return kind.__module__.partition(".")[0] in _CODE_OF_OTHERS


def _is_state(value: Any) -> bool:
    """True for tensors, arrays, generators, and objects other than containers and modules."""
    if isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS)):
        return True
    return _is_owner(value) and not (is_container(value) or isinstance(value, (nn.Module, types.FunctionType)))


def is_looked_into(value: Any) -> bool:
    """True for an object of the script's own, or a container that holds some."""
    others = isinstance(value, (nn.Module, types.FunctionType, type, types.ModuleType))
    return not others and (_is_owner(value) or (has_state(value) and hasattr(value, "__dict__")))


def _is_owner(value: Any) -> bool:
    if isinstance(value, SIMPLE) or has_state(value):
        return False
    if isinstance(value, _CONTAINERS):
        return len(value) <= ITEMS_MAX and not is_plain(value)
    if isinstance(value, types.FunctionType):
        return value.__closure__ is not None or bool(vars(value))
    if isinstance(value, (type, types.ModuleType, torch.Tensor, torch.optim.Optimizer)):
        return False
    if type(value).__module__.partition(".")[0] in _CODE_OF_OTHERS:
        return False
    return hasattr(value, "__dict__") or bool(_slots(type(value)))  # type: ignore[arg-type]


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class and its bases."""
    named = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    every = [name for names in named for name in ((names,) if isinstance(names, str) else names)]
    return tuple(name for name in every if not name.startswith("__"))


@functools.cache
def _user_classes(kind: type) -> tuple[type, ...]:
    """A class and its bases, without those of libraries that are not looked into."""
    return tuple(each for each in kind.__mro__ if each.__module__.partition(".")[0] not in _CODE_OF_OTHERS)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _listed(value: Any) -> Any:
    return value.tolist()
