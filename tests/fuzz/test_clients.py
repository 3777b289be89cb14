"""Requests of clients with odd arguments: answered or refused, by a daemon that then starts again on its journal.

The real verbs of a daemon in a simulation, behind the check of arguments that the socket makes.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterd import protocol
from clusterd.daemon.api.server import checked_arguments
from clusterd.errors import ClusterError
from clusterd.rows import pack
from tests.fuzz import examples, one_of
from tests.soak import checks
from tests.soak.daemon import OPERATOR
from tests.soak.simulation import Simulation, in_simulation

ODD_NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -1.5, 1e308, float("inf"), float("nan")]
)
ODD_TEXTS = st.sampled_from(
    ["1", "2", "host0", "host0:0", "", " ", "-1", "1:any", "../x", "a\nb", "\udcff", "x" * 3000, "0" * 64]
)
PLAIN = st.none() | st.booleans() | ODD_NUMBERS | ODD_TEXTS | st.text(max_size=4) | st.binary(max_size=4)
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ODD_TEXTS, inner, max_size=2), max_leaves=3
)
FIELDS = one_of(
    "name kind command workdir snapshot python env datasets secrets priority guaranteed preemptible tenant after "
    "time_limit_s stall_s grace_s retries retry_on snapshot_every checkpoint_directory checkpoint_every_s "
    "target_loss interactive waits_for_hosts array trials account user"
)
RESOURCES = one_of(
    "devices kind cpus memory_bytes plan plans hosts nodes device_name device_memory_bytes compute_capability "
    "constraint min_devices max_devices"
)
VERBS = one_of(
    "submit dry_run cancel requeue hold release priority edit host_drain host_undrain claim_add claim_remove "
    "job why history jobs steps migrate tasks arrays snapshot_put host_add forget"
)
SOUND = {"name": "x", "command": ["sim", "5", "ok", "obeys"], "workdir": "/work", "waits_for_hosts": True}


Asked = tuple[str, dict[str, Any]]
"""A verb and its arguments."""


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A verb with arguments, some of which fit."""
    verb = draw(VERBS)
    if verb in ("submit", "dry_run"):
        odd = draw(st.dictionaries(FIELDS, VALUES, max_size=2))
        resources = draw(st.dictionaries(RESOURCES, VALUES, max_size=2))
        return verb, {"spec": {**SOUND, **odd, **({"resources": resources} if resources else {})}}
    names = "job host claim also now hold priority why devices reason from_s for_s drain changes limit digest"
    arguments = draw(st.dictionaries(st.sampled_from(names.split()), VALUES, max_size=2))
    if verb in ("host_drain", "host_undrain"):
        arguments.setdefault("host", "host0")
    elif verb == "claim_add":
        arguments = {"devices": ["host0"], "reason": "a check", **arguments}
    elif verb == "edit":
        arguments = {"job": "1", "changes": draw(st.dictionaries(FIELDS, VALUES, max_size=2)), **arguments}
    elif verb != "host_add":
        arguments.setdefault("job", "1")
    return verb, arguments


@examples(25)
@given(asked=st.lists(requests(), min_size=1, max_size=12))
def test_odd_requests_are_answered_or_refused_and_leave_a_sound_journal(
    asked: list[Asked],
) -> None:
    async def ask(simulation: Simulation) -> None:
        await simulation.begin()
        await simulation.call("submit", spec=SOUND)
        for verb, arguments in asked:
            answering = simulation.life.verbs[verb] if simulation.life.verbs else None
            assert answering is not None, "the daemon is gone"
            try:
                sent = protocol.decode(protocol.encode(arguments)[4:], "backslashreplace")
            except (protocol.ProtocolError, OverflowError):
                continue
            with contextlib.suppress(ClusterError):
                pack(await simulation.call(verb, **checked_arguments(answering, OPERATOR, sent, verb)))
        await asyncio.sleep(30.0)
        state, machines = simulation.state, simulation.network.machines.values()
        for what in (*checks.after_batch(state, machines), *checks.replay_equals(state, simulation.life.directory)):
            simulation.wrong(what)
        assert simulation.life.engine is not None
        assert simulation.life.engine.set_aside == 0
        simulation.life.kill()
        await asyncio.sleep(10.0)
        await simulation.serving()  # the next daemon reads what this one wrote

    assert in_simulation(1, ask).wrong == []


def test_the_directory_of_a_simulation_is_removed() -> None:
    places: list[Path] = []

    async def look(simulation: Simulation) -> None:
        places.append(simulation.life.directory)

    in_simulation(1, look)
    assert places and not places[0].exists()


def test_an_error_inside_a_simulation_is_raised() -> None:
    async def fail(_simulation: Simulation) -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        in_simulation(1, fail)


def test_arguments_inside_each_other_are_refused_as_the_client_s_mistake() -> None:
    """Regression: they were a bug of the daemon, with a page in its log for each."""

    async def verb(peer: object, spec: dict[str, Any]) -> None: ...

    deep: dict[str, Any] = {}
    for _ in range(1000):
        deep = {"a": deep}
    with pytest.raises(ClusterError, match="too many maps or lists inside each other"):
        checked_arguments(verb, OPERATOR, {"spec": deep}, "submit")
