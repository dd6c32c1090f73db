"""Source distributions: which one a requirement means."""

from __future__ import annotations

from packaging.requirements import Requirement

from imagefactory.errors import LockError
from imagefactory.lock.pypi.index import IndexFile
from imagefactory.lock.pypi.offers import choose_sdist
from tests.made.errors import fails


def files(*names: str, yanked: str = "") -> list[IndexFile]:
    return [IndexFile(filename=n, url=f"https://x/{n}", sha256="1" * 64, yanked=n == yanked) for n in names]


def test_the_newest_that_fits_and_is_not_yanked() -> None:
    offered = files(
        "torch_scatter-2.0.9.tar.gz",
        "torch_scatter-2.1.10.tar.gz",
        "torch_scatter-2.1.9.zip",
        "torch_scatter-2.1.11.tar.gz",
        "torch_scatter-2.2.0-cp311-cp311-linux_x86_64.whl",
        "torch_scatter-2.3.0rc1.tar.gz",
        yanked="torch_scatter-2.1.11.tar.gz",
    )
    file, version = choose_sdist(Requirement("torch-scatter"), offered)
    assert (file.filename, str(version)) == ("torch_scatter-2.1.10.tar.gz", "2.1.10")
    assert choose_sdist(Requirement("torch-scatter<2.1"), offered)[0].filename == "torch_scatter-2.0.9.tar.gz"
    with fails(LockError, "sdist-not-found") as caught:
        choose_sdist(Requirement("torch-scatter==9"), offered)
    assert "torch-scatter==9" in caught.value.message
    assert "git+https://" in caught.value.hint
