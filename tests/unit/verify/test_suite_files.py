"""The suite's digest, by which verdicts and records name it: where its files lie must not change it."""

from __future__ import annotations

import pytest

from imagefactory.verify.suite_files import EARLIER_SUITES, digest_of, read_suite

# Of the suite as it is: change it with the suite, never because the files went elsewhere. With another digest
# every image is to be verified anew, unless EARLIER_SUITES says that only other levels have new checks.
PRESENT = "sha256:3943f10ef31be3a31b46a1c2f0ecf09178e16006868d7c4348e9361395d8b629"


def test_the_suite_is_the_one_that_verdicts_name() -> None:
    assert digest_of(read_suite()) == PRESENT
    assert PRESENT not in EARLIER_SUITES


def test_its_files_have_names_of_their_own_folder() -> None:
    names = set(read_suite())
    assert {"__init__.py", "smoke.py", "verify.py", "checks/__init__.py", "gpu/suite.py"} <= names
    assert not any(name.startswith(("/", "suite/", "imagefactory/")) for name in names)


@pytest.mark.parametrize("change", ["name", "content"])
def test_another_name_or_content_is_another_suite(change: str) -> None:
    files = dict(read_suite())
    content = files.pop("table.py")
    files["tables.py" if change == "name" else "table.py"] = content if change == "name" else content + b"\n"
    assert digest_of(files) != PRESENT
