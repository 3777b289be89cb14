"""Telling systemd how the daemon is (`sd_notify`): ten lines of datagram, not a dependency."""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger(__name__)


def notify(message: str) -> None:
    """Send one notification; does nothing outside a systemd unit of ``Type=notify``."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(message.encode(), address)
        except OSError as error:  # it is systemd's to end us for that, by its watchdog
            log.warning("systemd does not hear us at %s: %s", address, error.strerror)
