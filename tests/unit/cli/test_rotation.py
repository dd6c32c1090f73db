"""A year of a site's keys at the command line: rotated, stolen, revoked by; and what a thief of one can do.

The GPU is made up and so is what the host saw of it; the keys are thrown away with the test.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from imagefactory.actions.publish import read_current
from imagefactory.actions.verdicts import attach_signed
from imagefactory.errors import StatementError, UsageError
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import ImageReference
from imagefactory.trust.catalog import LIFE, Catalog, sign_catalog, verify_catalog
from imagefactory.trust.catalog_package import INVITATION, parse_layer, unpack_artifact
from imagefactory.trust.invitation import parse_invitation
from imagefactory.trust.keys import SigningKey, keys_directory, read_signing_key
from imagefactory.trust.offers import publish_catalog, verify_offer
from imagefactory.trust.policy import TrustRules, parse_trust
from imagefactory.trust.verdict import VerdictStatus
from tests.made.command import json_of
from tests.made.signing import QUIET, Bench
from tests.made.trusted import write_settings

TARGET = "one-12.1-cu121"
MINUTE = timedelta(minutes=1)


@pytest.fixture
def site(bench: Bench) -> Bench:
    """A registry in the settings, one verified image, a catalog and an invitation."""
    root = bench.folder / "root"
    text = (root / "imagefactory.toml").read_text()
    write_settings(root, f'registry = "{bench.registry.host}"\n{text}')
    image = bench.push(b"a", 1)
    bench.verify(image, now=datetime.now(UTC) - 5 * MINUTE)
    bench.promote()
    bench.call("site", "publish")
    invite(bench)
    return bench


def invite(bench: Bench) -> None:
    bench.call("site", "invite", "--push", "-o", str(bench.folder / "invitation.toml"))


def key_named(bench: Bench, name: str) -> SigningKey:
    return read_signing_key(keys_directory(bench.factory.environ) / f"{name}.pem")


def place_of(bench: Bench, repository: str = "one") -> StoreRepository:
    return StoreRepository(store=RegistryClient(bench.registry.host), repository=repository)


def published(bench: Bench, tag: str = "current") -> bytes:
    place = place_of(bench, "catalog")
    found = place.store.manifest("catalog", tag)
    assert found
    kind = {"kind": INVITATION} if tag == "invitation" else {}
    layer = parse_layer(found[1], "x", **kind)
    data = b"".join(place.store.read("catalog", layer))
    return unpack_artifact(data, "x") if kind else data


def invited(bench: Bench) -> TrustRules:
    """The trust of a person who joins now."""
    data = published(bench, "invitation")
    parse_invitation(data, "x")
    return parse_trust(data.decode(), "x")


def seen(bench: Bench, trust: TrustRules) -> Catalog:
    return verify_catalog(published(bench), trust, datetime.now(UTC))


def standings(bench: Bench, trust: TrustRules) -> list[tuple[str, str]]:
    """What a reader makes of the verdicts in the catalog, with the names of their keys."""
    catalog = seen(bench, trust)
    names = {key.keyid: key.name for key in trust.keys}
    return [
        (judged.standing.value, names[judged.verdict.keyid])
        for image in catalog.images
        for judged in verify_offer(catalog, image, trust, datetime.now(UTC)).judged
        if judged.verdict
    ]


def here(bench: Bench) -> dict[str, str]:
    """The standing of each verdict in the registry for the site itself, by its capability."""
    said = bench.call("verdict", "list", TARGET, "--registry", bench.registry.host, "--json")
    rows = [row for image in json_of(said, "verdict-list")["images"] for row in image["verdicts"]]
    return {row["report"]["device"]["capability"]: row["status"] for row in rows}


def rotate(bench: Bench) -> Any:
    return json_of(bench.call("key", "rotate", "--json"), "key-rotate")


def forge(bench: Bench, key: SigningKey, capability: str, when: datetime) -> None:
    """As who has the key's file, and may push, does."""
    image = bench.tags["12.1-cu121"]
    signed = bench.sign(place_of(bench), image, capability, now=when.replace(microsecond=0), key=key)
    where = ImageReference(registry=bench.registry.host, repository="one", digest=image)
    attach_signed(bench.factory, signed, where, QUIET)


# --- the journey ---------------------------------------------------------------------------------


def test_rotated_by_one_command(site: Bench) -> None:
    said = rotate(site)
    assert (said["name"], said["retired"]["name"], said["retired"]["recorded"]) == ("lab-2", "lab", 1)
    assert len(said["published"]) == 3
    record = (site.folder / "root" / "retired-keys" / "lab.txt").read_text().split()
    assert len(record) == 1
    trust = invited(site)  # who joins now accepts the old verdicts
    assert [key.name for key in trust.keys] == ["lab", "lab-2"]
    assert seen(site, trust).keyid == key_named(site, "lab-2").keyid
    assert standings(site, trust) == [("good", "lab")]
    assert here(site) == {"8.0": "good"}
    site.verify(site.tags["12.1-cu121"], "9.0", now=datetime.now(UTC) + MINUTE)  # by the new one
    site.call("site", "publish")
    assert sorted(standings(site, trust)) == [("good", "lab"), ("good", "lab-2")]
    again = rotate(site)
    assert (again["name"], again["retired"]["name"]) == ("lab-3", "lab-2")
    assert [one for one in standings(site, invited(site)) if one[0] == "good"]


