"""What uv is asked, without uv; what it answers is in tests/engines."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.no_wheel import NoWheelError
from imagefactory.lock.pypi.offers import IndexWheel
from imagefactory.lock.pypi.question import PinnedVersions, WheelRequest
from imagefactory.lock.pypi.uv import UvLocker, plain_uv_message, read_via, write_requirements
from tests.made.errors import fails
from tests.made.values import make_lock
from tests.made.wheels import make_wheel


class Counting(UvLocker):
    def __init__(self) -> None:
        index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
        super().__init__(index, python=Path(sys.executable))
        self.asked: list[WheelRequest] = []

    def _solve(self, question: WheelRequest) -> PinnedVersions:
        self.asked.append(question)
        if "sourced" in question.requirements:
            raise NoWheelError("no-usable-wheel", "no wheel", hint="", names=("sourced",), account="why")
        return PinnedVersions(lines=("demo==1.0",))


def test_a_question_is_asked_once(tmp_path: Path) -> None:
    uv, question = Counting(), WheelRequest(lock=make_lock(wheels=()), requirements=("demo",))
    assert (
        uv.solve(question)
        == uv.solve(replace(question, sources=("./demo",)))
        == PinnedVersions(lines=("demo==1.0",))
    )
    assert len(uv.asked) == 1
    uv.solve(replace(question, constraints=("demo<2",)))
    for _ in range(2):  # a folder's files may change
        uv.solve(replace(question, sdists=tmp_path))
    assert len(uv.asked) == 4
    for _ in range(2):
        with pytest.raises(NoWheelError) as caught:
            uv.solve(replace(question, requirements=("sourced",)))
        assert (caught.value.code, caught.value.names, caught.value.account) == (
            *("no-usable-wheel", ("sourced",), "why"),
        )
    assert len(uv.asked) == 5


LAB = ("lab", "https://lab.example.org/simple/")


INDEX = PackageIndex(url="", origin="", certificates="", proxy="", environment=(), named=(LAB,))


def test_without_named_indexes_lines_are_asked_in_their_order(tmp_path: Path) -> None:
    """uv prefers what is named first, so another order would lock other versions."""
    lock = make_lock(origins=(("numpy", "lab"),))  # which is not asked for now
    path = write_requirements(tmp_path, ["torch==2.3.*", "idna", "Zip", "torch==2.3.*", "anyio"], lock, INDEX)
    assert (path.name, path.read_text()) == ("asked.txt", "torch==2.3.*\nidna\nZip\nanyio\n")


def test_what_a_named_index_brings_comes_from_it_alone(tmp_path: Path) -> None:
    path = write_requirements(
        tmp_path, ["Torch[x]==2.3.*", "idna"], make_lock(origins=(("torch", "lab"),)), INDEX
    )
    written = tomllib.loads(path.read_text())
    assert path.suffix == ".toml"
    assert written["project"]["dependencies"] == ["Torch[x]==2.3.*", "idna"]
    assert written["tool"]["uv"]["sources"] == {"torch": {"index": "lab"}}
    lab = {"name": "lab", "url": "https://lab.example.org/simple", "explicit": True}
    assert written["tool"]["uv"]["index"] == [lab]
    told = "Because imagefactory-asked depends on torch==2.3.*, we can conclude"
    assert plain_uv_message(told) == "Because you require torch==2.3.*, we can conclude"


def test_who_requires_a_package() -> None:
    text = "a==1\n    # via\n    #   -r asked.txt\n    #   B-c\n    #   d.e\nd-e==2\n    # via -r asked.txt\n"
    text += "b-c==1\n    # via imagefactory-asked (/tmp/pyproject.toml)\nf==1\n    # via d-e\n"
    found = read_via(text)
    assert {name: by for name, by in found.items() if by} == {"a": ("b-c", "d-e"), "f": ("d-e",)}


def test_wheels_of_the_factory_are_shown_as_an_index_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "root/wheels").mkdir(parents=True)
    file = make_wheel(tmp_path / "root/wheels", "mylib", {})
    lock = make_lock(origins=(("mylib", f"./wheels/{file.name}"),))
    path = write_requirements(tmp_path, ["mylib==1.0", "idna"], lock, replace(INDEX, root=tmp_path / "root"))
    (index,) = tomllib.loads(path.read_text())["tool"]["uv"]["index"]
    assert (index["format"], index["explicit"]) == ("flat", True)
    assert index["url"] == (tmp_path / "wheels").as_uri()
    assert (tmp_path / "wheels" / file.name).samefile(file)


def test_an_index_without_an_address_says_where_to_write_it(tmp_path: Path) -> None:
    with fails("index-unknown") as caught:
        write_requirements(tmp_path, ["torch"], make_lock(origins=(("torch", "cu128"),)), INDEX)
    assert all(value in caught.value.message for value in ("pytorch-2.3-cu121", "torch", "'cu128'"))
    assert caught.value.hint == 'add cu128 = "https://..." to [indexes] in imagefactory.toml'


def test_a_solution_has_the_wheel_that_an_installer_would_use(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("demo-1.0-py3-none-any.whl", "demo-1.0-cp311-cp311-manylinux_2_28_x86_64.whl")
    names = (*names, "demo-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", "demo-1.0-cp312-cp312-win32.whl")
    offers = [
        IndexWheel(filename=name, url=f"https://example.org/{name}", sha256=str(number) * 64, size=number)
        for number, name in enumerate(names, 1)
    ]
    uv = Counting()
    monkeypatch.setattr(uv, "offers", lambda pins, _: {pin.partition("==")[0]: offers for pin in pins})
    lock = make_lock(wheels=(), python="3.11", platform="manylinux_2_39_x86_64")
    ((wheel, url),) = uv.located(WheelRequest(lock=lock, requirements=("demo",))).items()
    assert (wheel.filename, wheel.size, wheel.sha256, url) == (names[1], 2, "2" * 64, offers[1].url)
