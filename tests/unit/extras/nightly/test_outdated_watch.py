"""News as a person, a commit and a workflow read it."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from imagefactory.extras.nightly.outdated import (
    ExpiringVerdict,
    NewCuda,
    NewLock,
    NewPython,
    UnitNews,
    UpdateUnit,
    commit_message,
    format_news,
    github_lines,
    news_json,
)
from imagefactory.lock import OutdatedPackage
from imagefactory.lock.changes import VersionChange
from imagefactory.model import BaseLock
from tests.made.values import make_base, make_lock, make_target

TARGET = make_target()
UNIT = UpdateUnit(name="pytorch", targets=(TARGET,))
LIBC = BaseLock(base="debian-12", suite="bookworm", content_hash="", source_date_epoch=1, packages=())


def locked(name: str, *names: str) -> NewLock:
    moves = tuple(VersionChange(name=one, before="1", after="2") for one in names)
    return NewLock(name=name, moves=moves, target=TARGET, lock=make_lock())


def test_nothing_new_is_one_line_and_no_message() -> None:
    news = UnitNews(unit=UNIT)
    assert not news
    assert (format_news(news), commit_message(news)) == ("pytorch: nothing new", "")


def test_the_same_moves_are_told_once_and_long_lists_are_cut() -> None:
    many = [f"p{n:02}" for n in range(14)]
    news = UnitNews(unit=UNIT, locks=(locked("a", "idna"), locked("b", "idna"), locked("c", *many)))
    text = format_news(news, 80)
    assert text.count("idna 1 -> 2") == 1
    assert "1 package moves in 2 locks (a, b)" in text
    assert "14 packages move in c" in text
    assert "p11 1 -> 2" in text
    assert "p12" not in text
    assert "and 2 more" in text
    message = commit_message(news)
    assert message.startswith("Re-lock pytorch: 15 packages move\n\n")
    assert "  p13 1 -> 2" in message  # a commit names all


def test_lines_fit_the_terminal() -> None:
    python = NewPython(release="2.16.0", python="3.14", base="debian-14")
    ending = ExpiringVerdict(target="pytorch-2.3-cu121", capability="8.0", day=date(2026, 12, 1))
    names = tuple(locked(f"pytorch-2.{n}-cu121", "idna") for n in range(9))
    text = format_news(UnitNews(unit=UNIT, python=python, expiring=(ending,), locks=names), 80)
    assert max(map(len, text.split("\n"))) <= 80
    assert "debian-14 carries it" in " ".join(text.split())
    assert "pytorch-2.3-cu121 on 8.0 is valid only until 2026-12-01" in text
    assert "imagefactory verify pytorch-2.3-cu121" in text


def test_a_new_cuda_is_told_with_what_makes_its_row() -> None:
    found = NewCuda(series="2.3", cuda="13", command="imagefactory recipe add-version pytorch 2.3 --cuda 13")
    news = UnitNews(
        unit=UNIT, cudas=(found, replace(found, cuda="13.9", command="")), locks=(locked("a", "idna"),)
    )
    text = format_news(news, 110)
    assert "cuda     torch 2.3 has builds for CUDA 13, which no row has\n" in text
    assert "to have it: imagefactory recipe add-version pytorch 2.3 --cuda 13\n" in text
    assert "to have it: a row in recipes/pytorch.yaml" in text
    message = commit_message(news)
    assert (
        "has builds for CUDA 13, which no row has\n    imagefactory recipe add-version pytorch 2.3 --cuda "
        "13\n" in message
    )
    assert message.endswith("CUDA 13.9, which no row has")


def test_of_conda_it_is_builds_and_no_base_carries_the_python() -> None:
    unit = UpdateUnit(name="pytorch-conda", targets=(replace(TARGET, source="conda"),))
    text = format_news(UnitNews(unit=unit, python=NewPython(release="2.12", python="3.14", base="")), 110)
    assert text.endswith("has builds for Python 3.14, which no row uses")


def test_a_base_is_a_job_with_a_branch_that_git_takes() -> None:
    move = VersionChange(name="libc6", before="2.36-9", after="2.36-10")
    lock = NewLock(name="base:debian-12", moves=(move,), target=None, lock=LIBC)
    news = UnitNews(unit=UpdateUnit(name="base:debian-12", base=make_base()), locks=(lock,))
    assert (
        github_lines([news, UnitNews(unit=UNIT)])
        == 'families={"include":[{"family":"base:debian-12","branch":"relock/base-debian-12"}]}'
    )
    assert commit_message(news).startswith("Re-lock the base debian-12: libc6\n\n")
    assert "security updates" in commit_message(news)
    assert "  base     1 package moves\n             libc6 2.36-9 -> 2.36-10" in format_news(news)


def test_a_lock_of_the_same_packages_is_said_to_be_that() -> None:
    news = replace(UnitNews(unit=UNIT), locks=(locked("a"),))
    assert "the same packages, locked again in a" in format_news(news)
    assert commit_message(news).startswith("Re-lock pytorch: 0 packages move") is False


def test_what_the_cooldown_excludes_is_news_but_changes_nothing() -> None:
    row = OutdatedPackage(
        name="torch", locked="2.3", newest="2.4", reason="why", accept="", named=False, uploaded="2026-11-26"
    )
    news = UnitNews(unit=UNIT, excluded=(row,))
    assert format_news(news).splitlines()[1].split() == f"cooldown {row}".split()
    assert (commit_message(news), github_lines([news])) == ("", 'families={"include":[]}')
    assert news_json(news, "", [])["excluded"] == [row.as_json()]
