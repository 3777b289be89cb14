"""Lines of prose in the documentation are short enough to be read and compared."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTH = 100


def test_prose_of_the_pages_wraps() -> None:
    """Tables, code, headings and comments for tools may be longer, and a word that cannot be cut."""
    long = []
    for page in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"):
        text = re.sub(
            r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.M | re.S
        )
        for number, line in enumerate(text.splitlines(), start=1):
            exempt = line.startswith(("|", "#", "<", "!["))
            if len(line) > WIDTH and not exempt and " " in line.strip().removeprefix("- "):
                long.append(f"{page.name}:{number}")
    assert long == []
