"""Process groups and device mesh of a plan, created and destroyed together."""

from __future__ import annotations

import datetime
import hmac
import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from clusterd.train.parallel import build
from clusterd.train.process import accelerator, exits
from clusterd.train.process.context import Context
from clusterd.train.process.exits import ForeignObject, NoTorch, PlanRefused

_SIGNATURE_BYTES = 32
RENDEZVOUS_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 1800.0


def device_of(context: Context) -> torch.device:
    """Select this rank's device; CUDA is initialised here and not before.

    Raises:
        NoTorch: a CUDA device was assigned, but torch sees none or cannot compute on it.
        DeviceFault: other processes hold all of its memory.
    """
    kind = context.device_kind or ("cuda" if accelerator.is_there() else "cpu")
    if context.threads:
        torch.set_num_threads(context.threads)
    if kind != "cuda":
        return torch.device("cpu")
    if not accelerator.is_there():
        built = torch.version.cuda or "none"
        raise NoTorch(
            f"{context} has a CUDA device, but torch {torch.__version__} (CUDA {built}) cannot use it; "
            "the job's Python needs a torch built for this driver"
        )
    try:
        # The agent makes exactly one device visible; torchrun makes all.
        return accelerator.select(context.local_rank)
    except RuntimeError as error:
        refusal = exits.classify_error(error, where="")
        if isinstance(refusal, exits.DeviceOutOfMemory) and context.migration is None:
            # Nothing of this job is on the device yet: no other plan would fit either.
            full = "the GPU has no memory for a CUDA context: other processes hold it"
            raise exits.DeviceFault(f"{full}, {context}: {exits.first_line(error)}") from error
        if refusal is not None:
            raise
        raise NoTorch(f"{context} cannot compute on its CUDA device: {exits.first_line(error)}") from error


def rendezvous(context: Context, *, within: str = "") -> Any:
    """Key-value store that the ranks share; None for a single rank.

    Args:
        within: prefix of the keys, for ranks that are children of the job's: they connect to its store.
    Raises:
        PortTaken: rank 0 cannot listen on the rendezvous port.
    """
    if context.world_size == 1:
        return None
    try:
        if context.launcher == "torchrun" and not within:
            store, _, _ = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S)))
            return store
        store = _store(context, is_master=context.rank == 0 and not within)
        return dist.PrefixStore(within, store) if within else store
    except Exception as error:
        refusal = exits.classify_error(error, where=f"{context} at {context.master_addr}:{context.master_port}")
        if refusal is None:
            raise
        raise refusal from error


def dumps(context: Context, value: Any) -> bytes:
    """Object as the other ranks take it: pickled, and signed.

    Every account on the host can connect to the ranks' ports, and a pickle is code.
    """
    pickled = pickle.dumps(value)
    return hmac.digest(context.group_token.encode(), pickled, "sha256") + pickled


def loads(context: Context, signed: bytes) -> Any:
    """Object that another rank signed with `dumps`.

    Raises:
        ForeignObject: it comes from another process.
    """
    signature, pickled = signed[:_SIGNATURE_BYTES], signed[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(context.group_token.encode(), pickled, "sha256")):
        raise ForeignObject(f"{context} got an object that no rank of its job has sent: other processes use its ports")
    return pickle.loads(pickled)


class _Pickler:
    """Takes the place of `pickle.Pickler` in torch's collectives of objects."""

    def __init__(self, context: Context, file: IO[bytes]) -> None:
        self._context, self._file = context, file

    def dump(self, value: Any) -> None:
        self._file.write(dumps(self._context, value))


class _Unpickler(_Pickler):
    """Takes the place of `pickle.Unpickler`."""

    def load(self) -> Any:
        return loads(self._context, self._file.read())


@contextmanager
def process_groups(context: Context, device: torch.device, store: Any = None) -> Iterator[Any]:
    """Mesh of those of (pp, dp, tp) along which the context's plan has several ranks; None without any.

    A group of one rank would cost the device the buffers of a communicator, and one of all ranks exists already. FSDP2
    alone needs a mesh for one rank as well. All groups are destroyed at the end: they hold threads and sockets.

    Args:
        store: of the ranks; default: as of `rendezvous`.
    Raises:
        PortTaken: rank 0 cannot listen on the rendezvous port.
    """
    plan = context.plan
    if context.world_size == 1 and plan.zero < 2:
        yield None
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"rank": context.rank, "world_size": context.world_size}
    options["timeout"] = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    # No device_id: with two backends torch would try to split the mesh's groups from the first one, and fail
    # (pytorch issue 159200).
    options["store"] = store or rendezvous(context) or dist.HashStore()
    c10d = dist.distributed_c10d
    c10d._pickler, c10d._unpickler = partial(_Pickler, context), partial(_Unpickler, context)
    dist.init_process_group(backend, **options)
    from torch.distributed.device_mesh import init_device_mesh

    try:
        sizes = {"pp": plan.pp, "dp": plan.dp, "tp": plan.tp}
        used = {name: size for name, size in sizes.items() if size > 1 or (name == "dp" and plan.zero >= 2)}
        mesh = init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        if device.type == "cuda":
            _connect([None, *(mesh[name].get_group() for name in used if len(used) > 1 and used[name] > 1)], device)
        yield mesh
    except BaseException:
        # NCCL waits for ranks that may be gone; the process is about to end anyway.
        if device.type == "cpu":
            dist.destroy_process_group()
        raise
    if dist.is_initialized():  # not if it was aborted after a loss of peers
        dist.destroy_process_group()


def _connect(groups: Iterable[dist.ProcessGroup | None], device: torch.device) -> None:
    """Make NCCL create its communicators now, in one order on every rank; it does so at the first collective.

    Otherwise a pipeline's communicator would be created by a send between two stages, in which not all of its ranks
    take part.
    """
    if dist.get_world_size() == 1:
        return
    one = torch.ones(1, device=device)
    for group in groups:
        dist.all_reduce(one, group=group)
    accelerator.of(device).synchronize()


def _store(context: Context, *, is_master: bool) -> Any:
    by_torchrun = context.launcher == "torchrun"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"] if by_torchrun else context.master_addr,
        int(os.environ["MASTER_PORT"]) if by_torchrun else context.master_port,
        context.world_size,
        is_master=is_master,
        timeout=datetime.timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        wait_for_workers=False,
    )
    # A rank of an older generation that is slow to exit must not rendezvous with ranks of this one.
    return dist.PrefixStore(f"{context.job}.{context.attempt}.{context.generation}", store)


def check_same_model(model: nn.Module, device: torch.device) -> None:
    """Check on every rank that the model is the same on all.

    Raises:
        PlanRefused: it is not.
    """
    if not same_on_all_ranks(build.fingerprint(model), device):
        raise PlanRefused(
            "model() made different weights or buffers on different ranks; it must draw them from torch's, NumPy's or "
            "Python's global generator only"
        )


def same_on_all_ranks(value: int, device: torch.device) -> bool:
    """True if all ranks hold the same number (below 2**62)."""
    if not dist.is_initialized():
        return True
    pair = torch.tensor([value, -value], dtype=torch.int64, device=device)
    dist.all_reduce(pair, op=dist.ReduceOp.MAX)
    return int(pair[0]) == -int(pair[1])
