"""Admission of hosts that dial in: by whom, under which name, over which connection."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from clusterd.client import Client
from clusterd.config import Config
from clusterd.core.state import State
from clusterd.daemon.access import Access, Peer
from clusterd.daemon.api.hosts import JoinVerbs
from clusterd.errors import ClusterError, UsageError
from tests.conftest import RunningCluster

OPERATOR = Peer("olga", 54321, True)
IDENTITY = "0123456789abcdef"


class Admitted:
    """Stands in for the registry of hosts that dialed in: the refusals come before it."""

    async def admit(self, *_: Any) -> str:
        raise LookupError("admitted")


def join_verbs(accounts: str | None) -> JoinVerbs:
    config = Config(state_dir=Path("/nowhere"), socket=Path("/nowhere/sock"), accounts=accounts)
    return JoinVerbs(config, Admitted(), "cluster")  # type: ignore[arg-type]


@pytest.mark.anyio
@pytest.mark.parametrize("accounts", [None, "own"])
async def test_a_host_of_another_account_than_the_daemon_s_is_refused(accounts: str | None) -> None:
    with pytest.raises(ClusterError, match="a host of user olga would run the jobs of"):
        await anext(join_verbs(accounts).join(OPERATOR, IDENTITY, "pod"))


@pytest.mark.anyio
async def test_operators_of_a_shared_lab_may_join_hosts() -> None:
    with pytest.raises(LookupError, match="admitted"):
        await anext(join_verbs("shared").join(OPERATOR, IDENTITY, "pod"))


@pytest.mark.parametrize("verb", ["join", "join_output", "leave"])
def test_users_may_not_join_hosts(verb: str) -> None:
    with pytest.raises(ClusterError, match="user ann may not join hosts"):
        Access(State).admit(Peer("ann", 54322, False), verb, {})


def test_malformed_requests_are_refused(cluster: RunningCluster) -> None:
    cluster.start()
    with cluster.client() as client:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"identity": "../../x", "name": "pod"}, "identity"),
            ({"identity": IDENTITY, "name": "a:b"}, "no name of a host"),
            ({"identity": IDENTITY, "name": "x" * 100}, "no name of a host"),
            ({"identity": IDENTITY, "name": "pod", "options": {"cores": 1}}, "cores"),
            ({"identity": 7, "name": "pod"}, "identity"),
        ]
        for arguments, message in wrong:
            with pytest.raises(UsageError, match=message):
                next(client.stream("join", **arguments))
        for verb, given in (("leave", {}), ("join_output", {"process": 1})):
            with pytest.raises(UsageError, match="no host joined over this connection"):
                client.call(verb, **given)
        assert client.call("hosts") == []


def test_a_second_connection_of_a_host_replaces_the_first(cluster: RunningCluster) -> None:
    """A host that dials again has given the connection before up, though the daemon may not know that yet."""
    cluster.start()

    def joined(client: Client) -> Any:
        items = client.stream("join", identity=IDENTITY, name="pod")
        assert next(items)["name"] == "pod"
        assert next(items) == {"open": 1}
        return items

    with cluster.client() as one, cluster.client() as two:
        first = joined(one)
        # Output that is none of the bootstrap's is skipped, and that of an unknown process ignored.
        one.call("join_output", process=1, data=b"Welcome!\n")
        one.call("join_output", process=99, data=b"x")
        second = joined(two)
        assert not any("of" not in item for item in first)  # it ends, after what was queued
        assert "data" in next(second)
        cluster.run("host", "remove", "pod")
        assert {"removed": True} in list(second)
    assert cluster.call("hosts") == []


def test_the_calendar_shows_when_the_allocation_of_a_host_ends(cluster: RunningCluster) -> None:
    cluster.start()
    ends_s = time.time() + 3600.0
    with cluster.client() as client:
        joined = client.stream("join", identity=IDENTITY, name="pod", until_s=ends_s)
        assert next(joined)["name"] == "pod"
        (entry,) = cluster.call("calendar")
        assert (entry["what"], entry["host"], entry["from_s"]) == ("leaves", "pod", ends_s)
    shown = cluster.run("calendar").stdout.splitlines()[1].split()
    assert (shown[0], shown[3:]) == ("pod", ["its", "allocation", "ends"])
