"""States of released versions are read as they were."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from clusterd.core.invariants import violations
from clusterd.core.scheduler import Scheduler
from clusterd.daemon.journal.engine import Engine
from clusterd.daemon.journal.journal import Journal
from tests.daemon.journal.kept_states import KEPT, summary


@pytest.mark.parametrize("kept", sorted(KEPT.glob("*.json")), ids=lambda path: path.stem)
def test_a_state_of_a_released_version_is_read_as_it_was(kept: Path, tmp_path: Path) -> None:
    """From its journal snapshot: a replay by another scheduler could decide otherwise than the one that ran.

    Where this fails after a change of the state's fields: `codec.ADDED` says how a field may be added.
    """
    (tmp_path / "journal.db").write_bytes(lzma.decompress(kept.with_suffix(".db.xz").read_bytes()))
    journal = Journal(tmp_path / "journal.db")
    try:
        engine = Engine(journal, Scheduler())
        assert engine.restore() == 0, "events were replayed in place of the snapshot"
    finally:
        journal.close()
    assert json.loads(json.dumps(summary(engine.scheduler.state))) == json.loads(kept.read_text())
    assert violations(engine.scheduler.state) == []
