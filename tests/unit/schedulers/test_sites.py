"""The rows of sites.toml: read strictly, each with its source."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.cli.job import IMAGE_TYPES
from imagefactory.schedulers import sites
from imagefactory.schedulers.pool import ImageKind
from imagefactory.schedulers.sites import RETIRED, SITE_NAMES, SITES, find_site, read_sites
from imagefactory.settings.choices import SITES as SETTING_SITES
from tests.made.errors import fails

TEXT = Path(sites.__file__).with_suffix(".toml").read_text()


def test_every_need_is_of_sites_that_exist() -> None:
    needs = tomllib.loads(TEXT)["need"]
    assert all(need["sites"] and set(need["sites"]) <= set(SITE_NAMES) for need in needs)
    assert sum(len(need["sites"]) for need in needs) == sum(len(site.needs) for site in SITES)


def test_every_row_has_a_source() -> None:
    assert all(site.source for site in SITES)
    assert all(need.source for site in SITES for need in site.needs)
    assert all(command.source for site in SITES for command in site.commands)
    assert all(old.source for old in RETIRED)


def test_times_begin_with_the_shortest() -> None:
    for site in SITES:
        hours = [length.hours for length in site.lengths]
        assert hours == sorted(hours)
        assert not hours or site.usual < len(hours)
    assert [length.hours for length in find_site("chtc").lengths] == [12, 24, 7 * 24]


def test_rows_are_those_of_their_sites() -> None:
    assert [(one.key, one.refused) for one in find_site("igwn").needs] == [
        ("request_memory", False),
        ("request_disk", True),
        ("accounting_group", True),
    ]
    assert [one.why for one in find_site("ospool").needs][:1] == ["the OSPool gives 2 GB"]
    assert find_site("slurm").needs == ()
    assert [one.start for one in RETIRED if one.same] == ["stash:///"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('name = "chtc"', 'name = "chtc"\ncolor = "red"'),
        ('line = "+WantGPULab = true"', 'line = "+WantGPULab = true"\ncolor = "red"'),
        ('key = "request_memory"', 'key = "request_memory"\ncolor = "red"'),
        ('start = "stash:///"', 'start = "stash:///"\ncolor = "red"'),
        ("\n[[retired]]\n", "\n[[moved]]\n"),
        ("\n[[need]]\n", "\n[[needs]]\n"),
        ("same = false\nsource", "same = false\norigin"),
        ("usual = 1", 'usual = "1"'),
        ('kinds = ["docker"]', 'kinds = ["tarball"]'),
    ],
)
def test_other_rows_are_a_bug(old: str, new: str) -> None:
    assert old in TEXT
    with fails("document-invalid"):
        read_sites(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(("site", "hours"), [("chtc", 169), ("ospool", 21)])
def test_jobs_too_long_for_a_site(site: str, hours: int) -> None:
    with fails("job-too-long"):
        find_site(site).lines(timedelta(hours=hours))


def test_sites_are_one_list() -> None:
    assert sorted(SETTING_SITES) == sorted(site.name for site in SITES)
    assert sorted(IMAGE_TYPES) == sorted(ImageKind)
    assert all(site.kinds for site in SITES)
    with fails("site-unknown", message="'nowhere'"):
        find_site("nowhere")
