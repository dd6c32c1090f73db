"""What is whole, changed by somebody who means harm."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

HOSTILE = (
    *("", "null", "true", "-1", "0", "1e999", "9" * 40, "NaN", "[]", "{}", "[[]]", "''", '"\\u0000"', "\x00"),
    *(
        "../../etc/passwd",
        "/proc/self/fd/3/../..",
        "A" * 300,
        "-v",
        "--privileged",
        "$(id)",
        "`id`",
        "a\nb",
        "&a *a",
    ),
    *(
        "!!python/object:os.system",
        "\u202e",
        "\ud7ff",
        "sha256:",
        "https://u:p@h/",
        "[" * 5000,
        '{"a":' * 5000,
    ),
)
_TOKEN = re.compile(r"[A-Za-z0-9_./+=-]+|[\[\]{}:,\"']")


class Shown(bytes):
    """Bytes that a report of a failure does not write out: the line to reproduce it says them all."""

    def __repr__(self) -> str:
        return f"<{len(self)} bytes>"


@st.composite
def changed_bytes(draw: Any, data: bytes) -> bytes:
    """`data` with one to six places flipped, overwritten, cut out, doubled or cut off."""
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        span = draw(st.sampled_from((1, 2, 4, 8, 64, 512)))
        number = draw(
            st.sampled_from((0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
        )
        match draw(st.sampled_from(("flip", "set", "remove", "repeat", "cut"))):
            case "flip":
                data = (
                    data[:at]
                    + bytes((data[at] ^ (1 << draw(st.integers(0, 7))),) if data else ())
                    + data[at + 1 :]
                )
            case "set":
                value = number.to_bytes(8, draw(st.sampled_from(("little", "big"))))[:span]
                data = data[:at] + value + data[at + len(value) :]
            case "remove":
                data = data[:at] + data[at + span :]
            case "repeat":
                data = data[:at] + data[at : at + span] * draw(st.integers(1, 50)) + data[at:]
            case "cut":
                data = data[:at]
    return Shown(data)


@st.composite
def changed_text(draw: Any, text: str) -> str:
    """`text` with one to four of its words replaced by hostile ones, or its lines moved about."""
    for _ in range(draw(st.integers(1, 4))):
        words = list(_TOKEN.finditer(text))
        lines = text.splitlines(keepends=True)
        if draw(st.booleans()) and words:
            word = words[draw(st.integers(0, len(words) - 1))]
            other = words[draw(st.integers(0, len(words) - 1))].group()
            new = draw(st.sampled_from((*HOSTILE, other)) | st.text(max_size=12))
            text = text[: word.start()] + new + text[word.end() :]
        elif lines:
            at = draw(st.integers(0, len(lines) - 1))
            line = lines[draw(st.integers(0, len(lines) - 1))]
            lines[at : at + draw(st.integers(0, 2))] = [" " * draw(st.integers(0, 8)) + line]
            text = "".join(lines)
    return text
