"""Two packages that claim one path."""

from __future__ import annotations

import pytest

from imagefactory.engines.claims import check_conflicts
from imagefactory.errors import BuildError


def test_one_path_with_two_contents_names_both_wheels() -> None:
    check_conflicts(
        [("a.whl", "sha256=x", "s/nvidia/__init__.py"), ("b.whl", "sha256=x", "s/nvidia/__init__.py")]
    )
    with pytest.raises(BuildError, match=r"/s/same\.py stands in a\.whl and in b\.whl"):
        check_conflicts([("a.whl", "sha256=x", "s/same.py"), ("b.whl", "sha256=y", "s/same.py")])
    with pytest.raises(BuildError, match=r"/s/x is a file in a\.whl and a folder in b\.whl"):
        check_conflicts([("a.whl", "sha256=x", "s/x"), ("b.whl", "sha256=y", "s/x/deep/file")])
