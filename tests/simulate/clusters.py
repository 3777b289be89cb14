"""States of clusters from which roll-outs begin."""

from __future__ import annotations

from clusterd.core import events as e
from clusterd.core.scheduler import Scheduler
from clusterd.core.state import State
from clusterd.simulate.cluster import parse_cluster


def cluster_of(cluster: str) -> State:
    """State of an empty cluster."""
    scheduler = Scheduler()
    facts = parse_cluster(cluster).facts()
    scheduler.handle(
        e.DaemonStarted(at_s=0.0, epoch=1),
        *(e.HostAdded(at_s=0.0, host=host) for host in facts),
        *(e.HostConnected(at_s=0.0, host=host, facts=each) for host, each in facts.items()),
    )
    return scheduler.state
