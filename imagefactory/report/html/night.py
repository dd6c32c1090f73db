"""The page of the last night in a report's site. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from imagefactory.extras.nightly.changes import NightReport
from imagefactory.report.html.templating import fill, policy
from imagefactory.extras.nightly.view import KINDS, format_took, headline, rows_of, title_of
from imagefactory.views.verdicts import format_ages

PAGE = "night.html"


def format_page(night: NightReport, given: Mapping[str, Any]) -> str:
    """`given` is what every page of the site has."""
    return fill(
        PAGE,
        **given,
        up="",
        policy=policy(),
        report=night,
        headline=headline(night),
        ages=format_ages(night.ages),
        took=format_took(night.started, night.ended),
        parts=[
            (kind, title, [(title_of(row), row) for row in rows_of(night, kind)]) for kind, title in KINDS
        ],
    )
