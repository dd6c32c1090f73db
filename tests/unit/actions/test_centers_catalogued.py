"""list, show and verdicts in an empty folder, answered by the catalogue that somebody joined."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from imagefactory.trust.catalog import LIFE
from tests.made.command import Call, json_of
from tests.made.joined import NOW, join_site, person_at
from tests.made.verdicts import LAB


@pytest.fixture
def person(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    return person_at(capsys, tmp_path, monkeypatch)


@pytest.fixture
def joined(person: Call, tmp_path: Path) -> Call:
    join_site(tmp_path)
    return person


def test_list_says_who_answers_and_what_is_verified(joined: Call) -> None:
    lines = joined("list").out.splitlines()
    assert lines[0].startswith("images of the catalogue /")
    assert lines[1].startswith("oldest verdict of ")
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "IMAGE FRAMEWORK VERIFIED ON PREDICTED ON",
        "pytorch-2.3-cu121 torch 2.3.1 8.0 7.0",
        "pytorch-2.5-cu124 torch 2.5.1 8.0 9.0 7.0",
        "jax-0.4.30-cu12 jax 0.4.30 - 7.0",
        "pytorch-2.1-cu121 torch 2.1.2 - -",
    ]
    told = json_of(joined("list", "pytorch-2.3", "--json"), "images")
    assert told["proofs"]["oldest"]
    assert [(one["target"], one["verified"], one["predicted"]) for one in told["images"]] == [
        ("pytorch-2.3-cu121", ["8.0"], ["7.0"])
    ]
    assert [one["target"] for one in json_of(joined("list", "jax", "--json"), "images")["images"]] == [
        "jax-0.4.30-cu12"
    ]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("search", "pytorch"), "search"),
        (("search",), "search"),
        (("job", "write", "pytorch-2.3"), "job"),
        (("job", "check", "job.sub"), "job-check"),
        (("list",), "images"),
        (("show", "pytorch-2.3"), "images"),
    ],
)
def test_each_reader_says_that_the_catalog_is_the_kept_one(
    joined: Call, tmp_path: Path, command: tuple[str, ...], kind: str
) -> None:
    Path("job.sub").write_text(
        f"executable = /bin/true\ncontainer_image = docker://x.example/y@sha256:{0:064}\nqueue\n"
    )
    assert json_of(joined("list", "--json"), "images")["catalogue_source"] == "place"
    (tmp_path / "catalogue").unlink()
    said = joined(*command, "--json", code=9 if kind == "job-check" else 0)
    told = json_of(said, kind)
    made = NOW - timedelta(hours=1)
    assert told["catalogue_source"] == "kept"
    assert told["catalogue_made"] == f"{made:%Y-%m-%dT%H:%M:%SZ}"
    assert told["catalogue_expires"] == f"{made + LIFE:%Y-%m-%dT%H:%M:%SZ}"
    assert [line for line in said.err.splitlines() if f"{made + LIFE:%Y-%m-%d}" in line]


@pytest.mark.parametrize(
    "command",
    [
        ("verdict", "list", "pytorch-2.3"),
        (
            "report",
            "--format",
            "csv",
        ),
        ("doctor", "--for", "job"),
    ],
)
def test_texts_say_it_too(joined: Call, tmp_path: Path, command: tuple[str, ...]) -> None:
    joined("list")
    (tmp_path / "catalogue").unlink()
    said = joined(*command)
    assert "1 hour old" in said.out + said.err


def test_show_says_what_is_known_of_one(joined: Call) -> None:
    said = joined("show", "pytorch-2.5").out
    assert "registry.example.org/gpu/pytorch@sha256:aaaa" in said
    assert "verified   on 9.0 with drivers that take CUDA 12.4: passed the quick suite" in said
    assert "predicted  on 7.0: sm_80" in said
    assert "not        on 3.5: documented no: none" in said
    assert said.splitlines()[-1] == "next: imagefactory job write pytorch-2.5-cu124"
    failed = joined("show", "pytorch-2.1").out
    assert "not        on 8.0: no-kernel" in failed
    assert failed.splitlines()[-1] == "next: imagefactory search pytorch"
    assert joined("show", "jax").out.splitlines()[-1] == (
        "next: imagefactory job write jax-0.4.30-cu12 --allow-unverified"
    )
    assert json_of(joined("show", "jax", "--json"), "images")["images"][0]["framework"] == "jax"
    assert "matches 3 targets" in joined("show", "pytorch", code=2).err


def test_verdicts_are_those_that_the_catalogue_carries(joined: Call) -> None:
    said = joined("verdict", "list", "pytorch-2.5")
    assert said.out.startswith("registry.example.org/gpu/pytorch@sha256:")
    assert said.out.count("verified  yes ") == 2
    assert " lab " in said.out
    (image,) = json_of(joined("verdict", "list", "jax", "--json"), "verdicts")["images"]
    assert image["verdicts"] == []
    assert "7.0" in joined("verdict", "list", "pytorch-2.3", "--capability", "7.0", code=9).err
    joined("verdict", "list", "pytorch-2.3", "--capability", "8.0")
    rows = json_of(joined("verdict", "list", "pytorch-2.5", "--json"), "verdicts")["images"][0]["verdicts"]
    assert {row["keyid"] for row in rows} == {LAB.keyid}


def test_no_hint_sends_him_to_what_he_cannot_do(joined: Call) -> None:
    """Without a factory nobody verifies, pushes or trusts for others."""
    for call in (
        ("job", "write", "jax"),
        ("job", "write", "pytorch-2.1"),
        ("verdict", "list", "jax", "--capability", "8.0"),
    ):
        hint = joined(*call, code=9).err
        assert "hint: " in hint
        for word in ("imagefactory verify", "imagefactory push", "imagefactory build"):
            assert word not in hint, call


def test_a_folder_that_is_named_is_a_factory_or_a_mistake(joined: Call, tmp_path: Path) -> None:
    assert joined("-C", str(tmp_path), "list", code=2).error_codes == ("project-not-found",)
