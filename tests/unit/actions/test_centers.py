"""Two centers joined side by side: whose images a name means, and whose keys vouch for them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.actions.centers import center_name, centers_of
from imagefactory.errors import UsageError
from imagefactory.settings.load import center_settings, load_settings
from imagefactory.trust.catalog import LIFE, sign_catalog
from imagefactory.trust.invitation import Invitation, format_invitation
from imagefactory.trust.keys import PublicKey, SigningKey
from imagefactory.trust.policy import TrustGrant, read_trust
from imagefactory.verify.report import VerifiedImage
from tests.made.catalog import make_catalog, make_image
from tests.made.command import Call, json_of
from tests.made.joined import NOW, envelope, join_site, person_at
from tests.made.verdicts import LAB, STRANGER, SUITE, digest

FIRST = "catalog"  # the first center's name, made of its catalog's
DAY = timedelta(days=1)
COMMON, ONLY = "pytorch-2.5-cu124", "pytorch-2.7-cu128"
REFERENCE = f"registry.example.org/second/pytorch@{digest('d')}"  # of ONLY


def grant(key: SigningKey = STRANGER, until: datetime = NOW + 99 * DAY) -> TrustGrant:
    public = PublicKey(name=key.name, raw=key.public)
    return TrustGrant(key=public, since=(NOW - 9 * DAY).date(), until=until.date())


def invitation(tmp_path: Path, **changes: Any) -> str:
    made = Invitation(catalog=str(tmp_path / "second.json"), site="slurm", sif_folder="/sif", keys=(grant(),))
    path = tmp_path / "invitation.toml"
    path.write_text(format_invitation(replace(made, **changes)))
    return str(path)


def publish_second(tmp_path: Path, key: SigningKey = STRANGER) -> None:
    """A catalog with an image that the first center has too, and one that it alone has.

    Its own key verified both on 9.0, the first center's key on 8.0.
    """
    vouched = (envelope("9.0", "5", STRANGER), envelope("8.0", "6", LAB))
    common = replace(
        make_image(envelopes=vouched, sifs=()), target=COMMON, version="2.5.1", cuda="12.4", predicted=()
    )
    subject = VerifiedImage(target=ONLY, index=digest("d"), manifest=digest("e"), config=digest("f"))
    of_it = (envelope("9.0", "7", STRANGER, subject=subject), envelope("8.0", "8", LAB, subject=subject))
    only = replace(common, target=ONLY, version="2.7.0", cuda="12.8", subject=subject, envelopes=of_it)
    only = replace(only, reference=REFERENCE)
    made = NOW - timedelta(hours=1)
    catalog = make_catalog(common, only, created=made, expires=made + LIFE, suites=(SUITE,))
    (tmp_path / "second.json").write_bytes(sign_catalog(catalog, key))


@pytest.fixture
def person(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    return person_at(capsys, tmp_path, monkeypatch)


@pytest.fixture
def joined(person: Call, tmp_path: Path) -> Call:
    """Who joined two centers."""
    join_site(tmp_path)
    publish_second(tmp_path)
    told = json_of(
        person("site", "join", invitation(tmp_path), "--name", "second", "--yes", "--json"), "site-join"
    )
    assert (told["joined_as"], told["other_centers"], told["catalog_works"]) == ("second", [FIRST], True)
    return person


def verified(call: Call, *names: str) -> dict[str, list[str]]:
    images = json_of(call("list", *names, "--json"), "catalog-images")["images"]
    return {image["name"]: image["verified"] for image in images}


def test_the_first_center_stays_as_it_was(person: Call, tmp_path: Path) -> None:
    join_site(tmp_path)
    own = tmp_path / "config/imagefactory/imagefactory.toml"
    before = own.read_bytes()
    first = json_of(person("list", "--json"), "catalog-images")
    assert len(first["catalogs"]) == 1
    publish_second(tmp_path)
    person("site", "join", invitation(tmp_path), "--name", "second", "--yes")
    assert own.read_bytes() == before
    own_file = tomllib.loads((own.parent / "centers/second.toml").read_text())
    assert (own_file["catalog"], own_file["site"]) == (str(tmp_path / "second.json"), "slurm")
    assert [row["keyid"] for row in own_file["trust"]] == [STRANGER.keyid]
    assert json_of(person("site", "join", invitation(tmp_path), "--json"), "site-join")["changes"] == []
    person("site", "remove", "second", "--yes")
    assert json_of(person("list", "--json"), "catalog-images") == first


def test_images_of_both_are_named_with_their_center(joined: Call) -> None:
    found = verified(joined)
    assert set(found) == {
        *(
            f"{FIRST}/{name}"
            for name in ("pytorch-2.1-cu121", "pytorch-2.3-cu121", COMMON, "jax-0.4.30-cu12")
        ),
        *(f"second/{name}" for name in (COMMON, ONLY)),
    }
    assert set(verified(joined, "second/*")) == {f"second/{COMMON}", f"second/{ONLY}"}
    assert set(verified(joined, COMMON)) == {f"{FIRST}/{COMMON}", f"second/{COMMON}"}
    told = json_of(joined("search", "pytorch", "2.5", "--json"), "search")
    assert {(one["name"], one["center"], one["target"]) for one in told["images"]} == {
        (f"{FIRST}/{COMMON}", FIRST, COMMON),
        (f"second/{COMMON}", "second", COMMON),
    }
    assert [one["center"] for one in told["catalogs"]] == [FIRST, "second"]
    assert [
        one["name"] for one in json_of(joined("search", "second", "2.7", "--json"), "search")["images"]
    ] == [f"second/{ONLY}"]
    offers = json_of(joined("search", "--json"), "search")["images"]
    assert {one["name"] for one in offers} == set(found)


def test_a_key_of_one_center_vouches_for_no_image_of_another(joined: Call) -> None:
    """Each has its verdict by its own key; the second center's image has one by the first one's key too."""
    found = verified(joined)
    assert found[f"{FIRST}/{COMMON}"] == ["8.0", "9.0"]
    assert found[f"second/{COMMON}"] == ["9.0"]
    rows = json_of(joined("verdict", "list", f"second/{COMMON}", "--json"), "verdict-list")["images"][0][
        "verdicts"
    ]
    assert {(row["key"], row["status"]) for row in rows} == {("stranger", "good"), ("", "wrong-key")}


def test_a_catalog_of_one_center_signed_by_the_other_is_left_out(joined: Call, tmp_path: Path) -> None:
    publish_second(tmp_path, LAB)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")  # without the copy that is kept
    said = joined("list", "--json")
    assert [row["center"] for row in json_of(said, "catalog-images")["catalogs"]] == [FIRST]
    assert {image["center"] for image in json_of(said, "catalog-images")["images"]} == {FIRST}
    assert "second" in said.err
    joined("list", "second/*", code=9)


def test_a_name_that_one_center_has_is_enough(joined: Call) -> None:
    told = json_of(joined("job", "write", ONLY, "--json"), "job")
    assert (told["catalog"]["center"], told["target"], told["site"]) == ("second", ONLY, "slurm")
    assert [one["capability"] for one in told["gpus"]] == ["9.0"]
    told = json_of(joined("job", "write", "pytorch-2.3", "--json"), "job")
    assert (told["catalog"]["center"], told["site"]) == (FIRST, "generic")


@pytest.mark.parametrize(
    "command",
    [("job", "write"), ("verdict", "list"), ("show",), ("run",), ("pull",)],
    ids=lambda words: words[0],
)
def test_a_name_that_both_have_stops_with_both(joined: Call, command: tuple[str, ...]) -> None:
    said = joined(*command, COMMON, code=2)
    assert f"{FIRST}/{COMMON}, second/{COMMON}" in said.err
    assert not list(Path().glob("*.sub"))


@pytest.mark.parametrize("command", ["run", "pull"])
def test_an_image_is_fetched_by_the_digest_of_its_center(
    joined: Call, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(_: object, reference: object, *__: object, **___: object) -> None:
        asked.append(str(reference))
        raise UsageError("pool-refused", "refused")

    monkeypatch.setattr(
        f"imagefactory.actions.{'transfer' if command == 'pull' else command}.pull_image", refuse
    )
    joined(command, f"second/{ONLY}", code=2)
    joined(command, ONLY, code=2)
    assert asked == [REFERENCE] * 2


def test_one_center_down_hides_no_other(joined: Call, tmp_path: Path) -> None:
    joined("list")
    (tmp_path / "second.json").unlink()
    told = json_of(joined("list", "--json"), "catalog-images")  # kept, and told
    assert [one["source"] for one in told["catalogs"]] == ["place", "cached"]
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    said = joined("search", "pytorch", "--json")
    assert {one["center"] for one in json_of(said, "search")["images"]} == {FIRST}
    assert "images of second are skipped: " in " ".join(said.err.split())
    joined("job", "write", f"second/{ONLY}", code=2)
    assert json_of(joined("job", "write", "pytorch-2.3", "--json"), "job")["catalog"]["center"] == FIRST
    sites = {one["name"]: one for one in json_of(joined("site", "list", "--json"), "site-list")["sites"]}
    assert (sites[FIRST]["images"], sites[FIRST]["error"]) == (4, "")
    assert sites["second"]["images"] is None
    assert sites["second"]["error"]


def test_a_check_knows_the_images_of_both(joined: Call) -> None:
    Path("job.sub").write_text(
        f"executable = /bin/true\nrequest_gpus = 1\ncontainer_image = docker://{REFERENCE}\nqueue\n"
    )
    machines = [
        {"name": f"n{capability}", "gpus": [{"capability": capability, "cuda": "13.0"}]}
        for capability in ("8.0", "9.0")
    ]
    Path("pool.json").write_text(json.dumps({"format": "imagefactory.inventory/1", "machines": machines}))
    said = joined("job", "check", "job.sub", "--inventory", "pool.json", "--json", code=9)
    told = json_of(said, "job-check")
    assert [one["center"] for one in told["catalogs"]] == [FIRST, "second"]
    assert {one["capability"]: one["status"] for one in told["queues"][0]["gpus"]} == {
        "8.0": "not-tested",
        "9.0": "verified",
    }


def test_pages_and_tables_are_of_one_center(joined: Call, tmp_path: Path) -> None:
    joined("report", "--format", "json", code=2)
    rows = json.loads(joined("report", "second/*", "--format", "json").out)["combos"]
    assert {row["target"] for row in rows} == {COMMON, ONLY}
    joined("report", f"{FIRST}/*", "second/*", "-o", "site", code=2)
    joined("report", "second/*", "-o", "site")
    assert Path(f"site/images/{ONLY}.html").is_file()


def test_doctor_looks_at_each(joined: Call, tmp_path: Path) -> None:
    (tmp_path / "second.json").unlink()
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    rows = json_of(joined("doctor", "--for", "job", "--json", code=6), "doctor")["findings"]
    states = {row["name"]: row["status"] for row in rows}
    assert (states[f"{FIRST}: catalog"], states["second: catalog"]) == ("ok", "denied")
    assert (states[f"{FIRST}: key lab"], states["second: key stranger"]) == ("ok", "ok")


def test_only_people_s_own_files_join_centers(
    joined: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment names a catalog it is the only one."""
    monkeypatch.setenv("IMAGEFACTORY_CATALOG", str(tmp_path / "catalog"))
    (row,) = json_of(joined("list", "--json"), "catalog-images")["catalogs"]
    assert row["reference"] == str(tmp_path / "catalog")
    project = tmp_path / "project"
    (project / "centers").mkdir(parents=True)
    (project / "imagefactory.toml").write_text("")
    (project / "centers/evil.toml").write_text('catalog = "evil.example.org/gpu"\n')
    monkeypatch.delenv("IMAGEFACTORY_CATALOG")
    monkeypatch.chdir(project)
    assert {one["name"] for one in json_of(joined("site", "list", "--json"), "site-list")["sites"]} == {
        *(FIRST, "second")
    }


