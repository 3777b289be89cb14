"""Logins of other people, which print what they like, and their agents, which outlive a restart of the daemon.

The users are real ones, made for the test and removed after it, so it needs root.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from clusterd.daemon.hosts.links import REASONS_MAX
from clusterd.outside_text import LINE_LETTERS_MAX
from tests.conftest import until
from tests.scenarios.people import Person, Site, needs_users, people, site, start_and_let_in

__all__ = ["people", "site"]  # fixtures

pytestmark = needs_users


def agents_of(person: Person) -> list[str]:
    found = subprocess.run(["pgrep", "-u", person.name, "-f", "/agent-"], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.slow
def test_a_member_s_login_that_prints_without_end_is_one_row(site: Site, people: tuple[Person, Person]) -> None:
    """Regression: it grew the journal by megabytes a minute, and everybody's history with it."""
    ann, bob = people
    site.settings('accounts = "own"\n')
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "1", "node")
    key = ann.calls(site.socket, "login")["key"]
    for person, endless in ((ann, "tr '\\0' x </dev/zero"), (bob, "date +%N; printf '\\033]0;mine\\007'; exit 1")):
        (person.home / ".ssh/authorized_keys").unlink(missing_ok=True)
        person.lets_in(f'command="{endless}" {key}')

        def why(person: Person = person) -> str:
            return str(person.calls(site.socket, "login")["hosts"]["node"])  # dials at once

        def has_failed_often() -> bool:
            times = re.search(r"\((\d+) times since [\d:]+\)$", why())
            return times is not None and int(times[1]) > REASONS_MAX

        until(has_failed_often, explain=site.cluster.log)
        assert why().isprintable()
        assert len(why()) < LINE_LETTERS_MAX + 40
        history = site.cluster.call("history")
        failures = [event for event in history["events"] if event.get("account") == person.name]
        assert len(failures) <= REASONS_MAX + 1
        assert len(json.dumps(history)) < 100_000


def test_a_host_that_is_removed_keeps_no_agent_of_a_person(site: Site, people: tuple[Person, Person]) -> None:
    """Regression: after a restart only accounts with jobs were dialed, and the others' agents ran on for ever."""
    ann, _ = people
    start_and_let_in(site, ann)
    assert agents_of(ann)
    site.cluster.run("stop")
    site.cluster.start()
    site.cluster.wait_until_up(1)
    assert site.cluster.run("host", "remove", "node").stderr == "node is removed\n"
    until(lambda: not agents_of(ann))


@pytest.mark.slow
def test_agents_that_cannot_be_ended_with_their_host_are_named(site: Site, people: tuple[Person, Person]) -> None:
    ann, _ = people
    start_and_let_in(site, ann)
    site.cluster.run("stop")
    (ann.home / ".ssh/authorized_keys").unlink()
    site.cluster.start()
    site.cluster.wait_until_up(1)
    removed = site.cluster.run("host", "remove", "node").stderr
    assert f"an agent of {ann.name} may still run on node, which could not be asked: " in removed
    assert "node is removed\n" in removed
    assert agents_of(ann)
