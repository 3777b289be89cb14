"""The old side of a move: get ready while training goes on, then hand over what others need, and wait for the word.

Preparing runs in a thread beside the training loop. The handing over runs in the loop's own thread, between two steps
that all ranks agreed on; until the new ranks train, an abort lets this one go on with the next step as if nothing had
been.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol

import torch

from clusterd.train.migration.spec import Move, sums_to_bytes
from clusterd.train.parallel.apply_plan import Parallel
from clusterd.train.parallel.optimizers import RankOptimizer
from clusterd.train.process.context import Context
from clusterd.train.process.control import Control, Message
from clusterd.train.state import scalars
from clusterd.train.state.attributes import Attributes
from clusterd.train.state.copy_plan import LaidOut, Live, Whereabouts, copy_threads, piece_of, whereabouts
from clusterd.train.state.copying import Copies, fills
from clusterd.train.state.local_shards import check_boxes, holdings
from clusterd.train.state.segments import Segment, give_back

POLL_S = 0.1
TOUCHED_AHEAD_BYTES = 256 << 20
"""Of a CPU rank's segment, that are made ready while it trains; more would be memory beside that of a whole step."""
POLITE_SWITCH_S = 0.0005
"""How long the preparing thread may keep the interpreter from the training loop."""


class Trained(Protocol):
    """The part of `clusterd.train.rank_main.Training` that leaves."""

    context: Context
    device: torch.device
    parallel: Parallel
    optimizer: RankOptimizer
    attributes: Attributes
    scheduler: Any
    step: int


