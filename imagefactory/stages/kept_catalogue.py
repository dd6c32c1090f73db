"""The catalogs that a reader keeps, so that a registry may be down and an old catalog cannot come back.

    <cache>/catalogues/<64 hex>             the last good catalog of a place, as it came
    <cache>/catalogues-seen/<64 hex>        when that was made

The names are sha256 sums of the place's name. Nothing here is trusted: whoever reads a kept catalog verifies
its signature and its time again. A cache that fails keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from imagefactory.trust.catalog import LARGEST
from imagefactory.serialize import format_time
from imagefactory.errors import StatementError
from imagefactory.fs import remove_inside, replace_bytes, replace_text

MOST = 16
"""Catalogs that are kept; the one that was not used for the longest time goes first."""
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCatalogue:
    """The kept catalog of a place, in the folder of the cache. `where` is the place's name."""

    cache: Path
    where: str

    @property
    def path(self) -> Path:
        return self.cache / "catalogues" / self._name

    @property
    def seen_path(self) -> Path:
        return self.cache / "catalogues-seen" / self._name

    @property
    def _name(self) -> str:
        return hashlib.sha256(os.fsencode(self.where)).hexdigest()

    def read(self) -> bytes:
        """Return the kept bytes, none where there are none that can be read."""
        with contextlib.suppress(OSError):  # somebody else's may be read only
            os.utime(self.path)
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            return file.read(LARGEST + 1)
        return b""

    def seen(self) -> str:
        """Return when the newest catalog that was seen of this place was made, empty if not known."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = self.seen_path.read_text(encoding="ascii")
            return text if _TIME.fullmatch(text) else ""
        return ""

    def refuse_older(self, made: datetime) -> None:
        """Raise StatementError for a catalog that is older than the newest that was seen of this place."""
        seen, text = self.seen(), format_time(made)
        if seen > text:
            raise StatementError(
                "catalog-rolled-back",
                f"{self.where} has a catalog of {text}, older than the one of {seen} that was there before",
                hint="ask the project's maintainers for a new catalog; if they restored this one: "
                f"rm {self.seen_path}",
            )

    def write(self, data: bytes, made: datetime) -> None:
        """Keep a catalog that was verified, and remember when it was made."""
        with contextlib.suppress(OSError):
            if data != self.read():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace_bytes(self.path, data)
                self._forget_others()
        with contextlib.suppress(OSError):
            self.seen_path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.seen_path, format_time(made))

    def _forget_others(self) -> None:
        files = [path for path in self.path.parent.iterdir() if path.is_file()]
        for path in sorted(files, key=lambda path: -path.stat().st_mtime_ns)[MOST:]:
            remove_inside(self.path.parent, path)
