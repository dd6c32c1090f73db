"""The templates of reports: every value that they show is escaped, none is ever markup."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from imagefactory.gpu.builds import platform_of
from imagefactory.progress import format_bytes
from imagefactory.extras.site.charts import format_number, format_numbers

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, number=format_number, numbers=format_numbers, day=_day)
    environment.filters["platform"] = platform_of
    return environment


def fill(template: str, **values: object) -> str:
    """The text of a template (`image.html`) with values, all of them escaped."""
    return _environment().get_template(f"{template}.jinja").render(**values)


def policy(script: str = "") -> str:
    """What a page may load: its own style, and the one script that stands in it, by its hash."""
    allowed = "'none'"
    if script:
        text = (TEMPLATES / script).read_text("utf-8").removesuffix("\n")
        sum_ = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed = f"'sha256-{sum_}'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'self' file: 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _day(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d}"
