"""What is found by a few words: from a catalog, on a pool, and without either."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagefactory.errors import EXIT_CHECK
from imagefactory.oci.manifests import digest_of
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.trust.keys import SigningKey
from imagefactory.trust.offers import verify_offer
from imagefactory.trust.verdict import RevokedCell
from imagefactory.verify.report import VerifiedImage
from tests.made.catalog import make_image
from tests.made.command import Call, json_of
from tests.made.joined import NOW, envelope, join_catalog, join_site, person_at
from tests.made.verdicts import LAB, STRANGER, digest

HAS = {"Arch": "X86_64", "HasDockerURL": True, "Memory": 515000, "Cpus": 64}
GB = 1 << 30


@pytest.fixture
def person(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    return person_at(capsys, tmp_path, monkeypatch)


@pytest.fixture
def joined(person: Call, tmp_path: Path) -> Call:
    join_site(tmp_path)
    return person


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """Two machines with two A100 of 80 GB and of 40 GB, and V100; one of the large ones is busy."""
    large = {"name": "NVIDIA A100-SXM4-80GB", "capability": "8.0", "memory": 80 * GB, "cuda": "12.4"}
    small = {**large, "name": "NVIDIA A100-SXM4-40GB", "memory": 40 * GB - (1 << 28)}
    v100 = {"name": "Tesla V100-PCIE-16GB", "capability": "7.0", "memory": 16 * GB, "cuda": "12.2"}
    machines = [
        {"name": "a", "attributes": HAS, "gpus": [large, {**large, "free": False}]},
        {"name": "b", "attributes": HAS, "gpus": [small, small]},
        {"name": "c", "attributes": HAS, "gpus": [v100]},
    ]
    path = tmp_path / "inventory.json"
    inventory = {
        "format": "imagefactory.inventory/1",
        "pool": "cm.example.org",
        "taken": f"{NOW:%Y-%m-%dT%H:%M:%SZ}",
    }
    path.write_text(json.dumps({**inventory, "machines": machines}))
    return str(path)


def test_a_narrow_terminal_has_no_column_of_totals(
    joined: Call, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagefactory.cli.search.terminal_width", lambda: 68)
    lines = joined("search", "pytorch", "2.5", "--inventory", pool).out.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("IMAGE")]
    assert lines[number].split() == ["IMAGE", "GPU", "FREE", "STATUS"]
    assert max(map(len, lines[number:])) <= 68


def test_on_a_pool_from_a_catalog(joined: Call, pool: str) -> None:
    said = joined("search", "pytorch", "2.5", "--inventory", pool)
    lines = said.out.splitlines()
    assert lines[0].startswith("images of the catalog /")
    assert re.fullmatch(r"oldest verdict of [0-9-]+; [0-9]+ expires? within 14 days", lines[1])
    assert lines[2].startswith("pool: 3 machines with 5 GPUs, 4 free; of cm.example.org")
    assert [" ".join(line.split()) for line in lines[4:]] == [
        "IMAGE GPU TOTAL FREE STATUS",
        "pytorch-2.5-cu124 A100-SXM4-40GB (8.0) 2 2 verified",
        "A100-SXM4-80GB (8.0) 2 1 verified",
        "Tesla V100-PCIE-16GB (7.0) 1 1 predicted",
    ]
    assert said.err.splitlines()[-1] == "next: imagefactory job write pytorch-2.5-cu124"
    assert max(map(len, lines[1:])) <= 79


def test_two_large_gpus_at_once(joined: Call, pool: str) -> None:
    said = joined("search", "pytorch", "2.5", "--gpus", "2", "--gpu-memory", "40GB", "--inventory", pool)
    assert re.search(r"A100-SXM4-80GB \(8.0\) +2 +0  verified", said.out)
    assert "40GB" not in said.out.replace("--gpu-memory 40GB", "")
    assert "V100" not in said.out
    assert said.err.endswith("next: imagefactory job write pytorch-2.5-cu124 --gpus 2 --gpu-memory 40GB\n")
    assert joined("search", "--gpus", "3", "--inventory", pool, code=9).err.endswith(
        "next: imagefactory gpus\n"
    )


def test_the_best_comes_first_and_what_is_only_predicted_says_so(joined: Call, pool: str) -> None:
    told = json_of(joined("search", "--inventory", pool, "--json"), "search")
    assert [one["target"] for one in told["images"]] == [
        "pytorch-2.5-cu124",  # the newer of what is verified alike
        "pytorch-2.3-cu121",
        "jax-0.4.30-cu12",
        "pytorch-2.1-cu121",  # failed there
    ]
    assert told["images"][3]["gpus"] == []
    assert (told["source"], told["pool"]["total"], told["pool"]["free_when"]) == ("catalog", 5, "now")
    assert told["images"][0]["gpus"][1] == {
        "capability": "8.0", "name": "NVIDIA A100-SXM4-80GB", "total": 2, "free": 1, "uncertain": 0,
        "basis": "verified", "reason": told["images"][0]["gpus"][1]["reason"],
    }  # fmt: skip
    said = joined("search", "jax", "--inventory", pool)
    assert "verified" not in said.out
    assert said.err.endswith("next: imagefactory job write jax-0.4.30-cu12 --allow-unverified\n")


def test_an_image_of_which_nothing_is_known_is_not_said_to_fail(joined: Call, pool: str) -> None:
    """pytorch 2.1 failed on 8.0, and of the V100 nobody said anything."""
    asked = ("search", "pytorch-2.1", "--inventory", pool)
    (image,) = json_of(joined(*asked, "--json", code=11), "search")["images"]
    assert (image["gpus"], image["unknown"]) == ([], True)
    assert "runs on none" not in joined(*asked, code=11).out
    value = json.loads(Path(pool).read_text())
    Path(pool).write_text(json.dumps({**value, "machines": value["machines"][:2]}))
    (image,) = json_of(joined(*asked, "--json", code=9), "search")["images"]
    assert (image["gpus"], image["unknown"]) == ([], False)
    assert "1 image runs on none of these GPUs" in joined(*asked, code=9).out
    (image,) = json_of(joined("search", "pytorch-2.1", "--json", code=9), "search")["images"]
    assert image["unknown"] is False


@pytest.mark.parametrize(("capability", "code"), [("", 9), ("8.0", 11)])
def test_what_was_revoked_is_not_unknown(
    person: Call, tmp_path: Path, pool: str, capability: str, code: int
) -> None:
    """Nothing else is known of the image. A revocation for all GPUs is one for the V100 too."""
    image = make_image(envelopes=(), predicted=(), sifs=())
    cell = RevokedCell(
        subject=image.subject, capability=capability, by="lab", keyid="a" * 64, when=NOW, why="wrong sums"
    )
    join_catalog(tmp_path, (replace(image, revoked=(cell,)),))
    (row,) = json_of(person("search", "--inventory", pool, "--json", code=code), "search")["images"]
    assert (row["gpus"], row["unknown"]) == ([], code == 11)
    person("search", code=9)


def test_a_gpu_that_tells_no_capability_is_unknown(joined: Call, pool: str) -> None:
    value = json.loads(Path(pool).read_text())
    value["machines"][2]["gpus"][0]["capability"] = ""
    Path(pool).write_text(json.dumps({**value, "machines": value["machines"][2:]}))
    images = json_of(joined("search", "--inventory", pool, "--json", code=11), "search")["images"]
    assert [one["unknown"] for one in images] == [True] * 4
    few = json_of(joined("search", "--gpu-memory", "40GB", "--inventory", pool, "--json", code=9), "search")
    assert [one["unknown"] for one in few["images"]] == [False] * 4  # it is too small anyway


def test_what_it_names_as_the_next_command_works(joined: Call, pool: str) -> None:
    for words in (("pytorch",), ("jax",), ("pytorch", "--gpus", "2", "--gpu-memory", "40GB")):
        last = joined("search", *words, "--inventory", pool).err.splitlines()[-1]
        assert "wrote" in joined(*last.removeprefix("next: imagefactory ").split(), "--force").out


def test_without_a_pool_it_names_capabilities(joined: Call) -> None:
    said = joined("search", "pytorch-2.5", "--gpus", "2")
    assert "no scheduler here" in said.out
    assert "pytorch-2.5-cu124  verified   8.0 9.0\n                   predicted  7.0" in said.out
    assert "--gpus and --gpu-memory exclude nothing" in said.err
    assert json_of(joined("search", "jax", "--json"), "search")["images"][0]["gpus"][0]["total"] is None


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("cu124",), ["pytorch-2.5-cu124"]),
        (("12.4",), ["pytorch-2.5-cu124"]),
        (("torch", "2.3"), ["pytorch-2.3-cu121"]),
        (("PyTorch", "v2"), ["pytorch-2.5-cu124", "pytorch-2.3-cu121", "pytorch-2.1-cu121"]),
        (("pytorch-2.3",), ["pytorch-2.3-cu121"]),
        (("*-cu12",), ["jax-0.4.30-cu12"]),
    ],
)
def test_words(joined: Call, words: tuple[str, ...], found: list[str]) -> None:
    told = json_of(joined("search", *words, "--json"), "search")
    assert [one["target"] for one in told["images"]] == found


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("pytroch",), "did you mean 'pytorch'? pytorch has "),
        (("pytorch", "2.4"), "of pytorch: pytorch-2.3-cu121, pytorch-2.5-cu124, pytorch-2.1-cu121"),
        (("pytorch", "2.50"), "of pytorch: "),
        (("zebra",), "choose from jax, pytorch"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(joined: Call, words: tuple[str, ...], hint: str) -> None:
    said = joined("search", *words, code=3)
    assert said.error_codes == ("target-unknown",)
    assert " ".join((*words[:-1], repr(words[-1]))) in said.err
    assert hint in said.err


def test_without_a_catalog_nothing_is_verified(person: Call, pool: str) -> None:
    said = person("search", "pytorch", "2.5", "--inventory", pool)
    assert said.out.startswith("no catalog is joined")
    assert said.err.splitlines()[-1] == "next: imagefactory build pytorch-2.5-cu124"
    assert "'pytorch'" in person("search", "pytroch", code=3).err
    assert said.err.splitlines()[-1].startswith("next: imagefactory build pytorch-2.5-cu124")
    person("show", "pytorch-2.5-cu124")  # of the recipes that come along
    assert "'pytorch'" in person("search", "pytroch", code=3).err
    assert "imagefactory site join ADDRESS|FILE" in said.out
    rows = said.out.splitlines()[4:]
    assert not [row for row in rows if "verified" in row]
    assert [row for row in rows if "A100" in row and row.endswith(("predicted", "documented"))]
    told = json_of(person("search", "torch", "2.5", "--json"), "search")
    assert told["source"] == "knowledge"
    assert {gpu["basis"] for one in told["images"] for gpu in one["gpus"]} <= {"predicted", "documented"}


def test_a_pool_that_is_a_file_that_is_not_there(joined: Call) -> None:
    assert joined("search", "--inventory", "none.json", code=2).error_codes == ("inventory-not-found",)


def test_what_needs_no_gpu_is_found_by_that_word(person: Call, pool: str, tmp_path: Path) -> None:
    image = make_image(target="jax-0.10.2-cpu", family="jax", framework="jax", cuda="none", required=())
    join_site(tmp_path, replace(image, predicted=(), envelopes=(), sifs=()))
    for words in (("cpu",), ("jax", "cpu", "--inventory", pool)):
        said = person("search", *words)
        assert said.out.splitlines()[-1] == "no GPU needed: imagefactory job write jax-0.10.2-cpu"
        assert said.err.splitlines()[-1] == "next: imagefactory job write jax-0.10.2-cpu"
    assert "run on none" not in said.out


@pytest.mark.parametrize("words", [(), ("pytorch",), ("pytorch", "2.3")])
def test_an_image_that_jobs_cannot_fetch_is_an_error_and_not_a_traceback(
    person: Call, tmp_path: Path, words: tuple[str, ...]
) -> None:
    image = make_image()
    nowhere = replace(image, reference="", sifs=())
    join_catalog(tmp_path, (nowhere,))
    assert person("search", *words, code=3).error_codes == ("image-not-published",)


def test_an_image_that_jobs_cannot_fetch_is_not_hidden_by_others(person: Call, tmp_path: Path) -> None:
    nowhere = replace(
        make_image(target="jax-0.10.2-cu12", family="jax", framework="jax"), reference="", sifs=()
    )
    join_catalog(tmp_path, (make_image(), nowhere))
    assert "jax-0.10.2-cu12" in person("search").err
    assert person("search", "jax", code=3).error_codes == ("image-not-published",)
    assert person("search", "zebra", code=3).error_codes == ("target-unknown",)


def test_a_catalog_without_images_has_no_match(person: Call, tmp_path: Path) -> None:
    join_catalog(tmp_path, ())
    assert person("search", code=3).error_codes == ("catalog-empty",)


def _many(count: int, key: SigningKey = LAB) -> tuple[CatalogImage, ...]:
    """Images of versions 1.0 and on, each with one verdict about it on 8.0, and predicted on 7.0."""
    images = []
    for number in range(count):
        target = f"pytorch-1.{number}-cu121"
        subject = VerifiedImage(
            target=target, **{part: digest_of(f"{target} {part}".encode()) for part in ("index", "manifest")},
            config=digest("c"),
        )  # fmt: skip
        verdict = envelope("8.0", f"{number:x}"[-1], key, subject=subject)
        reference = f"registry.example.org/gpu/pytorch@{subject.index}"
        images.append(
            make_image(
                target=target, version=f"1.{number}", subject=subject, reference=reference,
                envelopes=(verdict,), sifs=(),
            )
        )  # fmt: skip
    return tuple(images)


def test_of_many_images_only_the_best_are_checked(
    person: Call, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of the catalog only says which are checked first: forged verdicts make no image verified."""
    forged = tuple(
        replace(image, target=image.target.replace("pytorch-1", "pytorch-9"), version=f"9{image.version[1:]}")
        for image in _many(3, STRANGER)
    )
    join_catalog(tmp_path, (*_many(30), *forged))
    checked = []

    def count(catalog: Catalog, image: CatalogImage, *rest: Any) -> ImageOffer:
        checked.append(image.target)
        return verify_offer(catalog, image, *rest)

    monkeypatch.setattr("imagefactory.actions.find.verify_offer", count)
    said = person("search", "--inventory", pool)
    names = [f"pytorch-1.{number}-cu121" for number in range(29, 9, -1)]
    assert [line.split()[0] for line in said.out.splitlines() if line.startswith("pytorch")] == names
    assert sorted(checked) == sorted([*names, *(image.target for image in forged)])
    assert "and 13 more" in said.out
    checked.clear()
    found = json_of(person("search", "--inventory", pool, "--json"), "search")
    assert ([row["name"] for row in found["images"]], found["more"]) == (names, 13)
    assert len(checked) == 23
    found = json_of(person("search", "--all", "--inventory", pool, "--json"), "search")
    assert (len(found["images"]), found["more"]) == (33, 0)
    status = {row["name"]: {gpu["basis"] for gpu in row["gpus"]} for row in found["images"]}
    assert status["pytorch-1.0-cu121"] == {"verified", "predicted"}
    assert [status[image.target] for image in forged] == [{"predicted"}] * 3
    refused = person("job", "write", forged[0].target, code=EXIT_CHECK)
    assert refused.error_codes == ("not-verified",)


def test_doctor_checks_images_until_one_is_verified(
    person: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = tuple(replace(image, target=f"x{image.target}") for image in _many(2, STRANGER))
    join_catalog(tmp_path, (*forged, *_many(5)))
    checked = []

    def count(catalog: Catalog, image: CatalogImage, *rest: Any) -> ImageOffer:
        checked.append(image.target)
        return verify_offer(catalog, image, *rest)

    monkeypatch.setattr("imagefactory.actions.doctor.verify_offer", count)
    rows = json_of(person("doctor", "--for", "job", "--json"), "doctor")["findings"]
    (row,) = [row for row in rows if row["name"] == "images"]
    assert row["status"] == "ok"
    assert checked == [*(image.target for image in forged), "pytorch-1.0-cu121"]
