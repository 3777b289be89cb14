"""Valid addresses of hosts, and text that is refused before any program sees it."""

from __future__ import annotations

import pytest

from clusterd.errors import UsageError
from clusterd.ssh.resolve import Address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu01", Address("gpu01")),
        ("gpu01.lab.example.", Address("gpu01.lab.example.")),
        ("me@10.0.0.7", Address("10.0.0.7", "me")),
        ("me@10.0.0.7:2222", Address("10.0.0.7", "me", 2222)),
        ("gpu01:22", Address("gpu01", None, 22)),
        ("::1", Address("::1")),
        ("me@fe80::1%eth0", Address("fe80::1%eth0", "me")),
        ("me@[2001:db8::7]:2222", Address("2001:db8::7", "me", 2222)),
        ("[::1]", Address("::1")),
        ("user@corp@gpu01", Address("gpu01", "user@corp")),
        (" gpu01 ", Address("gpu01")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-oProxyCommand=reboot", "is no name"),
        ("-F/etc/passwd", "is no name"),
        ("-l@gpu01", "'-l' is no user name"),
        ("gpu01;reboot", "is no name"),
        ("gpu 01", "is no name"),
        ("$(reboot)", "is no name"),
        ("gpu01\n", None),
        ("gpu01\nHost x", "is no name"),
        ("", "is no name"),
        ("me@", "is no name"),
        ("gpu01:0", "'0' is no port"),
        ("gpu01:99999", "is no port"),
        ("gpu01:ssh", "is no port"),
        ("gpu01:", "is no port"),
        ("[::1", "write an IPv6 address with a port as [ADDRESS]:PORT"),
        ("[::1]x", "write an IPv6 address"),
        ("a" * 300, "is no name"),
    ],
)
def test_an_invalid_address_is_refused_in_one_line(text: str, message: str | None) -> None:
    if message is None:
        assert parse_address(text) == Address("gpu01")
        return
    with pytest.raises(UsageError) as refused:
        parse_address(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