# --- joining -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"keys": (grant(LAB),)}, ""),  # a key of the first one, and another catalog: did that move?
        ({"center": FIRST}, ""),
        ({}, "No/Name"),
        ({}, "a.b"),
    ],
)
def test_what_may_be_a_center_that_is_joined_stops(
    person: Call, tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    join_site(tmp_path)
    own = tmp_path / "config/imagefactory"
    before = (own / "imagefactory.toml").read_bytes()
    person(
        "site", "join", invitation(tmp_path, **changes), "--yes", *(("--name", name) if name else ()), code=2
    )
    assert [path.name for path in own.iterdir()] == ["imagefactory.toml"]
    assert (own / "imagefactory.toml").read_bytes() == before


def test_a_center_that_moved_takes_the_place_of_itself(person: Call, tmp_path: Path) -> None:
    join_site(tmp_path)
    publish_second(tmp_path, LAB)
    own = tmp_path / "config/imagefactory"
    person("site", "join", invitation(tmp_path, keys=(grant(LAB),)), "--name", FIRST, "--yes")
    assert tomllib.loads((own / "imagefactory.toml").read_text())["catalog"] == str(tmp_path / "second.json")
    assert not (own / "centers").exists()
    # with another key it is asked loudly, so not by a script
    person("site", "join", invitation(tmp_path, catalog="/other.json"), "--name", FIRST, "--yes", code=9)


def test_the_first_gets_a_name_and_no_catalog_is_joined_twice(joined: Call, tmp_path: Path) -> None:
    own = tmp_path / "config/imagefactory"
    again = ("site", "join", invitation(tmp_path), "--yes")
    joined(*again, "--name", "third", code=2)
    joined(*again, "--name", FIRST, code=2)
    first = invitation(tmp_path, catalog=str(tmp_path / "catalog"), keys=(grant(LAB),), site="generic")
    joined("site", "join", first, "--name", "ours", "--yes")
    assert tomllib.loads((own / "imagefactory.toml").read_text())["center"] == "ours"
    assert [path.name for path in (own / "centers").iterdir()] == ["second.toml"]
    assert set(verified(joined, "jax")) == {"ours/jax-0.4.30-cu12"}
    joined("site", "join", first, "--yes")  # the name stays
    assert tomllib.loads((own / "imagefactory.toml").read_text())["center"] == "ours"


def test_a_key_that_was_retired_anywhere_comes_back_by_no_invitation(joined: Call, tmp_path: Path) -> None:
    path = tmp_path / "config/imagefactory/imagefactory.toml"
    row = tomllib.loads(path.read_text())["trust"][0]
    path.write_text(path.read_text().replace(str(row["until"]), (NOW - DAY).date().isoformat()))
    third = invitation(tmp_path, catalog="/third.json", keys=(grant(LAB),))
    joined("site", "join", third, "--name", "third", "--yes", code=2)


def test_a_key_that_the_person_retires_counts_for_no_center(joined: Call, tmp_path: Path) -> None:
    path = tmp_path / "config/imagefactory/imagefactory.toml"
    center = path.parent / "centers/second.toml"
    trust = read_trust((center,), (path,))
    assert [(key.name, key.until > NOW) for key in trust.keys] == [("stranger", True)]
    text = center.read_text()
    until = str(tomllib.loads(text)["trust"][0]["until"])
    row = text[text.index("[[trust]]") :].replace(until, (NOW - DAY).date().isoformat())
    path.write_text(f"{path.read_text()}\n[policy]\nexpires-days = 3\n\n{row}")
    trust = read_trust((center,), (path,))
    assert [(key.name, key.until > NOW) for key in trust.keys] == [("stranger", False)]
    assert trust.policy.days == 3
    joined("list", "second/*", code=9)  # its catalog is signed by that key


def test_leaving_the_first_takes_its_keys_along(joined: Call, tmp_path: Path) -> None:
    path = tmp_path / "config/imagefactory/imagefactory.toml"
    path.write_text(f'workers = "2"\n{path.read_text()}')
    joined("site", "remove", "nobody", "--yes", code=3)
    joined("site", "remove", FIRST, code=2)  # nobody can be asked
    told = json_of(joined("site", "remove", FIRST, "--yes", "--json"), "site-remove")
    assert told["removed"] == [f"catalog = {tmp_path / 'catalog'}", "key lab"]
    assert tomllib.loads(path.read_text()) == {"workers": "2"}
    told = json_of(joined("list", "--json"), "catalog-images")  # the one that is left needs no name
    assert [row["center"] for row in told["catalogs"]] == ["second"]
    assert {image["target"] for image in told["images"]} == {COMMON, ONLY}
    assert json_of(joined("show", f"second/{ONLY}", "--json"), "catalog-images")["images"][0]["verified"] == [
        "9.0"
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("A.toml", 'catalog = "x.example.org"\n'),
        ("a.toml", ""),
        ("a.toml", 'catalog = "./x.json"\n'),
        ("a.toml", 'catalog = "x.example.org"\nregistry = "x.example.org"\n'),
        ("a.toml", 'catalog = "x.example.org"\nsite = "nowhere"\n'),
        (f"{FIRST}.toml", 'catalog = "x.example.org"\n'),
    ],
)
def test_a_file_that_cannot_be_used_stops_what_reads_it(
    person: Call, tmp_path: Path, name: str, text: str
) -> None:
    join_site(tmp_path)
    path = tmp_path / "config/imagefactory/centers" / name
    path.parent.mkdir()
    path.write_text(text)
    assert name in person("list", code=2).err
    person("config")  # nothing else