def test_a_retired_key_signs_nothing(site: Bench) -> None:
    site.call("key", "retire", "lab")
    for words in (
        (
            "site",
            "publish",
        ),
        ("verdict", "revoke", TARGET, "--reason", "x"),
        ("key", "rotate"),
    ):
        assert site.call(*words, code=9).error_codes == ("signing-key-retired",)
    assert site.call("key", "create", "lab2")
    site.call("key", "trust", "lab2")
    site.call("site", "publish")  # in the place of that of a retired key
    invite(site)
    assert standings(site, invited(site)) == [("good", "lab")]


def test_rotation_refuses_before_it_changes_anything(site: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    file = site.folder / "root" / "imagefactory.toml"
    before = file.read_text()
    monkeypatch.setenv("IMAGEFACTORY_SIGNING_KEY", "lab")
    site.call("key", "rotate", code=2)
    monkeypatch.delenv("IMAGEFACTORY_SIGNING_KEY")
    with site_down(site):
        site.call("key", "rotate", code=8)
    broken = site.folder / "root" / "recipes" / "broken.yaml"  # its repository may have signatures too
    broken.write_text("family: broken\n")
    for command in ("rotate", "retire"):
        words = ("key", command, *(("lab",) if command == "retire" else ()))
        assert set(site.call(*words, code=2).error_codes) == {"recipe-invalid"}
    broken.unlink()
    assert file.read_text() == before
    assert not list((site.folder / "root").glob("retired-keys/*"))
    assert rotate(site)["name"] == "lab-2"


@contextmanager
def site_down(bench: Bench) -> Iterator[None]:
    """Its registry answers nobody."""
    ways = bench.registry.ways
    bench.registry.ways = replace(ways, auth="basic")
    yield
    bench.registry.ways = ways


def test_the_log_says_who_did_what(site: Bench) -> None:
    rotate(site)
    site.call("verdict", "revoke", TARGET, "--reason", "wrong sums")
    rows = json_of(site.call("key", "log", "--json"), "key-log")["entries"]
    assert {frozenset(row) for row in rows} == {
        frozenset(("time", "user", "host", "action", "what", "where", "key", "why"))
    }
    acts = [(row["action"], row["what"]) for row in rows if row["action"] not in ("promote", "publish")]
    assert [action for action, _ in acts if action in ("rotate", "revoke")] == ["rotate", "revoke"]
    keys = {name: key_named(site, name).keyid for name in ("lab", "lab-2")}
    by = {(row["action"], row["key"]) for row in rows}
    assert {("sign", keys["lab"]), ("revoke", keys["lab-2"]), ("publish", keys["lab"])} <= by
    assert {row["why"] for row in rows if row["action"] == "revoke"} == {"wrong sums"}
    assert any(row["action"] == "promote" and "12.1-cu121" in row["what"] for row in rows)
    log = site.folder / "store" / "journal" / "audit.jsonl"
    before = log.read_bytes()
    log.write_bytes(before + b'{"action": "si')  # a kill
    site.call("site", "publish")
    assert log.read_bytes().startswith(before)
    after = json_of(site.call("key", "log", "--json"), "key-log")["entries"]
    assert after[: len(rows)] == rows
    assert after[-1]["action"] == "publish"


# --- a thief -------------------------------------------------------------------------------------


def test_a_retired_key_gains_nothing_by_dating_back(site: Bench) -> None:
    lab, old = key_named(site, "lab"), invited(site)
    former = seen(site, old)
    rotate(site)
    trust = invited(site)
    forge(site, lab, "9.0", datetime.now(UTC) - 3 * MINUTE)
    assert here(site) == {"8.0": "good", "9.0": "key-retired"}
    fates = site.promote()
    assert "12.1-cu121-sm90" not in {tag for tag, row in fates.items() if row["after"]}
    site.call("site", "publish")
    assert standings(site, trust) == [("good", "lab")]  # the old one's alone
    site.call("key", "retire", "lab", code=2)  # nothing enters the record later
    assert here(site)["9.0"] == "key-retired"
    # A catalog of the past, in the place of the present one.
    made = (datetime.now(UTC) - 3 * MINUTE).replace(microsecond=0)
    back = sign_catalog(replace(former, created=made, expires=made + LIFE), lab)
    publish_catalog(place_of(site, "catalog"), back, made)
    with pytest.raises(StatementError, match="key-retired"):
        seen(site, trust)
    site.call("site", "publish")  # the site puts its own there again, and takes nothing of it over
    assert standings(site, trust) == [("good", "lab")]


def test_without_its_record_nothing_of_a_retired_key_counts(site: Bench) -> None:
    rotate(site)
    record = site.folder / "root" / "retired-keys" / "lab.txt"
    whole = record.read_text()
    lab = key_named(site, "lab")
    forge(site, lab, "9.0", datetime.now(UTC) - 3 * MINUTE)
    forged = json_of(
        site.call("verdict", "list", TARGET, "--registry", site.registry.host, "--json"), "verdict-list"
    )
    names = {row["digest"] for image in forged["images"] for row in image["verdicts"]}
    record.write_text("".join(f"{name}\n" for name in sorted(names)))  # its digest stands in the settings
    assert set(here(site).values()) == {"key-retired"}
    record.unlink()
    assert set(here(site).values()) == {"key-retired"}
    record.write_text(whole)
    assert here(site) == {"8.0": "good", "9.0": "key-retired"}


def test_of_a_stolen_key_nothing_counts_and_an_invitation_says_so(site: Bench) -> None:
    before = invited(site)
    site.call("key", "create", "fresh")
    site.call("key", "trust", "fresh")
    site.call("key", "retire", "lab", "--stolen")
    assert here(site) == {"8.0": "key-retired"}
    invite(site)
    (row, _) = tomllib.loads(published(site, "invitation").decode())["trust"]
    assert (row["name"], row["until"]) == ("lab", row["from"])
    assert invited(site).keys[0].until == before.keys[0].since
    site.call("site", "publish")
    assert standings(site, invited(site)) == []


def test_a_retired_key_takes_back_nothing_of_its_successor(site: Bench) -> None:
    from imagefactory.actions.verdicts import StatementRequest, attach_to
    from imagefactory.oci.candidates import REVOCATION_TYPE
    from imagefactory.trust.attached import read_subject
    from imagefactory.trust.judgement import RevocationRequest, sign_revocation

    lab = key_named(site, "lab")
    rotate(site)
    new = site.verify(site.tags["12.1-cu121"], "9.0", now=datetime.now(UTC) + MINUTE)
    subject = read_subject(place_of(site), site.tags["12.1-cu121"])
    withdrawal = RevocationRequest(subject=subject, why="mine again", verdicts=(new,))
    envelope = sign_revocation(withdrawal, lab, datetime.now(UTC) - 3 * MINUTE)
    attaching = StatementRequest(subject=subject, kind=REVOCATION_TYPE, envelope=envelope, until=None)
    attach_to(site.factory, place_of(site), attaching, QUIET)
    assert here(site)["9.0"] == "good"


# --- whose catalog -----------------------------------------------------------------------------


def test_another_key_s_catalog_is_not_replaced_in_silence(
    site: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = published(site)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(site.folder / "other"))
    root = site.folder / "root"
    write_settings(root, f'registry = "{site.registry.host}"\n')
    site.call("key", "create", "second")
    site.call("key", "trust", "second", "--since", "2026-01-01")
    said = site.call("site", "publish", code=9)
    assert "--yes-everybody-must-join-again" in said.err
    assert published(site) == first
    file = site.folder / "catalog.json"
    file.write_bytes(first)
    site.call("site", "publish", "--output", str(file), code=9)
    assert file.read_bytes() == first
    unreadable = site.folder / "a directory.json"
    unreadable.mkdir()  # root reads every file
    with pytest.raises(UsageError, match="cannot read"):  # it is not taken for nothing
        read_current(unreadable, TrustRules(), datetime.now(UTC))
    site.call("site", "publish", "--yes-everybody-must-join-again")
    assert published(site) != first
    site.call("site", "publish")  # its own


# --- revocations ---------------------------------------------------------------------------------


def test_a_revocation_reaches_who_reads_the_catalog(site: Bench) -> None:
    image = site.tags["12.1-cu121"]
    said = site.call("verdict", "revoke", TARGET, "--capability", "8.0", "--reason", "wrong sums", "--json")
    assert len(json_of(said, "verdict-revoke")["catalog"]) == 2
    trust = invited(site)
    (row,) = seen(site, trust).images
    (cell,) = row.revoked
    assert (cell.capability, cell.by, cell.why, cell.subject.index) == ("8.0", "lab", "wrong sums", image)
    site.push(b"b", 2)  # another candidate: what was revoked stays known
    site.call("site", "publish")
    assert seen(site, trust).images[0].revoked == (cell,)
    rotate(site)
    assert seen(site, invited(site)).images[0].revoked == (cell,)
    site.call("report", "-o", str(site.folder / "site"))
    page = (site.folder / "site" / "images" / f"{TARGET}.html").read_text()
    assert "wrong sums" in page


def test_a_revocation_whose_catalog_cannot_be_signed_says_what_to_run(site: Bench) -> None:
    publish_catalog(place_of(site, "catalog"), foreign(site), datetime.now(UTC))
    said = site.call("verdict", "revoke", TARGET, "--reason", "wrong sums", code=9)
    assert said.error_codes == ("publish-incomplete",)
    assert "imagefactory site publish" in said.err
    assert here(site) == {"8.0": VerdictStatus.REVOKED.value}


def foreign(bench: Bench) -> bytes:
    """The catalog, signed by a key that nobody here trusts."""
    from tests.made.verdicts import STRANGER

    return sign_catalog(seen(bench, invited(bench)), STRANGER)
