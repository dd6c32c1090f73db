"""What is said where the packages below forbid what comes on top."""

from __future__ import annotations

from imagefactory.errors import UnsolvableError
from imagefactory.lock.pypi.explain import explain_on
from tests.made.values import make_lock, make_target


def test_an_older_release_below_takes_a_recipe_of_its_own() -> None:
    """The shape of a requirements.txt with numpy==1.24.4 on top of a target that holds a newer one."""
    under, target = (
        make_lock(target="pytorch-2.3-cu121"),
        make_target(framework="torch", version="2.3", cuda="12.1"),
    )
    error = explain_on(UnsolvableError("no-solution", "numpy", tree="all"), under, target)
    assert (error.code, error.message, error.tree) == ("no-solution", "numpy", "all")
    assert "imagefactory recipe import NAME FILE --framework torch=2.3 --cuda 12.1" in error.hint
    assert "imagefactory lock pytorch-2.3-cu121 --update PACKAGE" in error.hint
