"""Sentence about the start of the first waiting job, as `why` and the terminal UI print it."""

from __future__ import annotations

import pytest

from clusterd.units import start_text


@pytest.mark.parametrize(
    ("at_s", "latest_s", "text"),
    [
        (50.0, 90.0, "starts at about 50, by 90 at the latest, when s1 and s2 end; nobody behind it may delay it"),
        (90.0, 90.0, "starts by 90 at the latest, when s1 and s2 end; nobody behind it may delay it"),
        (50.0, None, "starts when s1 and s2 end, expected at about 50; nothing tells when at the latest"),
        (30.0, 90.0, "starts when s1 and s2 end, by 90 at the latest; nobody behind it may delay it"),
        (30.0, None, "starts when s1 and s2 end; nothing tells when that is"),
        (None, None, "starts when s1 and s2 end; nothing tells when that is"),
        (30.0, 35.0, "starts when s1 and s2 end; nothing tells when that is"),
    ],
)
def test_no_time_that_has_passed_is_printed(at_s: float | None, latest_s: float | None, text: str) -> None:
    assert start_text(at_s, latest_s, ("s1", "s2"), 40.0, lambda at_s: f"{at_s:.0f}") == text


def test_names_of_many_jobs_are_cut() -> None:
    text = start_text(None, None, ("s1", "s2", "s3", "s4"), 0.0, str)
    assert text.startswith("starts when s1 and s2 and s3 ... end;")
    assert start_text(None, None, ("s1",), 0.0, str).startswith("starts when s1 ends;")
    assert start_text(9.0, 10.0, (), 0.0, str).endswith("as soon as devices are free; nobody behind it may delay it")
