"""An earlier catalog put back: with a new time and signature, and without what stopped to count since."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from imagefactory.actions.catalog import CatalogRequest
from imagefactory.actions.publish import (
    PREVIOUS,
    CatalogChange,
    CatalogRevision,
    PublishedCatalog,
    RollbackPlan,
    current_place,
    find_earlier,
    prepare_catalog,
    publish,
    publishing_key,
    read_current,
    roll_back,
)
from imagefactory.actions.read_catalog import CachedCatalog
from imagefactory.errors import NothingSelectedError, StatementError, UsageError
from imagefactory.oci.candidates import APPROVAL_TYPE, REVOCATION_TYPE
from imagefactory.oci.graph import StoreRepository, read_manifest
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.trust.approval import ApprovalSubject, sign_approval
from imagefactory.trust.attached import SignedStatement, attach, read_subject
from imagefactory.trust.audit import read_audit
from imagefactory.trust.catalog import Catalog, open_catalog, sign_catalog
from imagefactory.trust.catalog_package import CURRENT
from imagefactory.trust.offers import publish_catalog
from imagefactory.trust.policy import TrustRules, read_trust
from tests.made.command import json_of
from tests.made.errors import fails
from tests.made.signing import QUIET, Bench
from tests.made.trusted import write_settings
from tests.made.verdicts import STRANGER

TARGET = "one-12.1-cu121"
NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)


def request_at(bench: Bench, now: datetime) -> CatalogRequest:
    return CatalogRequest(targets=bench.factory.targets, now=now, registry=bench.registry.host)


def current_at(bench: Bench, now: datetime) -> PublishedCatalog | None:
    place = current_place(bench.factory, bench.registry.host)
    return read_current(place, read_trust(bench.factory.settings.files), now)


def publishes(bench: Bench, now: datetime) -> str:
    """The digest of what is there, published at that time."""
    result = prepare_catalog(bench.factory, request_at(bench, now), current_at(bench, now), QUIET)
    key = publishing_key(bench.factory, now)
    publish(bench.factory, result.catalog, key, bench.registry.host)
    return bench.registry.find("catalog").tags[CURRENT]


def finds(bench: Bench, name: str, now: datetime = NOW, trust: TrustRules | None = None) -> CatalogRevision:
    trust = trust or read_trust(bench.factory.settings.files)
    return find_earlier(bench.factory, request_at(bench, now), name, current_at(bench, now), trust)


def rolls_back(bench: Bench, name: str = PREVIOUS, now: datetime = NOW) -> RollbackPlan:
    return roll_back(bench.factory, now, current_at(bench, now), finds(bench, name, now), QUIET)


def current_of(bench: Bench, now: datetime) -> Catalog:
    current = current_at(bench, now)
    assert current is not None
    assert current.catalog is not None
    return current.catalog


def images(catalog: Catalog) -> dict[str, tuple[str, int]]:
    return {one.target: (one.subject.index, len(one.envelopes)) for one in catalog.images}


@pytest.fixture
def two(bench: Bench) -> tuple[str, str]:
    """The catalog of an image, then that of a newer one; gives their digests."""
    found = []
    for content, hours in ((b"a", 3), (b"b", 2)):
        digest = bench.push(content, 1 if content == b"a" else 2)
        bench.verify(digest, now=NOW - hours * HOUR)
        bench.promote()
        publishes(bench, NOW - hours * HOUR)
        found.append(digest)
    return found[0], found[1]


def test_the_previous_one_is_signed_again_with_a_newer_time(bench: Bench, two: tuple[str, str]) -> None:
    first, second = two
    back = rolls_back(bench)
    assert images(back.made.catalog) == {TARGET: (first, 1)}
    change = CatalogChange(target=TARGET, now=second, then=first, verdicts_now=1, verdicts_then=1)
    assert back.changes == (change,)
    assert back.earlier.catalog.created == NOW - 3 * HOUR
    said = json_of(
        bench.call("site", "publish", "--registry", bench.registry.host, "--rollback", "--json"),
        "site-publish",
    )
    assert said["rollback"]["digest"] == back.earlier.digest
    row = {"target": TARGET, "before": second, "after": first, "verdicts_before": 1, "verdicts_after": 1}
    assert said["rollback"]["changes"] == [row]
    assert [row["digest"] for row in said["images"]] == [first]
    current = current_of(bench, NOW + HOUR)
    assert current.created >= NOW
    assert images(current) == {TARGET: (first, 1)}
    (*_, act) = read_audit(bench.folder / "store")
    assert (act["action"], act["key"]) == ("rollback", current.keyid)
    assert back.earlier.digest in act["why"]
    again = finds(bench, PREVIOUS, NOW + HOUR)  # a second one undoes the first
    assert images(again.catalog) == {TARGET: (second, 1)}


def test_readers_take_it_and_not_the_old_bytes(bench: Bench, two: tuple[str, str], tmp_path: Path) -> None:
    """Whoever controls the registry can move the tag, and not sign."""
    kept = CachedCatalog(cache=tmp_path / "reader", where="the registry")
    kept.write(open_catalog(b"", "x"), current_of(bench, NOW).created)
    with pytest.raises(StatementError):
        kept.refuse_older(finds(bench, PREVIOUS).catalog.created)
    back, key = rolls_back(bench), publishing_key(bench.factory, NOW)
    publish(bench.factory, back.made.catalog, key, bench.registry.host)
    kept.refuse_older(current_of(bench, NOW).created)
    assert images(current_of(bench, NOW)) == {TARGET: (two[0], 1)}


@pytest.mark.parametrize("hidden", [False, True])
def test_what_was_revoked_since_stays_revoked(bench: Bench, two: tuple[str, str], hidden: bool) -> None:
    """Also where the registry hides the revocation: the store here remembers it."""
    first, _ = two
    earlier = finds(bench, PREVIOUS)
    assert images(earlier.catalog) == {TARGET: (first, 1)}
    where = f"{bench.registry.host}/one@{first}"
    bench.call("verdict", "revoke", where, "--reason", "wrong sums")
    if hidden:
        client, manifest = RegistryClient(bench.registry.host), bench.manifest(first)
        for one in client.referrers("one", manifest, REVOCATION_TYPE):
            client.delete_manifest("one", one.digest)
        assert client.referrers("one", manifest, REVOCATION_TYPE) == ()
    back = rolls_back(bench, earlier.digest, datetime.now(UTC) + HOUR)
    (image,) = back.made.catalog.images
    assert (image.subject.index, image.envelopes, len(image.revocations)) == (first, (), 1)
    assert [(row.capability, row.why) for row in image.revoked] == [("8.0", "wrong sums")]
    assert [name for name, _ in back.made.skipped] == [TARGET]


def test_a_dry_run_of_revoke_predicts_a_real_one(bench: Bench, two: tuple[str, str]) -> None:
    first, second = two
    before = (deepcopy(bench.registry.shelves.repositories), list(read_audit(bench.folder / "store")))
    words = ("verdict", "revoke", f"{bench.registry.host}/one@{second}", "--reason", "wrong sums", "--json")
    plan = json_of(bench.call(*words, "--dry-run"), "verdict-revoke")
    assert (bench.registry.shelves.repositories, list(read_audit(bench.folder / "store"))) == before
    real = json_of(bench.call(*words), "verdict-revoke")
    assert (plan["dry_run"], real["dry_run"], plan["revocation"]) == (True, False, "")
    assert real["catalog"][-1].partition("@")[0] == plan["catalog"][0]
    for key in ("place", "manifest", "revoked", "promotions", "errors"):
        assert plan[key] == real[key]
    assert {row["after"] for row in plan["promotions"][0]["tags"]} == {first}
    assert bench.call(*words, "--dry-run", code=9).error_codes == ("nothing-to-revoke",)


def test_what_the_current_one_says_was_revoked_stays_in_the_list(bench: Bench, two: tuple[str, str]) -> None:
    """The image of today goes, and who uses it still learns why not to."""
    _, second = two
    earlier = finds(bench, PREVIOUS)
    bench.call("verdict", "revoke", f"{bench.registry.host}/one@{second}", "--reason", "wrong sums")
    back = rolls_back(bench, earlier.digest, datetime.now(UTC) + HOUR)
    (image,) = back.made.catalog.images
    assert (image.subject.index, len(image.envelopes)) == (two[0], 1)
    assert [(row.subject.index, row.why) for row in image.revoked] == [(second, "wrong sums")]


def test_an_image_that_is_gone_is_left_out(bench: Bench, two: tuple[str, str]) -> None:
    earlier = finds(bench, PREVIOUS)
    RegistryClient(bench.registry.host).delete_manifest("one", two[0])
    with fails("catalog-nothing-valid"):
        rolls_back(bench, earlier.digest)


def test_what_too_few_keys_approved_does_not_come_back(bench: Bench, two: tuple[str, str]) -> None:
    """The earlier catalog is from before the policy: a rollback is no way around it."""
    path = bench.factory.settings.root_path / "imagefactory.toml"
    policy = "[policy]\npromotion-signatures = 1\n"
    write_settings(path.parent, path.read_text() + policy, bench.factory.environ)
    with pytest.raises(NothingSelectedError, match=f"{TARGET}: too few keys approved {two[0]}"):
        rolls_back(bench)
    place = StoreRepository(store=RegistryClient(bench.registry.host), repository="one")
    subject = replace(read_subject(place, two[0]), target=TARGET)
    wanted = ApprovalSubject(subject=subject, place=str(place), tag="12.1-cu121")
    envelope = sign_approval(wanted, publishing_key(bench.factory, NOW), NOW)
    manifest = read_manifest(place, subject.manifest).descriptor
    attach(place, SignedStatement(kind=APPROVAL_TYPE, subject=manifest, envelope=envelope))
    assert images(rolls_back(bench).made.catalog) == {TARGET: (two[0], 1)}


def test_verdicts_that_expired_do_not_come_back(bench: Bench, two: tuple[str, str]) -> None:
    policy = bench.folder / "root" / "imagefactory.toml"
    policy.write_text(policy.read_text() + "\n[policy]\nexpires-days = 1\n")
    bench.call("config", "--trust")
    back = rolls_back(bench, now=NOW + 22 * HOUR)
    assert images(back.made.catalog) == {TARGET: (two[0], 0)}
    assert [(one.verdicts_now, one.verdicts_then) for one in back.changes] == [(1, 0)]


def test_one_of_a_retired_key_is_not_taken(bench: Bench, two: tuple[str, str]) -> None:
    """Whoever has the old key can write any date."""
    digest = finds(bench, PREVIOUS).digest
    (key,) = read_trust(bench.factory.settings.files).keys
    retired = TrustRules(keys=(replace(key, until=NOW - HOUR),))
    with fails("catalog-rejected"):
        finds(bench, digest, trust=retired)
    with fails("no-earlier-catalog"):
        finds(bench, PREVIOUS, trust=retired)


def test_what_others_put_there_is_not_the_previous_one(bench: Bench, two: tuple[str, str]) -> None:
    """A stranger's catalog, and an old one of ours under the tag of a newer day."""
    oldest = finds(bench, PREVIOUS)
    place = current_place(bench.factory, bench.registry.host)
    repository = bench.registry.find("catalog")
    current = repository.tags[CURRENT]
    stranger = replace(oldest.catalog, created=NOW - 2.5 * HOUR, images=())
    publish_catalog(place, sign_catalog(stranger, STRANGER), stranger.created)
    publishes(bench, NOW - HOUR)  # the previous of this one is that of two hours ago
    repository.tags[f"{NOW:%Y%m%d}-{oldest.digest.removeprefix('sha256:')[:12]}"] = oldest.digest
    repository.tags[f"{NOW:%Y%m%d}-{'0' * 12}"] = oldest.digest
    assert finds(bench, PREVIOUS).digest == current
    assert finds(bench, oldest.digest) == oldest