@pytest.mark.parametrize(
    ("name", "site", "catalog", "called"),
    [
        ("ours", "chtc", "registry.example.org/gpu", "ours"),
        ("", "chtc", "registry.example.org/gpu", "chtc"),
        ("", "generic", "registry.example.org:5000/gpu:x", "registry-example-org-5000"),
        ("", "slurm", "/shared/gpu/catalog.json.gz", "catalog"),
        ("", "generic", "/", "center"),
    ],
)
def test_a_center_has_a_name(name: str, site: str, catalog: str, called: str) -> None:
    assert center_name(name, site, catalog) == called


def test_each_center_has_settings_of_its_own(joined: Call, tmp_path: Path) -> None:
    path = tmp_path / "config/imagefactory/centers/second.toml"
    path.write_text(f'sbatch-options = "--account=two"\n{path.read_text()}')
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path), "XDG_CONFIG_DIRS": "/none"}
    settings = load_settings(directory=None, start=Path(), environ=environ)
    second = center_settings(settings, path)
    assert (second.sif_folder.value, second.sbatch_options.value) == ("/sif", "--account=two")
    assert settings.sbatch_options.value == ""
    asked = {**environ, "IMAGEFACTORY_SITE": "chtc"}
    settings = load_settings(directory=None, start=Path(), environ=asked)
    assert center_settings(settings, path).site.value == "chtc"
    settings = load_settings(directory=None, start=Path(), environ=environ)
    assert [(one.name, one.settings.site.value) for one in centers_of(settings)] == [
        (FIRST, "generic"),
        ("second", "slurm"),
    ]


