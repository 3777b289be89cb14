"""Errors of GPUs: XIDs of the driver since boot, ECC errors, and which of them make a GPU unfit for jobs.

An XID is the number of a driver's error message in the kernel log. The kernel log has those since boot, where this user
may read it; elsewhere NVML's events have those since the agent started.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # longest record of /dev/kmsg
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")

FATAL_XIDS = {
    48: "uncorrectable ECC error",
    62: "its power controller halted",
    64: "faulty memory could not be retired",
    74: "NVLink error",
    79: "it fell off the bus",
    95: "uncontained memory error",
    119: "its firmware does not answer",
    120: "its firmware failed",
    140: "unrecovered ECC error",
    143: "it failed to initialise",
}
"""XIDs after which NVIDIA's catalog asks for a reset or an inspection; others follow from errors of programs."""

RECOVERY_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the host",
    3: "an end of all traffic between GPUs",
    4: "a reset of the GPU, which runs at reduced capacity",
    5: "a reset of its bus",
}
"""Actions that a driver (since 570) asks for."""


class Xids:
    """Counts of XIDs by PCI address."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self._found: dict[str, Counter[int]] = defaultdict(Counter)
        self._file: int | None = None
        with contextlib.suppress(OSError):  # absent in containers, for root alone on most systems
            self._file = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK)

    def of(self, pci_address: str) -> dict[int, int]:
        """Count of each XID of the GPU at this address."""
        return dict(self._found.get(_short(pci_address), {}))

    def add(self, pci_address: str, xid: int) -> None:
        """Take an NVML event; ignored where the kernel log has it, too."""
        if self._file is None:
            self._found[_short(pci_address)][xid] += 1

    def read(self) -> None:
        """Read what the kernel has logged since the last call."""
        if self._file is None:
            return
        while True:
            try:
                record = os.read(self._file, _RECORD_BYTES)
            except BrokenPipeError:  # the next records were overwritten before they were read
                continue
            except OSError:  # no further record
                return
            if not record:
                return
            for address, number in _XID.findall(record):
                self._found[_short(address.decode())][int(number)] += 1


def _short(pci_address: str) -> str:
    """Address without function, in lower case: 0000:3b:00; NVML gives the domain eight digits, the kernel four."""
    domain, _, rest = pci_address.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def fault(xids: Mapping[int, int], uncorrected: int, remap_failed: bool, recovery: int) -> str:
    """Reason why a GPU is unfit for jobs until it is reset or replaced; empty: it is fit.

    Args:
        xids: count of each since boot.
        uncorrected: ECC errors that were not corrected, since the driver was loaded or the GPU reset.
        remap_failed: faulty rows of its memory could not be replaced by spare ones.
        recovery: action that the driver asks for; 0: none, or not reported.
    """
    found = [
        f"XID {xid} ({FATAL_XIDS[xid]})" + (f" {count} times" if count > 1 else "")
        for xid, count in xids.items()
        if xid in FATAL_XIDS
    ]
    if uncorrected:
        found.append(f"{uncorrected} uncorrectable ECC error{'s' * (uncorrected > 1)}")
    if remap_failed:
        found.append("its memory has no spare rows left: it needs replacement")
    if recovery:
        found.append(f"its driver asks for {RECOVERY_ACTIONS.get(recovery, f'recovery action {recovery}')}")
    return "; ".join(found)