def test_a_name_that_means_none_is_refused(bench: Bench, two: tuple[str, str]) -> None:
    for wanted in ("sha256:" + "0" * 64, "", "00000000", "current", "20000101-000000000000"):
        with pytest.raises(UsageError) as caught:
            finds(bench, wanted)
        code = "rollback-not-found" if wanted.startswith("sha256:") else "catalog-not-unique"
        assert caught.value.code == code


def test_one_is_named_by_tag_or_digest(bench: Bench, two: tuple[str, str]) -> None:
    one = finds(bench, PREVIOUS)
    hexes = one.digest.removeprefix("sha256:")
    for wanted in (
        one.digest,
        hexes,
        hexes[:9],
        f"sha256:{hexes[:30]}",
        f"{NOW - 3 * HOUR:%Y%m%d}-{hexes[:12]}",
    ):
        assert finds(bench, wanted) == one
    with fails("catalog-digest-mismatch"):
        finds(bench, hexes[:12] + "0" * 8 if hexes[12:20] != "0" * 8 else hexes[:12] + "1" * 8)


def test_a_clock_that_is_behind_signs_nothing(bench: Bench, two: tuple[str, str]) -> None:
    current, earlier = current_at(bench, NOW), finds(bench, PREVIOUS)
    with fails("clock-before-catalog"):
        roll_back(bench.factory, NOW - 2 * HOUR, current, earlier, QUIET)


def test_a_dry_run_shows_what_differs_and_writes_nothing(bench: Bench, two: tuple[str, str]) -> None:
    before = dict(bench.registry.find("catalog").tags)
    acts = len(list(read_audit(bench.folder / "store")))
    host = ("--registry", bench.registry.host)
    said = bench.call("site", "publish", *host, "--rollback", "--dry-run")
    assert (two[0] in said.out, two[1] in said.out) == (True, True)
    assert (bench.registry.find("catalog").tags, len(list(read_audit(bench.folder / "store")))) == (
        before,
        acts,
    )
    bench.call("site", "publish", TARGET, *host, "--rollback", code=2)
    bench.call("site", "publish", *host, "--rollback", "0" * 12, code=2)