# --- list, show and verdicts in an empty folder, answered by the catalog that somebody joined


@pytest.fixture
def member(person: Call, tmp_path: Path) -> Call:
    join_site(tmp_path)
    return person


def test_list_says_who_answers_and_what_is_verified(member: Call) -> None:
    lines = member("list").out.splitlines()
    assert lines[0].startswith("images of the catalog /")
    assert lines[1].startswith("oldest verdict of ")
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "IMAGE FRAMEWORK STATUS",
        "pytorch-2.3-cu121 torch 2.3.1 verified 8.0; predicted 7.0",
        "pytorch-2.5-cu124 torch 2.5.1 verified 8.0 9.0; predicted 7.0",
        "jax-0.4.30-cu12 jax 0.4.30 predicted 7.0",
        "pytorch-2.1-cu121 torch 2.1.2 -",
    ]
    told = json_of(member("list", "pytorch-2.3", "--json"), "catalog-images")
    assert told["catalogs"][0]["verdict_ages"]["oldest"]
    assert [(one["target"], one["verified"], one["predicted"]) for one in told["images"]] == [
        ("pytorch-2.3-cu121", ["8.0"], ["7.0"])
    ]
    assert [
        one["target"] for one in json_of(member("list", "jax", "--json"), "catalog-images")["images"]
    ] == ["jax-0.4.30-cu12"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("search", "pytorch"), "search"),
        (("search",), "search"),
        (("job", "write", "pytorch-2.3"), "job"),
        (("job", "check", "job.sub"), "job-check"),
        (("list",), "catalog-images"),
        (("show", "pytorch-2.3"), "catalog-images"),
    ],
)
def test_each_reader_says_that_the_catalog_is_the_kept_one(
    member: Call, tmp_path: Path, command: tuple[str, ...], kind: str
) -> None:
    Path("job.sub").write_text(
        f"executable = /bin/true\ncontainer_image = docker://x.example/y@sha256:{0:064}\nqueue\n"
    )
    assert json_of(member("list", "--json"), "catalog-images")["catalogs"][0]["source"] == "place"
    (tmp_path / "catalog").unlink()
    said = member(*command, "--json", code=9 if kind == "job-check" else 0)
    told = json_of(said, kind)
    made = NOW - timedelta(hours=1)
    (row,) = [told["catalog"]] if kind == "job" else told["catalogs"]
    assert row["source"] == "cached"
    assert row["created"] == f"{made:%Y-%m-%dT%H:%M:%SZ}"
    assert row["expires"] == f"{made + LIFE:%Y-%m-%dT%H:%M:%SZ}"
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
def test_texts_say_it_too(member: Call, tmp_path: Path, command: tuple[str, ...]) -> None:
    member("list")
    (tmp_path / "catalog").unlink()
    said = member(*command)
    assert "1 hour old" in said.out + said.err


