"""Ranks of a proof: children of the job's ranks, which compare what a plan computes, and end.

A proof leaves nothing behind: models, generators, caches and CUDA contexts of the children end with them. The job's
ranks wait meanwhile, before they use a device.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.loop.peers import is_peer_loss
from clusterd.train.parallel import precision
from clusterd.train.parallel.mesh import device_of, dumps, loads, process_groups, rendezvous
from clusterd.train.process import accelerator, exits
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control
from clusterd.train.process.exits import DeviceOutOfMemory, Refused
from clusterd.train.process.job import Job
from clusterd.train.process.run_in_fork import start_fork
from clusterd.train.proof import split
from clusterd.train.proof.cuts import MODEL, Cut, Sides, choose_samples, comparisons
from clusterd.train.proof.results import Verdict, differs, judge
from clusterd.train.proof.split import Unclear

POLL_S = 0.2
FAILED = "failed"
"""Key in the store of a proof: one of its ranks has failed."""


def prove_split(
    job: Job,
    context: Context,
    control: Control,
    store: Any,
    *,
    given: Sequence[Any] | None = None,
    gathers: bool = False,
    limit: Callable[[torch.device], None] = lambda _: None,
) -> Verdict:
    """Compare the parts into which the plan cuts model and batch with the whole; every rank must call it.

    That is before it uses its device.

    Args:
        store: of the ranks; None for a single one.
        given: samples, the same on every rank; None: those of a map-style data set.
        gathers: the script compares the samples of replicas.
        limit: called with the device, to leave others the memory that they use.
    Raises:
        Refused: as the script's batches, loss and model raise it under the plan.
    """
    if accelerator.is_in_use():
        return Verdict(unclear="the script used CUDA before it called clusterd.train, and no child of it can")
    children = _Children(job, context, control, store, limit)
    verdict = Verdict()
    for sides in comparisons(context.plan):
        found = _compare(children, job, context, sides, given, gathers)
        verdict = replace(found, draws=verdict.draws or found.draws, too_large=verdict.too_large or found.too_large)
        if differs(verdict) or verdict.unclear:
            break
    return verdict


def _compare(
    children: _Children, job: Job, context: Context, sides: Sides, given: Sequence[Any] | None, gathers: bool
) -> Verdict:
    small = autocast = False  # in float32 cuts agree best; a model may need its own autocast to run at all
    while True:
        cut = Cut.of(context.plan, job.global_batch, gathers=gathers, small=small, most=len(given or ()))
        if given is not None and len(given) < cut.samples:
            return Verdict(unclear=f"{len(given)} samples of the stream are known before the first step")
        samples = choose_samples([given], cut.samples) if given is not None else []
        if given is None and context.rank == 0:
            samples = split.read_samples(job, cut)
        run = partial(children.run, samples=samples, cut=cut, autocast=autocast)
        kind, value = run(partial(split.prove, sides=sides))
        if kind == "result" and value.repeats:
            measured = [run(partial(split.measure, sides=sides, which=which)) for which in (0, 0, 0, 1)]
            kind, value = min(measured, key=lambda result: _KINDS.index(result[0]))
            if kind == "result":
                whole, *again, parts = (run for _, run in measured)
                value = judge(whole, again, parts, cut, sides)
        if kind == "result":
            verdict: Verdict = value
            return verdict
        if kind == "refusal":
            raise value
        if kind == "memory" and not small:
            small = True
        elif kind == "memory" and sides == MODEL:
            return Verdict(too_large=True)
        elif kind == "error" and not autocast:
            autocast = True
        else:
            return Verdict(unclear=value)


Result = tuple[str, Any]
"""One of `_KINDS`, and what the child found, the refusal or the reason."""

_KINDS = ("refusal", "memory", "error", "result", "ended")
"""Kinds of results; the first that a rank has is that of all."""


class _Children:
    """Children of the ranks, one of each at a time, that compute something together under the plan."""

    def __init__(
        self, job: Job, context: Context, control: Control, store: Any, limit: Callable[[torch.device], None]
    ) -> None:
        self._job, self._context, self._control, self._store, self._limit = job, context, control, store, limit
        self._number = 0

    def run(self, compute: Callable[..., Any], samples: list[Any], cut: Cut, autocast: bool) -> Result:
        """Result of `compute`, the same on every rank.

        Args:
            samples: on rank 0.
            autocast: let the script's own autocast be.
        """
        self._number += 1
        within = f"proof.{self._number}"

        def computed() -> Any:
            precision.watch_autocast(off=not autocast)
            return self._compute(compute, within, samples, cut)

        own = _run_child(computed, self._control, self._store, within)
        return own if self._store is None else self._agreed(own, within)

    def _agreed(self, own: Result, within: str) -> Result:
        store, ranks = self._store, range(self._context.world_size)
        store.set(f"{within}.{self._context.rank}", dumps(self._context, own))
        _wait(store, [f"{within}.{rank}" for rank in ranks], self._control)
        found: list[Result] = [loads(self._context, store.get(f"{within}.{rank}")) for rank in ranks]
        store.set(f"{within}.{self._context.rank}.read", b"1")
        if self._context.rank == 0:  # the store ends with this rank, which a refusal ends
            _wait(store, [f"{within}.{rank}.read" for rank in ranks], self._control)
        return min(found, key=lambda result: _KINDS.index(result[0]))

    def _compute(self, compute: Callable[..., Any], within: str, samples: list[Any], cut: Cut) -> Any:
        """Compute in a child."""
        context = self._context
        store = rendezvous(context, within=within)
        failed = threading.Event()
        if store is not None:
            threading.Thread(target=_watch, args=[rendezvous(context, within=within), failed], daemon=True).start()
        try:
            device = device_of(context)
            torch.set_num_threads(1)  # again: of a fork, which lacks the parent's OpenMP threads
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
            torch.compiler.set_stance("force_eager")
            self._limit(device)
            with process_groups(context, device, store) as mesh:
                shared = [samples]
                if dist.is_initialized() and dist.get_world_size() > 1:
                    dist.broadcast_object_list(shared, device=torch.device("cpu"))
                try:
                    found = compute(self._job, context, device, mesh, shared[0], cut)
                    if dist.is_initialized():
                        dist.barrier()  # no rank may end while another waits for what it sent
                except Exception as error:
                    if is_peer_loss(error):
                        os._exit(1)  # the other rank says why
                    raise
                return found
        except BaseException:
            failed.set()  # this process still has to say why
            if store is not None:
                with suppress(Exception):
                    store.set(FAILED, b"1")
            raise


def _wait(store: Any, keys: list[str], control: Control) -> None:
    """Wait for keys; end this rank on a stop, as it has done nothing yet."""
    while not store.check(keys):
        if control.requested("stop"):
            raise SystemExit(0)
        time.sleep(POLL_S / 20)


def _watch(store: Any, failed: threading.Event) -> None:
    """End this process if another rank of the proof has failed, for which it would wait in a collective."""
    with suppress(Exception):
        store.wait([FAILED], timedelta(days=1))
    if not failed.is_set():
        os._exit(1)


def _result(work: Callable[[], Any]) -> bytes:
    """Result of `work` as it is sent to the rank."""
    try:
        return pickle.dumps(("result", work()))
    except Exception as error:
        known = exits.classify_error(error, where="")
        if isinstance(known, DeviceOutOfMemory):
            return pickle.dumps(("memory", str(known)))
        if isinstance(known, Refused):
            return pickle.dumps(("refusal", known))
        is_plain = isinstance(known, Unclear)
        return pickle.dumps(("error", str(error) if is_plain else f"{type(error).__name__}: {exits.first_line(error)}"))


def _run_child(work: Callable[[], Any], control: Control, store: Any, within: str) -> Result:
    """Result of `work` in a forked child."""
    pid, file = start_fork(lambda: _result(work))
    reply = b""
    with file:
        while True:
            if select.select([file], [], [], POLL_S)[0]:
                if not (part := file.read(1 << 16)):
                    break
                reply += part
            elif control.requested("stop"):
                os.kill(pid, signal.SIGKILL)
                break
    _, status = os.waitpid(pid, 0)
    if reply and status == 0:
        result: Result = pickle.loads(reply)
        return result
    if not os.WIFSIGNALED(status) or control.requested("stop"):
        return "ended", "a process of the comparison ended without a result"
    if store is not None:  # it could not say so itself
        dist.PrefixStore(within, store).set(FAILED, b"1")
    if os.WTERMSIG(status) == signal.SIGKILL:
        return "memory", "it ran out of memory"
    return "error", f"it ended with signal {os.WTERMSIG(status)}"
