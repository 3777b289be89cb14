"""Bookings of two people: each books within a quota, and the devices go to the owner's jobs alone."""

from __future__ import annotations

import time

from tests.scenarios.people import Person, Site, command, needs_users, people, site

__all__ = ["people", "site"]  # fixtures

pytestmark = needs_users


def test_two_people_book_within_their_quota(site: Site, people: tuple[Person, Person]) -> None:
    ann, bob = people
    site.settings(
        f'accounts = "shared"\n[limits]\nbooked_device_hours = 3\n[users.{bob.name}]\nbooked_device_hours = 0\n'
    )
    site.cluster.start()
    site.cluster.run("host", "add", "--yes", "--cpu-devices", "2", "node")
    refused = bob.calls(site.socket, "booking_add", devices=1, for_s=3600.0)
    assert refused.startswith(f"{bob.name} may book 0 device-hours in seven days (booked_device_hours of [users.")
    booking = ann.calls(site.socket, "booking_add", devices=2, for_s=3600.0)
    assert (booking["owner"], booking["devices"]) == (ann.name, ["node:cpu0", "node:cpu1"])
    refused = ann.calls(site.socket, "booking_add", devices=2, for_s=3600.0, from_s=time.time() + 86400.0)
    assert "1 of which are left then: 2 are asked for" in refused
    taken = site.cluster.run("book", "--devices", "1", "--for", "30m", check=False)
    assert taken.returncode == 1
    assert f"node:cpu0, node:cpu1 are booked by {ann.name} (booking 1) until" in taken.stderr
    others = bob.calls(site.socket, "booking_add", devices=1, for_s=60.0, user=ann.name)
    assert others == f"{bob.name} books for {bob.name} alone: ask {ann.name}, or an operator"
    # Nobody else's jobs get the devices, whatever booking they name, and nobody else cancels it.
    one = {"resources": {"devices": 1}}
    assert "there is no booking '1'" in bob.calls(
        site.socket, "submit", spec=command("theirs", "id", booking="1", **one)
    )
    waiting = bob.calls(site.socket, "submit", spec=command("waits", "true", **one))["id"]
    mine = ann.calls(site.socket, "submit", spec=command("mine", "sleep 600", booking="1", **one))["id"]
    site.cluster.wait_for(mine, lambda row: row["state"] == "running")
    assert site.cluster.job(waiting)["state"] == "queued"
    why = bob.calls(site.socket, "why", job=waiting)
    assert any(f"booked by {ann.name} (booking 1) until" in text for text in why["unusable"])
    assert (
        bob.calls(site.socket, "booking_cancel", booking="1") == f"booking 1 is {ann.name}'s: ask them, or an operator"
    )
    # Its owner does: the job ends, the devices go to others, and what was not used counts no more.
    ann.calls(site.socket, "booking_cancel", booking="1")
    site.cluster.wait_for(mine, lambda row: row["reason"] == "its booking 1 is over")
    site.cluster.wait_for(waiting, lambda row: row["state"] == "finished")
    later = ann.calls(site.socket, "booking_add", devices=2, for_s=3600.0, from_s=time.time() + 86400.0)
    assert later["id"] == "2"
