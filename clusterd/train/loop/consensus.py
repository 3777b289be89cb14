"""Consensus of all ranks after each step: global loss, raised request flags, parameters without gradient.

One all-reduce of a few numbers carries all three. It starts in step k, once gradients are complete, and is read after
step k + 1, so no rank and no GPU waits for it; a request therefore takes effect at most two steps after it arrived.

Where replicas could take over from a rank that dies, all ranks do wait for it before they change a parameter. A rank
that passes knows that every rank has the gradients of this step, so survivors never stay a step apart.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from clusterd.train.process import accelerator
from clusterd.train.process.control import OF_ALL, SIGNALS


class StepConsensus:
    """All-reduce of one step, in flight.

    Args:
        flags: of `SIGNALS`, in their order.
        missing: names of the parameters that got no gradient on this rank.
        values: further numbers to sum over ranks, as many on each.
        learning_rate: of the step, if known on the host.
    """

    def __init__(
        self,
        loss: torch.Tensor,
        flags: list[float],
        missing: Sequence[str] = (),
        values: Sequence[torch.Tensor] = (),
        learning_rate: float | None = None,
    ) -> None:
        self.learning_rate = learning_rate
        device = loss.device
        self.missing = list(missing)
        # Integers whose sum almost surely changes when the missing set of any rank does.
        checksum = float(sum(zlib.crc32(name.encode()) for name in self.missing) % (1 << 32))
        gpu = accelerator.of(device)
        known = torch.zeros(1 + len(flags), dtype=torch.float64, device=device)
        for place, value in enumerate((checksum, *flags)):
            if value:  # filled on the device, as a copy from the host would wait for it; a launch for each that is set
                known[place].fill_(value)
        self._vector = torch.cat([loss.double().reshape(1), known, *(value.double().reshape(1) for value in values)])
        self._work: Any = dist.all_reduce(self._vector, async_op=True) if dist.is_initialized() else None
        self._event: Any = None
        if gpu is not None:
            # Read through a side stream, so as not to wait for the next step's kernels on the main one.
            side = gpu.side_stream("consensus")
            side.wait_stream(gpu.current_stream())
            with gpu.on_stream(side):
                if self._work is not None:
                    self._work.wait()
                self._host = gpu.pinned(self._vector.shape, torch.float64)
                self._host.copy_(self._vector, non_blocking=True)
                self._event = gpu.record_event(side)
                gpu.hold(self._vector, side)

    def wait(self) -> None:
        """Wait until all ranks have joined."""
        if self._event is not None:
            self._event.synchronize()
        elif self._work is not None:
            self._work.wait()
            self._work = None

    def result(self) -> tuple[float, set[str]]:
        """Global loss, and the `SIGNALS` raised on any rank; the same on every rank."""
        loss, _, *counts = self._values()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        pairs = zip(SIGNALS, counts, strict=False)
        return loss, {name for name, count in pairs if count >= (ranks if name in OF_ALL else 0.5)}

    def sums(self) -> list[float]:
        """Sums of the further numbers over all ranks."""
        return self._values()[2 + len(SIGNALS) :]

    def missing_checksum(self) -> float:
        """Checksum of the missing gradients of all ranks; 0 if none is missing."""
        return self._values()[1]

    def _values(self) -> list[float]:
        self.wait()
        values: list[float] = (self._host if self._event is not None else self._vector).tolist()
        return values
