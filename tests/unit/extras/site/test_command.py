"""report: the command line, with verdicts in a store and a registry in this process.

The GPU is made up and so is what the host saw of it; the keys are thrown away with the test.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.actions.verdicts import attach_signed, local_place
from imagefactory.extras.site.action import read_report
from imagefactory.extras.site.tables import TableRequest
from imagefactory.trust.attached import read_subject
from tests.made.command import Call, json_of
from tests.made.signing import QUIET, Bench
from tests.made.trusted import write_settings

ROOT = Path(__file__).parents[4]
TARGET = "one-12.1-cu121"


def sign_here(bench: Bench, content: bytes, capability: str = "8.0") -> str:
    """An image in the store that is verified for one capability; the digest of its manifest."""
    digest = bench.build(content).root.descriptor.digest
    place = local_place(bench.factory, "one")
    attach_signed(bench.factory, bench.sign(place, digest, capability), None, QUIET)
    return read_subject(place, digest).manifest


def test_what_is_proven_in_the_store_stands_on_its_pages(bench: Bench, tmp_path: Path) -> None:
    manifest = sign_here(bench, b"a")
    out = tmp_path / "site"
    said = bench.call("report", TARGET, "-o", str(out))
    assert str(out / "index.html") in said.out
    assert "<td class=v>verified" in (out / "index.html").read_text()
    page = (out / "images" / f"{TARGET}.html").read_text()
    assert manifest in page
    assert "A GPU of the tests" in page
    assert f"imagefactory run {TARGET} -- python" in page
    assert "the image is not in a registry or file" in page  # it is in the store alone
    assert ": verified on sm_80</title>" in (out / "images" / f"{TARGET}.svg").read_text()
    assert TARGET in (out / "gpus" / "8.0.html").read_text()


def test_an_image_of_the_registry_has_its_commands_and_its_submit_file(bench: Bench, tmp_path: Path) -> None:
    digest = bench.push(b"a", 1)
    bench.verify(digest)
    bench.call("report", TARGET, "--registry", bench.registry.host, "-o", str(tmp_path / "site"))
    page = (tmp_path / "site" / "images" / f"{TARGET}.html").read_text()
    reference = f"{bench.registry.host}/one@{digest}"
    assert f"docker pull {reference}" in page
    assert f"container_image = docker://{reference}" in page
    assert "Nothing of it is verified" not in page


def test_layers_that_an_older_image_had_are_told_from_new_ones(bench: Bench) -> None:
    old, new = bench.push(b"a", 1), bench.push(b"b", 2)
    report = read_report(
        bench.factory,
        bench.factory.targets[:1],
        TableRequest(now=datetime.now(UTC), registry=bench.registry.host),
        QUIET,
    )
    (image,) = report.images
    assert image.image is not None
    assert image.image.subject.index == new != old
    assert [layer.unchanged for layer in image.layers].count(False) > 0
    assert image.layers[0].size > 0


def test_verdicts_of_older_images_are_history_and_prove_nothing_of_the_new(bench: Bench) -> None:
    old = bench.push(b"a", 1)
    bench.verify(old, "8.0")
    bench.push(b"b", 2)
    asked = TableRequest(now=datetime.now(UTC), registry=bench.registry.host)
    (image,) = read_report(bench.factory, bench.factory.targets[:1], asked, QUIET).images
    assert image.image is not None
    assert image.image.subject.index == old  # it alone is verified
    assert len(image.history) == 1


def test_what_lies_in_store_and_registry_is_told_once(bench: Bench) -> None:
    bench.verify(bench.push(b"a", 1))
    root = bench.folder / "root"
    write_settings(root, f'registry = "{bench.registry.host}"\n{(root / "imagefactory.toml").read_text()}')
    asked = TableRequest(now=datetime.now(UTC))
    (here,) = read_report(bench.factory, bench.factory.targets[:1], asked, QUIET).images
    digests = [judged.digest for _, judged in here.history]
    assert len(digests) == len(set(digests)) == 1


def test_an_image_that_was_never_built_is_shown_by_its_lock(bench: Bench, tmp_path: Path) -> None:
    bench.call("report", "-o", str(tmp_path / "site"), "--capability", "8.0")
    page = (tmp_path / "site" / "images" / f"{TARGET}.html").read_text()
    assert "There is no image of it here" in page
    assert f"imagefactory build {TARGET}" in page
    assert "<td class=v>" not in (tmp_path / "site" / "index.html").read_text()


def test_files_of_others_are_left_alone_and_pages_that_are_no_more_go(bench: Bench, tmp_path: Path) -> None:
    out = tmp_path / "site"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    said = bench.call("report", "-o", str(out), code=2)
    assert "files of other programs" in said.err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    bench.call("report", "-o", str(out), "--capability", "9.0", "--force")
    assert (out / "gpus" / "9.0.html").exists()
    bench.call("report", "-o", str(out), "--capability", "8.6")
    assert not (out / "gpus" / "9.0.html").exists()
    assert (out / "gpus" / "8.6.html").exists()
    assert (out / "mine.txt").read_text() == "mine"


def test_a_badge_and_a_picture_are_files_of_their_own(bench: Bench, tmp_path: Path) -> None:
    sign_here(bench, b"a")
    badge, picture = tmp_path / "badge.svg", tmp_path / "matrix.svg"
    for kind, path in (("badge", badge), ("svg", picture)):
        said = bench.call("report", TARGET, "--format", kind, "-o", str(path), "--json")
        assert json_of(said, "report-files") == {
            "format": "imagefactory.report-files/1",
            "images": 1,
            "files": [str(path)],
        }
    assert "verified on sm_80" in badge.read_text()
    assert TARGET in picture.read_text()


def test_bad_arguments_are_told(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = bench.call("report", "-o", str(tmp_path / "file"), code=2)
    assert said.error_codes == ("cannot-write-file",)
    assert "nothing-*" in bench.call("report", "nothing-*", "-o", str(tmp_path / "x"), code=3).err
    said = bench.call("report", "-o", str(tmp_path / "b.svg"), "--format", "badge", code=2)
    assert (said.error_codes, "badge" in said.err) == (("option-conflict",), True)


def test_the_front_pages_picture_is_what_the_recipes_and_locks_say(call: Call, tmp_path: Path) -> None:
    """`make picture` makes it anew. No image is there, so nothing of it can be more than foretold."""
    names = ("pytorch-[12]*", "jax-0*", "tensorflow-2*", "onnxruntime-1*")
    made = tmp_path / "matrix.svg"
    assert call("report", *names, "-o", str(made), "--format", "svg").code == 0
    assert " ".join(f"'{name}'" for name in names) in (ROOT / "Makefile").read_text()
    assert made.read_text() == (ROOT / "docs" / "matrix.svg").read_text()
    assert ": 0 of " in made.read_text()
    assert made.stat().st_size < 300_000


def test_outside_of_a_factory_the_catalog_says_which_images(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IMAGEFACTORY_REGISTRY", "registry.example.org")
    said = call("report", "-o", "site", "--registry", "registry.example.org", root=None)
    assert (said.code, said.error_codes, "--registry" in said.err) == (2, ("option-conflict",), True)
    assert not (tmp_path / "site").exists()
