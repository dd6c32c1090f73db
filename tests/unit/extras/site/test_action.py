"""What a report says of an image of which the store knows no more than its bytes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.actions.locked import require_lock
from imagefactory.errors import UsageError
from imagefactory.extras.site.action import MANY_FILES, read_report, write_report
from imagefactory.extras.site.images import ReportImage
from imagefactory.extras.site.tables import TableRequest
from imagefactory.oci.manifests import digest_of
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.recipes.expand import select
from imagefactory.trust.audit import NAME as NAME_OF_LOG
from imagefactory.trust.audit import AuditEntry, append_audit
from tests.made.factory import NAME, put_image
from tests.made.full_disk import full_disk


def read(factory: Project) -> ReportImage:
    asked = TableRequest(now=datetime(2026, 11, 22, tzinfo=UTC))
    (image,) = read_report(factory, select(factory.targets, (NAME,)), asked, QuietProgress()).images
    return image


def test_an_image_that_says_it_is_of_the_lock_has_its_packages(factory: Project) -> None:
    (target,) = select(factory.targets, (NAME,))
    digest = put_image(factory, target)
    image = read(factory)
    assert image.image is not None
    assert image.image.subject.index == digest
    assert [one.name for one in image.packages] == [
        one.name for one in require_lock(factory, target).packages
    ]
    assert image.predicted
    assert image.version == "2.3.1"
    assert image.commands == (f"imagefactory run {NAME} -- python",)
    assert "imagefactory push" in image.submit.why


@pytest.mark.parametrize("told", [digest_of(b"another"), None, "\x00"])
def test_one_of_another_lock_borrows_nothing_from_the_present_one(factory: Project, told: str | None) -> None:
    (target,) = select(factory.targets, (NAME,))
    put_image(factory, target, **{"imagefactory.lock": told})
    image = read(factory)
    assert image.image is not None
    assert (image.packages, image.moves, image.since, dict(image.predicted)) == ((), (), "", {})


def test_the_log_of_the_store_is_told_and_one_that_cannot_be_read_too(factory: Project) -> None:
    asked = TableRequest(now=datetime(2026, 11, 22, tzinfo=UTC))
    store = factory.settings.store_path
    append_audit(store, [AuditEntry(action="revoke", what="sha256:1", why="wrong")], asked.now)
    report = read_report(factory, (), asked, QuietProgress())
    assert [(act.action, act.what, act.why) for act in report.acts] == [("revoke", "sha256:1", "wrong")]
    path = store / "journal" / NAME_OF_LOG
    path.unlink()
    path.mkdir()
    other = read_report(factory, (), asked, QuietProgress())
    assert (other.acts, len(other.notes)) == ((), len(report.notes) + 1)


def test_without_an_image_the_lock_is_shown(factory: Project) -> None:
    image = read(factory)
    assert image.image is None
    assert image.packages
    assert image.block == "not in the store"
    assert image.commands == (f"imagefactory build {NAME}",)


def test_pages_never_leave_their_folder(tmp_path: Path) -> None:
    """A mark that somebody edited names files of others: these stay."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    site = tmp_path / "site"
    assert write_report(site, {"index.html": "a", "gpus/8.0.html": "b"}) == 2
    (site / ".imagefactory-report").write_text("index.html\n../victim\ngpus/8.0.html\n")
    write_report(site, {"index.html": "c"})
    assert victim.read_text() == "mine"
    assert (site / "index.html").read_text() == "c"
    assert not (site / "gpus/8.0.html").exists()
    with pytest.raises(UsageError) as caught:
        write_report(tmp_path, {"index.html": "d"})
    assert caught.value.code == "output-foreign-files"


@pytest.mark.parametrize("room", [0, 20, 300])
def test_a_report_that_a_full_disk_ended_is_written_again_without_force(tmp_path: Path, room: int) -> None:
    site, pages = tmp_path / "site", {"index.html": "a" * 200, "gpus/8.0.html": "b" * 500}
    with full_disk(room), pytest.raises(OSError, match="File too large"):
        write_report(site, pages)
    assert write_report(site, pages) == 2
    assert not [path for path in site.rglob("*") if path.name.endswith("~") or path.name.startswith("..")]


def test_a_folder_of_somebody_else_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError) as caught:
        write_report(tmp_path, {"index.html": "a"})
    assert caught.value.code == "output-foreign-files"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_many_pages_are_written_by_several_processes(tmp_path: Path) -> None:
    pages = {f"images/{number}.html": f"page {number}" for number in range(MANY_FILES + 1)}
    assert write_report(tmp_path / "site", pages, workers=3) == len(pages)
    found = {f"images/{path.name}": path.read_text() for path in (tmp_path / "site/images").iterdir()}
    assert found == pages
    with full_disk(2), pytest.raises(OSError, match="File too large"):
        write_report(tmp_path / "site", {**pages, "images/7.html": "longer"}, workers=3)