class Leaving:
    """Moves of one running rank, one at a time."""

    def __init__(self, training: Trained, control: Control) -> None:
        self._training, self._control = training, control
        self._news = threading.Condition()
        self._move: Move | None = None
        self._quiesce: str = ""  # id of the move that was asked to
        self._aborted: set[str] = set()
        self._ready = False  # the preparing thread is done, whether well or not
        self._failed = ""
        self._segment: Segment | None = None
        self._seen: tuple[Whereabouts, int] = {}, 0  # while preparing, and the step that was done by then
        self._laid_out: LaidOut | None = None
        control.on("move", self._on_move)
        control.on("quiesce", self._on_quiesce)
        control.on("abort", self._on_abort)

    def depart(self, at_s: float) -> str:
        """Between two steps, on every rank: hands over, and waits.

        Args:
            at_s: wall time of the end of the last step.
        Returns:
            "abort": to go on with the next step; "stop": to end.
        """
        with self._news:
            move = self._move
            # All agreed, but this rank has heard of the abort already.
            while move is not None and not (self._quiesce == move.id and self._ready):
                self._news.wait(POLL_S)
                move = self._move
                if self._control.requested("stop"):
                    return "stop"
        if move is None:
            return "abort"
        if not self._failed:
            try:
                self._hand_over(move, at_s)
            except Exception as error:  # the daemon decides what becomes of the move; this rank is as it was
                self._fail(move, "quiesce", error)
        return self._wait(move)

    def wait_for_move(self, timeout_s: float) -> Move | None:
        """Waits until there is a move to depart with; None if none came, or the rank is to stop."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while self._move is None and not self._control.requested("stop") and time.monotonic() < deadline:
                self._news.wait(POLL_S)
            return self._move

    def _hand_over(self, move: Move, at_s: float) -> None:
        with self._news:
            if self._move is not move:
                return
            # This thread's alone for as long as it copies: an abort must not unmap, or unpin, what is written to.
            segment, self._segment = self._segment, None
        try:
            self._fill(move, segment, at_s)
        finally:
            with self._news:
                if self._move is move:
                    self._segment = segment
                elif segment is not None:
                    segment.close()

    def _fill(self, move: Move, segment: Segment | None, at_s: float) -> None:
        training = self._training
        with self._news:
            laid_out, self._laid_out = self._laid_out, None
        live = holdings(training, move.shape)
        if laid_out is None or laid_out.whereabouts != whereabouts(live):
            live = check_boxes(training, move.shape, move.old_layout, training.context.rank)
            laid_out = None
        outbox = move.packing.outbox(training.context.rank)
        began_s = time.time()
        sums: list[int] = []
        if segment is not None:
            if outbox.size_bytes > TOUCHED_AHEAD_BYTES and training.device.type == "cpu":
                # The next step begins without gradients anyway; their room is the segment's now.
                training.optimizer.zero_grad()
                give_back()
                segment.touch_rest()
            copies = laid_out.copies if laid_out is not None else self._copies(move, segment, live)
            sums = copies.run(copy_threads(move.old.hosts, training.context.rank))
        copied = [began_s, time.time()] if sums else []
        if segment is not None:
            meta = {
                "step": training.step,
                "sums": sums_to_bytes(sums),
                "scalars": scalars.collect(training, move.shape),
            }
            self._control.ask("publish", name=move.outbox_name(training.context.rank), meta=meta)
        if move.makes_room:
            let_go(training, live)
        self._control.say("quiesced", id=move.id, step=training.step, at_s=at_s, copied=copied)

    def _copies(self, move: Move, segment: Segment, live: Live) -> Copies:
        tensors, parts = move.moves.old.tensors, move.packing.outbox(self._training.context.rank).parts
        return fills(segment, [piece_of(part, tensors[part.tensor], live, part.offset) for part in parts])

    def _wait(self, move: Move) -> str:
        """For the abort of `move`, or for the end."""
        while True:
            with self._news:
                if self._move is not move:
                    break
                # Python's signal handlers cannot wake a condition; they raise the flag that is looked at here.
                self._news.wait(POLL_S)
            if self._control.requested("stop"):
                return "stop"
        self._control.say("resumed", id=move.id, step=self._training.step)
        return "abort"

    # --- what the agent says, on the control thread -------------------------------------------------------------------

    def _on_move(self, message: Message) -> None:
        move_id = message["move"]["id"]
        with self._news:
            if move_id in self._aborted or (self._move is not None and self._move.id == move_id):
                return  # said again by an agent that was gone for a while
        try:
            move = Move.from_dict(message["move"])
        except (KeyError, TypeError, ValueError) as error:
            self._control.say("failed", id=move_id, phase="prepare", why=f"a move that cannot be read: {error}")
            return
        if self._training.context.rank in move.lost:
            return  # what this rank holds is older than what others hold
        with self._news:
            self._forget()
            self._move = move
            self._news.notify_all()
        # No daemon, for it may be within torch: see `snapshots`.
        threading.Thread(target=self._prepare, args=[move], name="clusterd-prepare").start()

    def _on_quiesce(self, message: Message) -> None:
        with self._news:
            if message["move"] in self._aborted:
                return
            self._quiesce = message["move"]
            self._lay_out()
            self._news.notify_all()
        self._control.request("quiesce", f"move {message['move']}")

    def _on_abort(self, message: Message) -> None:
        self._control.withdraw("quiesce")
        with self._news:
            self._aborted.add(message["move"])
            if self._move is not None and self._move.id == message["move"]:
                self._forget()
            self._news.notify_all()

    def _lay_out(self) -> None:
        """During the last step: what is to be copied, so that it need not be found out while nobody trains.

        Only where an update has left the state where it was. What a step puts elsewhere would be kept alive here, a
        second copy of the state, in a step that may have no room for it.
        """
        before, step = self._seen
        if self._move is None or self._segment is None or self._training.step <= step:
            return
        try:
            live = holdings(self._training, self._move.shape)
            if whereabouts(live) == before:
                self._laid_out = LaidOut(self._copies(self._move, self._segment, live), before)
        except Exception as error:  # it is found out once more, and told, between two steps
            print(f"clusterd: move {self._move.id}: not laid out ahead: {error}", flush=True)

    # --- beside the training loop -------------------------------------------------------------------------------------

    def _prepare(self, move: Move) -> None:
        rank = self._training.context.rank
        before = sys.getswitchinterval()
        sys.setswitchinterval(POLITE_SWITCH_S)
        try:
            digest = move.moves.digest
            outbox = move.packing.outbox(rank)
            scalars.collect(self._training, move.shape)
            seen = whereabouts(check_boxes(self._training, move.shape, move.old_layout, rank)), self._training.step
            segment = None
            if outbox.size_bytes:
                answer = self._control.ask("segment", name=move.outbox_name(rank), bytes=outbox.size_bytes)
                segment = Segment(answer["path"], size_bytes=outbox.size_bytes)
                if self._training.device.type == "cuda":
                    segment.touch()
                    segment.pin()
                else:
                    segment.touch(TOUCHED_AHEAD_BYTES)
        except Exception as error:  # any failure is the move's, never the training's
            self._fail(move, "prepare", error)
            return
        finally:
            sys.setswitchinterval(before)
        with self._news:
            if self._move is not move:
                if segment is not None:
                    segment.close()
                return
            self._segment, self._seen, self._ready = segment, seen, True
            self._news.notify_all()
        self._control.say("prepared", id=move.id, digest=digest, bytes=outbox.size_bytes)

    def _fail(self, move: Move, phase: str, error: Exception) -> None:
        with self._news:
            if self._move is not move:
                return
            self._ready, self._failed = True, str(error)
            self._news.notify_all()
        self._control.say("failed", id=move.id, phase=phase, why=f"{type(error).__name__}: {error}")

    def _forget(self) -> None:
        self._laid_out = None
        if self._segment is not None:
            self._segment.close()
        self._move, self._segment, self._ready, self._failed = None, None, False, ""
        self._seen = {}, 0


def let_go(training: Trained, live: Live) -> None:
    """Frees what was handed over, and gradients: this rank is only waited for by those who are to take its place."""
    training.optimizer.zero_grad()
    training.parallel.drop_buckets()
    for holding in live.values():
        for tensor in holding.tensors:
            if tensor is not None and tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back()
