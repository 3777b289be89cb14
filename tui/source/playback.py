"""Playback of a recording at any speed, forward and back."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterd.errors import ClusterError
from clusterd.tui.model import rows
from clusterd.tui.model.model import Item, Model
from clusterd.tui.model.view import Link, LinkState

if TYPE_CHECKING:
    from clusterd.submission.job_file import Request

MODEL_COPIES = 64
"""Number of model copies along the recording; seeking back starts from the nearest earlier one."""

WHOLE_S = 60.0
"""Default duration of a playback."""


class Player:
    """Position in a recording; `model` is the cluster's state at that instant."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Start at the baseline.

        Raises:
            ClusterError: the items are not a recording.
        """
        if not items or "snapshot" not in items[0]:
            raise ClusterError("not a recording: the first line must hold a snapshot")
        self._items = items
        times = [_at_s(item, number) for number, item in enumerate(items, 1)]
        self.start_s = next((at_s for at_s in times if at_s), 0.0)
        # Monotonic, so that an instant has one position: the clocks of hosts differ slightly.
        self._times = [self.start_s]
        for at_s in times[1:]:
            self._times.append(max(at_s or self._times[-1], self._times[-1]))
        self.end_s = self._times[-1]
        self.now_s = self.start_s
        self.speed = _power_of_two((self.end_s - self.start_s) / WHOLE_S)
        self.playing = True
        self._copy_every = max(len(items) // MODEL_COPIES, 1)
        self._copies: dict[int, Model] = {}
        self.index = 0  # of the last item that was applied
        self.model = Model()
        self._apply(0)

    def __len__(self) -> int:
        return len(self._items)

    def _apply(self, index: int) -> None:
        try:
            self.model.apply(self._items[index])
        except rows.Malformed as error:
            raise ClusterError(f"item {index + 1} of the recording cannot be read: {error}") from None
        self.index = index
        if index % self._copy_every == 0 and index not in self._copies:
            self._copies[index] = self.model.copy()

    def seek(self, index: int) -> None:
        """Go to item `index`; `model` is replaced by another object if that lies before the current item.

        Raises:
            ClusterError: an item on the way is invalid; the player pauses at the last valid one.
        """
        index = min(max(index, 0), len(self._items) - 1)
        if index < self.index:
            nearest = max(at for at in self._copies if at <= index)
            self.model, self.index = self._copies[nearest].copy(), nearest
        try:
            while self.index < index:
                self._apply(self.index + 1)
        except ClusterError:
            self.playing = False
            raise
        finally:
            self.now_s = self._times[self.index]

    def seek_time(self, at_s: float) -> None:
        """Go to the last item not after `at_s`."""
        self.seek(max(bisect_right(self._times, at_s) - 1, 0))
        self.now_s = min(max(at_s, self.start_s), self.end_s)

    def advance(self, seconds: float) -> bool:
        """Let `seconds` of real time pass; returns whether an item was applied. Pauses at the end."""
        if not self.playing:
            return False
        before = self.index
        self.seek_time(self.now_s + seconds * self.speed)
        if self.now_s >= self.end_s:
            self.playing = False
        return self.index != before

    def step(self, by: int) -> None:
        """Go this many items forward or back, and pause."""
        self.playing = False
        self.seek(self.index + by)

    def play(self) -> None:
        """Play or pause; restart from the beginning at the end."""
        if not self.playing and self.index >= len(self._items) - 1:
            self.seek(0)
        self.playing = not self.playing

    @property
    def share(self) -> float:
        """Fraction of the recorded time that has been played."""
        whole_s = self.end_s - self.start_s
        return (self.now_s - self.start_s) / whole_s if whole_s else 1.0


def _at_s(item: Mapping[str, Any], number: int) -> float:
    """Timestamp of an item; 0 if it has none."""
    try:
        return rows.read(rows.Seconds, item.get("at_s") or 0.0)
    except rows.Malformed as error:
        raise ClusterError(f"item {number} of the recording cannot be read: at_s: {error}") from None


def _power_of_two(value: float) -> float:
    speed = 1.0
    while speed < value:
        speed *= 2
    return speed


class RecordingSource:
    """Source that plays a recording: it emits nothing by itself; the application drives its player."""

    can_act = False
    environment: Mapping[str, str] = {}

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        self.player: Player | None = Player(items)

    async def items(self) -> AsyncIterator[Item | Link]:
        """Only the state of the link; the player provides the model."""
        yield Link(LinkState.REPLAY)
        await asyncio.Event().wait()

    def reject(self, why: str) -> None:
        """Nothing: the player raises on invalid items."""

    async def call(self, verb: str, **args: Any) -> Any:
        raise ClusterError("a recording answers no questions: attach to the daemon with clusterd top")

    async def stream(self, verb: str, **args: Any) -> AsyncGenerator[Any, None]:
        nothing: tuple[Any, ...] = ()
        for item in nothing:
            yield item
        raise ClusterError("a recording holds no logs")

    async def submit(self, request: Request) -> dict[str, Any]:
        raise ClusterError("a recording takes no jobs")

    async def close(self) -> None:
        """Nothing to release."""