def test_show_says_what_is_known_of_one(member: Call) -> None:
    said = member("show", "pytorch-2.5").out
    assert "registry.example.org/gpu/pytorch@sha256:aaaa" in said
    assert "verified   on 9.0 with drivers that take CUDA 12.4: passed the quick suite" in said
    assert "predicted  on 7.0: sm_80" in said
    assert "not        on 3.5: documented no: none" in said
    assert said.splitlines()[-1] == "next: imagefactory job write pytorch-2.5-cu124"
    failed = member("show", "pytorch-2.1").out
    assert "not        on 8.0: no-kernel" in failed
    assert failed.splitlines()[-1] == "next: imagefactory search pytorch"
    assert member("show", "jax").out.splitlines()[-1] == (
        "next: imagefactory job write jax-0.4.30-cu12 --allow-unverified"
    )
    assert json_of(member("show", "jax", "--json"), "catalog-images")["images"][0]["framework"] == "jax"
    assert "matches 3 targets" in member("show", "pytorch", code=2).err


def test_verdicts_are_those_that_the_catalog_carries(member: Call) -> None:
    said = member("verdict", "list", "pytorch-2.5")
    assert said.out.startswith("registry.example.org/gpu/pytorch@sha256:")
    assert said.out.count("verified  yes ") == 2
    assert " lab " in said.out
    (image,) = json_of(member("verdict", "list", "jax", "--json"), "verdict-list")["images"]
    assert image["verdicts"] == []
    assert "7.0" in member("verdict", "list", "pytorch-2.3", "--capability", "7.0", code=9).err
    member("verdict", "list", "pytorch-2.3", "--capability", "8.0")
    rows = json_of(member("verdict", "list", "pytorch-2.5", "--json"), "verdict-list")["images"][0][
        "verdicts"
    ]
    assert {row["keyid"] for row in rows} == {LAB.keyid}


def test_no_hint_sends_him_to_what_he_cannot_do(member: Call) -> None:
    """Without a factory nobody verifies, pushes or trusts for others."""
    for call in (
        ("job", "write", "jax"),
        ("job", "write", "pytorch-2.1"),
        ("verdict", "list", "jax", "--capability", "8.0"),
    ):
        hint = member(*call, code=9).err
        assert "hint: " in hint
        for word in ("imagefactory verify", "imagefactory push", "imagefactory build"):
            assert word not in hint, call


def test_a_folder_that_is_named_is_a_factory_or_a_mistake(member: Call, tmp_path: Path) -> None:
    assert member("-C", str(tmp_path), "list", code=2).error_codes == ("project-not-found",)
