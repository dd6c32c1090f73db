"""A night as it is read: in 80 columns, in an issue, as a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from imagefactory.extras.nightly.changes import NightlyRow
from imagefactory.extras.nightly.view import MOST, format_issue, format_nightly, page_values
from imagefactory.extras.site.pages import make_site
from imagefactory.trust.claims import VerdictAges
from imagefactory.views.verdicts import format_ages
from tests.made.night import NIGHT, night_report
from tests.made.report import catalog_report, many_images

HOSTILE = "</li><script>alert(1)</script> @somebody #1 `x` ``y`` [a](http://b)"


def test_a_mail_says_first_what_needs_somebody() -> None:
    assert format_nightly(night_report()).splitlines() == [
        "night of 2026-11-25 02:17 UTC, 3 h 12 min: 1 built, 1 verified, 1 broken, 1 due",
        "r.example/gpu: oldest verdict of 2026-09-06; 3 expire within 14 days",
        "",
        "broken",
        "  torch-2.3-cu121: its smoke test did not pass",
        "      hint: look",
        "",
        "built",
        "  jax-0.4-cu12",
        "",
        "verified",
        "  jax-0.4-cu12 on 8.0, 9.0",
        "",
        "due",
        "  tf-2.16-cu12 on 7.0: to verify, never verified",
    ]


def test_a_row_names_its_machines() -> None:
    row = NightlyRow(what="a", on="8.0", reason="no-gpu: none", exit_code=9, machines=("gpu07", "gpu08"))
    for text in (format_nightly(night_report(broken=(row,))), format_issue(night_report(broken=(row,)))):
        assert "no-gpu: none (gpu07, gpu08)" in text


def test_a_mail_has_80_columns_and_an_end() -> None:
    long = NightlyRow(what="torch-2.3-cu121", on="8.0", reason="word " * 60, hint="try " * 30, exit_code=9)
    lines = format_nightly(night_report(broken=(long,) * (MOST + 5))).splitlines()
    assert max(map(len, lines)) <= 80
    assert "  and 5 more" in lines


def test_ages_are_told_in_a_line() -> None:
    assert format_ages(VerdictAges(oldest=None, expiring=0)) == "no valid verdict"
    assert format_ages(VerdictAges(oldest=NIGHT, expiring=1)).endswith("; 1 expires within 14 days")


def test_an_issue_is_there_as_long_as_something_is_broken() -> None:
    assert format_issue(night_report(broken=())) == ""
    said = format_issue(night_report(broken=(), notes=("the last commit is 50 days old",)))
    assert "**`the last commit is 50 days old`**" in said
    said = format_issue(night_report())
    assert "- `torch-2.3-cu121`\n  - `its smoke test did not pass`\n    *hint:* `look`\n" in said
    many = format_issue(night_report(broken=night_report().broken * (MOST + 2)))
    assert "and 2 more" in many


def test_words_of_an_error_are_no_markup_of_an_issue() -> None:
    row = NightlyRow(what="a", reason=HOSTILE, exit_code=7)
    (line,) = (one for one in format_issue(night_report(broken=(row,))).splitlines() if "script" in one)
    assert line == f"  - ``` {HOSTILE} ```"


def test_the_site_has_the_last_night_and_links_it_where_there_was_one(tmp_path: Path) -> None:
    report = catalog_report(tmp_path, many_images(2))
    assert "oldest verdict of 20" in dict(make_site(report))["index.html"]
    assert not [
        name for name, text in make_site(report).items() if name == "night.html" or "night.html" in text
    ]
    row = NightlyRow(what="a", reason=HOSTILE, exit_code=7)
    site = dict(make_site(replace(report, night=page_values(night_report(broken=(row,))))))
    assert "<b>a</b>: &lt;/li&gt;&lt;script&gt;" in site["night.html"]
    assert 'href="night.html"' in site["index.html"]
    assert all('href="../night.html"' in text for name, text in site.items() if name.startswith("gpus/"))
    quiet = replace(report, night=page_values(night_report(built=(), verified=(), broken=(), due=())))
    assert "Nothing was to be done." in dict(make_site(quiet))["night.html"]


def test_no_error_ends_its_code_in_an_issue() -> None:
    """A blank line ends code in Markdown: what follows would mention people and show pictures."""
    row = replace(night_report().broken[0], reason="x\n\n@everyone ![a](https://b/c)\n\n- y", hint="`\n\n<b>")
    lines = format_issue(night_report(broken=(row,))).splitlines()
    (why,) = (line for line in lines if "@everyone" in line)
    assert why.strip().startswith("- `")
    assert why.endswith("`")
    assert not any(line.startswith(("@", "<", "!")) for line in lines)
