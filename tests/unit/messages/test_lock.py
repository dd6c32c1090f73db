"""The exact words of the most important messages of `imagefactory lock`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.errors import ImagefactoryError
from imagefactory.lock import LockRequest
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.locker import CondaLocker
from imagefactory.lock.download import PackageCache
from imagefactory.lock.files import check_facts
from imagefactory.lock.pypi.explain import explain_failure
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.offers import IndexWheel, address_of
from imagefactory.lock.pypi.question import WheelRequest, check_update_names
from imagefactory.lock.pypi.requirements import parse_lock, read_lock
from imagefactory.lock.pypi.unbuilt import SourcePackage, list_unbuilt
from imagefactory.model import LockedWheel
from imagefactory.progress import QuietProgress
from tests.made.solving import BASE, no_pip, target
from tests.made.values import make_lock, make_target
from tests.services.channels import record, write_channel

TARGET = make_target()
LOCK = make_lock()
IDNA = LOCK.wheels[0]
RUNTIME = LockedWheel(
    name="nvidia-cuda-runtime-cu12", version="12.6.77", filename="x.whl", sha256="3" * 64, size=1
)
INDEX = PackageIndex(
    url="https://index.example/simple",
    origin="$IMAGEFACTORY_INDEX",
    certificates="",
    proxy="",
    environment=(),
)
UV = "error: No solution found when resolving dependencies\n  cause: {}\n"


def no_gpu(_: Path) -> None:
    check_facts(LOCK, TARGET)


def other_cuda(_: Path) -> None:
    check_facts(replace(LOCK, wheels=(*LOCK.wheels, RUNTIME)), TARGET)


def misspelled(_: Path) -> None:
    check_update_names(LockRequest(target=TARGET, base=BASE, previous=LOCK, update=("troch",)))


def sources(_: Path) -> None:
    unbuilt = (SourcePackage(name="flat", version="1.0", source="flat-1.0.tar.gz", project=None),)
    raise list_unbuilt(unbuilt, (), WheelRequest(lock=LOCK, requirements=("flat",)), TARGET)


def uv(account: str) -> Callable[[Path], None]:
    def fail(_: Path) -> None:
        raise explain_failure(replace(LOCK, wheels=()), account, INDEX)

    return fail


def changed(_: Path) -> None:
    offer = IndexWheel(filename=IDNA.filename, url="https://index.example/idna", sha256="4" * 64, size=1)
    address_of(IDNA, (offer,), LOCK)


def wrong_bytes(folder: Path) -> None:
    file = folder / IDNA.filename
    file.write_bytes(bytes(3))
    PackageCache(folder, INDEX).fetch(
        (replace(IDNA, size=3),), lambda _: {IDNA.filename: file.as_uri()}, QuietProgress()
    )


def conda(*requirements: str) -> Callable[[Path], None]:
    def solve(folder: Path) -> None:
        write_channel(
            folder / "forge",
            record("python", "3.11.9"),
            record("tiny", "1.0", "python"),
            record("lib", "2.0"),
            record("fast", "1.0", "__cuda >=12.4"),
        )
        channels = find_channels(f"conda-forge={folder / 'forge'}", {}, "")
        request = LockRequest(target=target("tiny 1.*", *requirements), base=BASE)
        CondaLocker(channels, folder / "cache", no_pip).lock(request, QuietProgress())

    return solve


@pytest.mark.parametrize(
    ("cause", "code", "message", "hint"),
    [
        (
            lambda tmp: read_lock(tmp / "lab.requirements.txt"),
            "lock-missing",
            "TMP/lab.requirements.txt does not exist",
            "run imagefactory lock lab",
        ),
        (
            lambda _: parse_lock("", "lockfiles/lab.requirements.txt"),
            "lock-malformed",
            "lockfiles/lab.requirements.txt:1: expected '# imagefactory lock ...', found nothing",
            "run imagefactory lock TARGET",
        ),
        (
            no_gpu,
            "cuda-missing",
            "pytorch-2.3-cu121: torch 2.3.1 and its dependencies include no CUDA runtime: the "
            "image would silently compute on the CPU",
            "add the extra or the nvidia-cuda-runtime package that provides CUDA at recipes/pytorch.yaml:7:5",
        ),
        (
            other_cuda,
            "cuda-version-mismatch",
            "pytorch-2.3-cu121: torch 2.3.1 comes with CUDA 12.6 (nvidia-cuda-runtime-cu12 "
            "12.6.77), the recipe asks for 12.1",
            'write cuda: ["12.6"] at recipes/pytorch.yaml:7:5, or constrain nvidia-cuda-runtime-cu12',
        ),
        (
            misspelled,
            "update-package-unknown",
            "cannot upgrade 'troch': pytorch-2.3-cu121 has no package 'troch'",
            "did you mean 'torch'?",
        ),
        (
            sources,
            "source-build-required",
            "pytorch-2.3-cu121: 1 package must be built from source first:\n  flat 1.0: needs to be fetched",
            "run imagefactory lock pytorch-2.3-cu121 --build",
        ),
        (
            uv(UV.format("Because demo==2.0 has no usable wheels and you require demo")),
            "no-usable-wheel",
            "pytorch-2.3-cu121: No solution found when resolving dependencies Because demo==2.0 "
            "has no usable wheels and you require demo",
            "constrain this package to a version that has a wheel: images contain only wheels",
        ),
        (
            uv("error: connection refused"),
            "index-unreachable",
            "pytorch-2.3-cu121: connection refused",
            "check the network and the package index: https://index.example/simple ($IMAGEFACTORY_INDEX)",
        ),
        (
            changed,
            "index-file-changed",
            "pytorch-2.3-cu121: the index now has another file under the name "
            "idna-3.7-py3-none-any.whl: expected sha256 "
            "2222222222222222222222222222222222222222222222222222222222222222, found "
            "4444444444444444444444444444444444444444444444444444444444444444",
            "do not use this file; ask the administrator of the index why it changed",
        ),
        (
            wrong_bytes,
            "hash-mismatch",
            "idna 3.7: the file from file://TMP/idna-3.7-py3-none-any.whl has the wrong hash: "
            "expected sha256 2222222222222222222222222222222222222222222222222222222222222222, "
            "found 709e80c88487a2411e1ee4dfb9f22a861492d20c4765150c0c794abd70f8147c",
            "use another mirror or network: this one changed the file",
        ),
        (
            conda("lib >=3"),
            "package-version-not-found",
            "tiny-1-cu121: conda-forge has no `lib >=3`; it has 2.0",
            "change `lib >=3` at recipes/tiny.yaml:7:3",
        ),
        (
            conda("fast"),
            "virtual-package-missing",
            "tiny-1-cu121: fast 1.0 needs a driver for CUDA 12.4 (NVIDIA driver 550.54.14 or "
            "newer) (__cuda); the target has 12.1",
            'write `virtual: {cuda: "12.4"}` at recipes/tiny.yaml:7:3, or require an older version',
        ),
        (
            conda("libb"),
            "package-not-in-channel",
            "tiny-1-cu121: 'libb' is not in conda-forge",
            "for 'libb' write 'lib'",
        ),
    ],
)
def test_message(tmp_path: Path, cause: Callable[[Path], object], code: str, message: str, hint: str) -> None:
    with pytest.raises(ImagefactoryError) as caught:
        cause(tmp_path)
    error = caught.value
    assert (error.code, error.message, error.hint) == (code, message.replace("TMP", str(tmp_path)), hint)
