"""The commands of a page for people, and a shell that runs them as somebody types them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_END = "@@ ended with"


def read_commands(page: Path) -> Mapping[str, list[str]]:
    """Heading -> its blocks of commands, a text each; headings without any are left out."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.MULTILINE)
    found = {
        heading: re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for heading, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return {heading: blocks for heading, blocks in found.items() if blocks}


def typed(block: str) -> str:
    """For bash: the lines of a block, each of which tells how it ended."""
    return "".join(f"{line}\necho '{_END}' $?\n" for line in block.splitlines())


def codes(said: str) -> list[int]:
    """How the lines ended."""
    return [int(code) for code in re.findall(rf"^{_END} (\d+)$", said, re.MULTILINE)]
