"""verdicts, promote, revoke, reconcile, what gc and prune keep: the command line, a registry in this process.

The GPU is made up and so is what the host saw of it; the keys are thrown away with the test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from imagefactory.actions import promote
from imagefactory.actions.verdicts import attach_signed
from imagefactory.errors import UsageError
from imagefactory.model import Outcome
from imagefactory.oci.candidates import VERDICT_TYPE, candidate_tag, pushed_record
from imagefactory.oci.graph import EMPTY, EMPTY_BLOB, WITHDRAWN, StoreRepository, put_artifact
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import ImageReference
from imagefactory.trust.attached import SignedStatement, put_statement, read_subject, read_verdicts
from imagefactory.trust.tags import PromotionRule, TagCandidate, TagDecision, decide_tags
from tests.made.command import json_of
from tests.made.signing import QUIET, Bench
from tests.made.trusted import write_settings


@pytest.mark.parametrize("bench", [True, False], ids=["referrers", "fallback"], indirect=True)
def test_a_verified_candidate_gets_the_tags(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    assert "12.1-cu121 lacks" not in str(bench.promote(code=9))
    assert bench.tags == {}
    bench.verify(first)
    fates = bench.promote()
    assert fates["12.1-cu121-sm80"]["moved"]
    assert fates["12.1-cu121"]["moved"]
    assert bench.tags == {"12.1-cu121": first, "12.1-cu121-sm80": first}
    assert not bench.promote()["12.1-cu121"]["moved"]
    second = bench.push(b"b", 2)
    assert not bench.promote()["12.1-cu121"]["moved"]
    bench.verify(second)
    assert set(bench.promote("--dry-run")) == {"12.1-cu121", "12.1-cu121-sm80"}
    assert bench.tags["12.1-cu121"] == first
    bench.promote()
    assert bench.tags == {"12.1-cu121": second, "12.1-cu121-sm80": second}
    reference = f"{bench.registry.host}/one@{first}"
    assert bench.call("image", "promote", reference, code=9).error_codes == ("tag-missing",)


@pytest.mark.parametrize("bench", [False], ids=["fallback"], indirect=True)
def test_verdicts_are_found_in_a_list_that_calls_them_something_else(bench: Bench) -> None:
    """GHCR's list says application/vnd.oci.empty.v1+json of what cosign attached; a stranger's rows stay."""
    empty = "application/vnd.oci.empty.v1+json"
    first = bench.push(b"a", 1)
    bench.verify(first)
    client, subject = RegistryClient(bench.registry.host), bench.manifest(first)
    tag = subject.replace(":", "-")

    def spoil(*more: dict[str, object]) -> set[str]:
        found = client.manifest("one", tag)
        assert found is not None
        rows = [*json.loads(found[1])["manifests"], *more]
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}
        for row in rows:
            row["artifactType"] = empty
        client.put_manifest("one", canonical_json(index), INDEX_TYPE, tag)
        return {row["digest"] for row in rows}

    cosign = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": format_descriptor(EMPTY_BLOB)}
    client.write("one", EMPTY_BLOB, lambda start: iter([EMPTY[start:]]))
    bundle = canonical_json(
        {**cosign, "artifactType": "application/vnd.dev.sigstore.bundle.v0.3+json", "layers": []}
    )
    strangers = client.put_manifest("one", bundle, MANIFEST_TYPE)
    before = spoil(format_descriptor(strangers))
    assert strangers.digest in before
    bench.promote()
    assert bench.tags == {"12.1-cu121": first, "12.1-cu121-sm80": first}
    host = bench.registry.host
    (image,) = json_of(bench.call("verdict", "list", f"{host}/one@{first}", "--json"), "verdict-list")[
        "images"
    ]
    assert [one["status"] for one in image["verdicts"]] == ["good"]
    bench.call("verdict", "sync", "--registry", host)
    bench.verify(first, "9.0")
    after = spoil()
    assert before < after
    assert len(bench.artifacts(first)) == 2


def test_revoked_and_verified_again(bench: Bench) -> None:
    first, second = bench.push(b"a", 1), bench.push(b"b", 2)
    bench.verify(first)
    old = bench.verify(second, now=datetime.now(UTC) - timedelta(minutes=5))
    bench.promote()
    host = bench.registry.host
    said = bench.call(
        "verdict", "revoke", "one-12.1-cu121", "--registry", host, "--reason", "wrong sums", "--json"
    )
    value = json_of(said, "verdict-revoke")
    assert value["revoked"] == [old]
    assert bench.tags == {"12.1-cu121": first, "12.1-cu121-sm80": first}
    (image,) = json_of(bench.call("verdict", "list", f"{host}/one@{second}", "--json"), "verdict-list")[
        "images"
    ]
    assert [(one["status"], one["reason"]) for one in image["verdicts"]] == [("revoked", "wrong sums")]
    bench.verify(second, now=datetime.now(UTC) + timedelta(seconds=2))
    bench.promote()
    assert bench.tags == {"12.1-cu121": second, "12.1-cu121-sm80": second}


@pytest.mark.parametrize("named", [False, True])
def test_a_verdict_of_a_clock_that_goes_before_is_taken_back_at_once(bench: Bench, named: bool) -> None:
    image, host = bench.push(b"a", 1), bench.registry.host
    ahead = bench.verify(image, now=datetime.now(UTC) + timedelta(minutes=4))
    more = ("--verdict", ahead[7:19]) if named else ()
    bench.promote()
    said = bench.call(
        "verdict", "revoke", "one-12.1-cu121", "--registry", host, "--reason", "wrong sums", "--json", *more
    )
    assert json_of(said, "verdict-revoke")["revoked"] == [ahead]
    (row,) = json_of(bench.call("verdict", "list", f"{host}/one@{image}", "--json"), "verdict-list")["images"]
    assert [one["status"] for one in row["verdicts"]] == ["revoked"]


def test_what_is_no_image_stops_nobody(bench: Bench) -> None:
    """Whoever may push can tag anything as a candidate."""
    first = bench.push(b"a", 1)
    bench.verify(first)
    client, host = RegistryClient(bench.registry.host), bench.registry.host
    there = client.manifest("one", bench.manifest(first))
    assert there
    plain = format_descriptor(there[0])

    def put(*entries: dict[str, Any]) -> dict[str, Any]:
        data = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries})
        digest = client.put_manifest("one", data, INDEX_TYPE).digest
        client.put_manifest("one", data, INDEX_TYPE, f"12.1-cu121-{digest[7:19]}")
        return {"mediaType": INDEX_TYPE, "digest": digest, "size": len(data)}

    odd = [put(put(plain, {**plain, "annotations": {"a": "b"}})), put(put(put(plain)))]
    odd += [
        put({**plain, "annotations": 5}),
        put({**plain, "platform": {"os": "linux", "architecture": "x"}}),
    ]
    said = bench.call("image", "promote", "one-12.1-cu121", "--registry", host)
    assert bench.tags["12.1-cu121"] == first
    for one in odd:
        assert f"{one['digest'][7:19]} in {host}/one is skipped" in said.err
        assert "error: " in bench.call("verdict", "list", f"{host}/one@{one['digest']}", code=8).err


def test_the_last_one_revoked_loses_its_tags(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    bench.verify(first, now=datetime.now(UTC) - timedelta(minutes=5))
    bench.promote()
    host = bench.registry.host
    wrong = ("verdict", "revoke", f"{host}/one@{first}", "--reason", "no", "--capability")
    assert "no valid verdict" in bench.call(*wrong, "9.0", code=9).err
    said = bench.call(*wrong, "8.0")
    assert "removed" in said.out
    assert "no other candidate is verified for 8.0" in said.out
    assert bench.tags == {}
    bench.promote(code=9)


def test_where_no_tag_can_be_removed_it_names_an_image_that_nothing_runs(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    bench.verify(first, now=datetime.now(UTC) - timedelta(minutes=5))
    bench.promote()
    bench.registry.ways = replace(bench.registry.ways, untag=False)
    host = bench.registry.host
    said = bench.call("verdict", "revoke", f"{host}/one@{first}", "--reason", "no", "--json")
    value = json_of(said, "verdict-revoke")
    assert value["revoked"]
    tags = value["promotions"][0]["tags"]
    gone = {one["tag"]: (one["before"], one["after"]) for one in tags}
    assert gone == dict.fromkeys(("12.1-cu121", "12.1-cu121-sm80"), (first, ""))
    assert not any(one.get("fault") for one in tags)
    assert "12.1-cu121 names an empty image" in said.err
    assert {*bench.tags.values()} == {WITHDRAWN.descriptor.digest}
    bench.promote(code=9)  # as if the tags were not there
    bench.call("pull", f"{host}/one:12.1-cu121", code=8)
    second = bench.push(b"b", 2)
    bench.verify(second)
    bench.promote()
    assert bench.tags == {"12.1-cu121": second, "12.1-cu121-sm80": second}


@pytest.mark.parametrize("known", [True, False])
def test_only_a_trusted_key_takes_back(bench: Bench, known: bool) -> None:
    first = bench.push(b"a", 1)
    bench.verify(first, now=datetime.now(UTC) - timedelta(minutes=5))
    bench.promote()
    if known:
        bench.call("key", "retire", "lab", "--until", datetime.now(UTC).strftime("%Y-%m-%d"))
    else:
        (bench.folder / "root" / "imagefactory.toml").write_text("")
    said = bench.call("verdict", "revoke", f"{bench.registry.host}/one@{first}", "--reason", "no", code=9)
    assert said.error_codes == ("signing-key-retired" if known else "signer-not-trusted",)
    assert bench.tags == {"12.1-cu121": first, "12.1-cu121-sm80": first}


def test_verdicts_are_shown_with_who_when_and_on_what(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    bench.verify(first)
    bench.verify(first, "9.0", outcome=Outcome.WRONG_NUMBERS)
    host = bench.registry.host
    said = bench.call("verdict", "list", f"{host}/one@{first}", "--numbers").out
    words = ("VALID", "verified", "wrong-numbers", "A GPU of the tests", "550.54.15", "lab", "local", "n 1.5")
    assert [word for word in words if word not in said] == []
    assert re.search(r"^wrong-numbers +yes +9\.0 ", said, re.MULTILINE)
    said = bench.call("verdict", "list", "one-12.1-cu121", "--registry", host).out
    assert candidate_tag(bench.factory.targets[0], first) in said
    bench.call("verdict", "list", f"{host}/one@{first}", "--capability", "8.0")
    for capability in ("9.0", "8.6"):
        bench.call("verdict", "list", f"{host}/one@{first}", "--capability", capability, code=9)


def test_without_a_trusted_key_nothing_counts(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    bench.verify(first)
    (bench.folder / "root" / "imagefactory.toml").write_text("")
    bench.promote(code=9)
    assert bench.tags == {}
    said = bench.call("verdict", "list", f"{bench.registry.host}/one@{first}").out
    assert "wrong-key" in said
    assert "verified" in said


def test_what_is_no_verdict_is_shown_as_malformed(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    from imagefactory.oci.graph import make_artifact
    from imagefactory.trust.attached import SignedStatement

    client = RegistryClient(bench.registry.host)
    there = client.manifest("one", bench.manifest(first))
    assert there is not None
    for artifact in (
        make_artifact(VERDICT_TYPE, there[0], {}),
        SignedStatement(kind=VERDICT_TYPE, subject=there[0], envelope=b"PASSED").artifact,
    ):
        for blob, data in artifact.blobs:
            client.write("one", blob, lambda offset, data=data: iter((data[offset:],)))  # type: ignore[misc]
        client.put_manifest("one", artifact.manifest.data, MANIFEST_TYPE)
    said = bench.call("verdict", "list", f"{bench.registry.host}/one@{first}", "--json")
    (image,) = json_of(said, "verdict-list")["images"]
    assert [one["status"] for one in image["verdicts"]] == ["malformed", "malformed"]
    bench.promote(code=9)


def test_gc_keeps_what_is_verified_and_nothing_else(bench: Bench) -> None:
    layout = Layout(bench.folder / "store")
    first = bench.push(b"a", 1)
    bench.verify(first)
    second = bench.push(b"b", 2)
    third = bench.push(b"c", 3)
    assert all(layout.manifest(one) for one in (first, second, third))
    bench.call("image", "prune")
    assert layout.manifest(first)
    assert layout.manifest(third)
    assert layout.manifest(second) is None
    layout.load("one", layout.manifest(first)[0])  # type: ignore[index]  # every blob of it
    bench.call("image", "promote", "one-12.1-cu121")
    assert layout.tags()["one:12.1-cu121-sm80"].digest == first
    assert layout.tags()["one:12.1-cu121"].digest == third  # a build sets it, not promotion
    layout.untag("one:12.1-cu121-sm80")
    (bench.folder / "root" / "imagefactory.toml").write_text("[[trust]]\n")
    assert "nothing" not in bench.call("image", "prune", code=2).out
    assert layout.manifest(first)
    (bench.folder / "root" / "imagefactory.toml").write_text("")
    bench.call("image", "prune")
    assert layout.manifest(first) is None


@pytest.mark.parametrize("bench", [True, False], ids=["referrers", "fallback"], indirect=True)
def test_prune_keeps_what_is_verified(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    second = bench.push(b"b", 2)
    bench.verify(first)
    said = bench.call("image", "prune", "--older-than", "0h", "--registry", bench.registry.host)
    assert f"kept one:{candidate_tag(bench.factory.targets[0], first)} (it has a verdict)" in said.out
    assert f"removed one:{candidate_tag(bench.factory.targets[0], second)}" in said.out
    (bench.folder / "root" / "imagefactory.toml").write_text("")
    bench.call("image", "prune", "--older-than", "0h", "--registry", bench.registry.host)
    there = bench.registry.find("one")
    assert there.tags == {}
    assert {kind for kind, _ in there.manifests.values()} <= {INDEX_TYPE}  # what lists were before


@pytest.mark.parametrize("bench", [True, False], ids=["referrers", "fallback"], indirect=True)
def test_what_was_revoked_stays_so_when_its_candidate_was_pruned_and_pushed_again(bench: Bench) -> None:
    """The same lock gives the same digest, and the machine that verified it still has the verdict."""
    first, host = bench.push(b"a", 1), bench.registry.host
    bench.verify(first, now=datetime.now(UTC) - timedelta(minutes=5))
    elsewhere = {"store": "another-store"}
    bench.call("verdict", "revoke", f"{host}/one@{first}", "--reason", "wrong sums", **elsewhere)
    assert (
        "removed" in bench.call("image", "prune", "--older-than", "0h", "--registry", host, **elsewhere).out
    )
    assert first not in bench.registry.find("one").manifests
    bench.call("verdict", "sync", "--registry", host, **elsewhere)
    assert bench.push(b"a", 2) == first
    bench.call("verdict", "sync", "--registry", host)
    said = bench.call("verdict", "list", f"{host}/one@{first}", "--json")
    ((row,),) = (image["verdicts"] for image in json_of(said, "verdict-list")["images"])
    assert row["status"] == "revoked"
    bench.promote(code=9)


@pytest.mark.parametrize("bench", [True, False], ids=["referrers", "fallback"], indirect=True)
def test_reconcile_mends_a_list_that_lost_rows(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    bench.verify(first)
    bench.verify(first, "9.0")
    made = bench.artifacts(first)
    host, there = bench.registry.host, bench.registry.find("one")
    manifest = bench.manifest(first)
    if not bench.registry.ways.referrers:
        tag = manifest.replace(":", "-")
        kind, data = there.manifests[there.tags[tag]]
        assert kind == INDEX_TYPE
        value = json.loads(data)
        value["manifests"] = [row for row in value["manifests"] if row["digest"] != made[0]]
        lost = json.dumps(value).encode()
        RegistryClient(host).put_manifest("one", lost, INDEX_TYPE, tag)
    else:
        del there.manifests[made[0]]
    client = RegistryClient(host)
    assert made[0] not in {one.digest for one in client.referrers("one", manifest)}
    said = json_of(bench.call("verdict", "sync", "--registry", host, "--json"), "verdict-sync")
    (row,) = [row for row in said["repositories"] if row["place"].endswith("/one")]
    assert row["repaired"] == [made[0]]
    assert row["listed"] == 3  # the other verdict, and a test-result statement of each
    assert {*made} <= {one.digest for one in client.referrers("one", manifest)}
    shutil.rmtree(bench.folder / "store" / "journal")  # the store itself knows them too
    assert "4 listed" in bench.call("verdict", "sync", "--registry", host).out


def test_one_verdict_of_several_is_taken_back_by_its_first_digits(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    past = datetime.now(UTC) - timedelta(minutes=5)
    one, other = bench.verify(first, now=past), bench.verify(first, "9.0", now=past)
    name = f"{bench.registry.host}/one@{first}"
    assert (
        "0 verdicts"
        in bench.call("verdict", "revoke", name, "--reason", "no", "--verdict", "xyz", code=2).err
    )
    assert (
        "0 verdicts"
        in bench.call("verdict", "revoke", name, "--reason", "no", "--verdict", "sha256:", code=2).err
    )
    said = bench.call("verdict", "revoke", name, "--reason", "no", "--verdict", other[7:19], "--json")
    assert json_of(said, "verdict-revoke")["revoked"] == [other]
    (image,) = json_of(bench.call("verdict", "list", name, "--json"), "verdict-list")["images"]
    assert {row["digest"]: row["status"] for row in image["verdicts"]} == {one: "good", other: "revoked"}


def test_the_store_and_the_registry_are_told_apart(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said = bench.call("verdict", "list", "one-12.1-cu121", code=3)
    assert said.error_codes == ("image-not-found",)
    assert "one-12.1-cu121" in said.err
    first = bench.push(b"a", 1)
    assert "not-tested" in bench.call("verdict", "list", "one-12.1-cu121").out
    bench.verify(first)
    monkeypatch.setenv("IMAGEFACTORY_REGISTRY", bench.registry.host)
    found = json_of(bench.call("verdict", "list", "one-12.1-cu121", "--json"), "verdict-list")["images"]
    assert [one["place"] for one in found] == [
        f"{bench.folder / 'store'}/one",
        f"{bench.registry.host}/one",
    ]
    assert [[row["verifies"] for row in one["verdicts"]] for one in found] == [[True], [True]]
    named = bench.call("verdict", "list", f"one-12.1-cu121@{first}", "--json")
    assert len(json_of(named, "verdict-list")["images"]) == 1
    wrong = ("verdict", "list", f"{bench.registry.host}/one@{first}", "--registry", bench.registry.host)
    assert bench.call(*wrong, code=2).error_codes == ("option-conflict",)


def test_what_is_asked_of_no_registry_is_said(bench: Bench) -> None:
    assert "registry = " in bench.call("verdict", "sync", code=2).err
    bench.build(b"a")
    wrong = bench.call("verdict", "list", "one-12.1-cu121", "--capability", "x", code=2)
    assert (wrong.error_codes, "--capability" in wrong.err) == (("option-invalid",), True)


def test_a_light_install_reads_the_verdicts_of_the_store(bench: Bench) -> None:
    """With click, yaml, packaging and securesystemslib alone, in a process of its own."""
    bench.verify(bench.push(b"a", 1))
    block = """
import sys
LACKING = "requests tenacity urllib3 cryptography nacl tomlkit zstandard rich jinja2 isal uv".split()
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LACKING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
from imagefactory.cli import main
main(sys.argv[1:])
"""
    command = [
        sys.executable,
        "-c",
        block,
        "-C",
        str(bench.folder / "root"),
        "verdict",
        "list",
        "one-12.1-cu121",
    ]
    environ = {**os.environ, "IMAGEFACTORY_STORE": str(bench.folder / "store")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^verified +yes +8\.0 ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("ends", [True, False])
def test_another_promoter_at_the_same_tags(bench: Bench, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """It moves a tag after this one has read: then all is read and decided anew, and that has an end."""
    first, second = bench.push(b"a", 1), bench.push(b"b", 2)
    bench.verify(first)
    decided: list[dict[str, str]] = []

    def decide(
        rule: PromotionRule, candidates: Sequence[TagCandidate], tags: Mapping[str, str]
    ) -> tuple[TagDecision, ...]:
        fates = decide_tags(rule, candidates, tags)
        decided.append(dict(tags))
        there = bench.registry.find("one").tags
        if ends and len(decided) == 1:
            there["12.1-cu121"] = second
        elif not ends and there.pop("12.1-cu121", None) is None:
            there["12.1-cu121"] = bench.manifest(second)
        return fates

    monkeypatch.setattr(promote, "decide_tags", decide)
    if ends:
        assert not bench.promote()["12.1-cu121"]["moved"]  # the other's is newer, and not taken back
        assert [one.get("12.1-cu121") for one in decided] == [None, second]
        assert bench.tags == {"12.1-cu121": second, "12.1-cu121-sm80": first}
    else:
        said = bench.call("image", "promote", "one-12.1-cu121", "--registry", bench.registry.host, code=8)
        assert said.error_codes == ("tags-contended",)


def test_the_config_of_a_verified_image_with_other_layers_is_another_image(bench: Bench) -> None:
    """Anyone who may push can make it a candidate, say when it was pushed, and copy the verdict to it."""
    first, host = bench.push(b"a", 1), bench.registry.host
    bench.verify(first)
    client = RegistryClient(host)
    place = StoreRepository(store=client, repository="one")
    there = client.manifest("one", bench.manifest(first))
    assert there is not None
    value = json.loads(there[1])
    layer = b"other content"
    client.write(
        "one",
        Descriptor(media_type="", digest=digest_of(layer), size=len(layer)),
        lambda at: iter([layer[at:]]),
    )
    value["layers"] = [
        {"mediaType": value["layers"][0]["mediaType"], "digest": digest_of(layer), "size": len(layer)}
    ]
    data = canonical_json(value)
    forged = client.put_manifest("one", data, MANIFEST_TYPE, f"12.1-cu121-{digest_of(data)[7:19]}")
    assert read_subject(place, forged.digest).config == read_subject(place, first).config
    put_artifact(place, pushed_record(forged, datetime(2026, 11, 9, tzinfo=UTC)))
    (copied,) = read_verdicts(place, bench.manifest(first))
    put_statement(place, SignedStatement(kind=VERDICT_TYPE, subject=forged, envelope=copied.envelope))

    (image,) = json_of(
        bench.call("verdict", "list", f"{host}/one@{forged.digest}", "--json"), "verdict-list"
    )["images"]
    assert [(one["status"], one["verifies"]) for one in image["verdicts"]] == [("other-subject", False)]
    bench.promote()
    assert bench.tags == {"12.1-cu121": first, "12.1-cu121-sm80": first}


def test_a_revoked_verdict_stays_so_in_another_artifact(bench: Bench) -> None:
    """One more annotation makes another artifact of the same envelope."""
    first, host = bench.push(b"a", 1), bench.registry.host
    verdict = bench.verify(first, now=datetime.now(UTC) - timedelta(minutes=5))
    name, client = f"{host}/one@{first}", RegistryClient(host)
    bench.call("verdict", "revoke", name, "--reason", "no", "--verdict", verdict[7:19])
    (artifact,) = bench.artifacts(first)
    there = client.manifest("one", artifact)
    assert there is not None
    data = canonical_json({**json.loads(there[1]), "annotations": {"again": "1"}})
    client.put_manifest("one", data, MANIFEST_TYPE)
    assert len(bench.artifacts(first)) == 2
    (image,) = json_of(bench.call("verdict", "list", name, "--json"), "verdict-list")["images"]
    assert [(one["digest"], one["status"]) for one in image["verdicts"]] == [(verdict, "revoked")]
    bench.promote(code=9)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"platform": {"os": "linux", "architecture": "amd64", "variant": "v3"}},
        {"platform": {"os": "Linux", "architecture": "x86_64"}},
        {
            "platform": {"os": "linux", "architecture": "amd64"},
            "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
        },
        {
            "platform": {"os": "linux", "architecture": "amd64"},
            "annotations": {"io.github.containers.compression.zstd": "true"},
        },
        {"platform": {"os": "linux", "architecture": "s390x"}},
    ],
    ids=str,
)
def test_an_index_with_a_verified_image_and_another_gets_no_tag(bench: Bench, more: dict[str, Any]) -> None:
    """Which of the two a tool takes is its own business: containerd, podman and apptainer differ."""
    first, host, client = bench.push(b"a", 1), bench.registry.host, RegistryClient(bench.registry.host)
    other = bench.push(b"b", 2)
    bench.verify(first)
    entries = []
    for digest, fields in ((other, more), (first, {"platform": {"os": "linux", "architecture": "amd64"}})):
        there = client.manifest("one", bench.manifest(digest))
        assert there is not None
        entries.append({**format_descriptor(there[0]), **fields})
    data = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries})
    forged = client.put_manifest("one", data, INDEX_TYPE, f"12.1-cu121-{digest_of(data)[7:19]}")
    put_artifact(
        StoreRepository(store=client, repository="one"),
        pushed_record(forged, datetime(2026, 11, 9, tzinfo=UTC)),
    )
    assert forged.digest[7:19] in bench.call("image", "promote", "one-12.1-cu121", "--registry", host).err
    assert bench.tags == {"12.1-cu121": first, "12.1-cu121-sm80": first}


def test_what_was_verified_as_another_target_moves_no_tag(bench: Bench) -> None:
    first = bench.push(b"a", 1)
    place = StoreRepository(store=RegistryClient(bench.registry.host), repository="one")
    where = ImageReference(registry=bench.registry.host, repository="one", digest=first)
    subject = replace(read_subject(place, first), target="one-12.4-cu124")
    attach_signed(bench.factory, bench.sign(place, first, subject=subject), where, QUIET)
    assert "not-tested" in str(bench.promote(code=9))
    assert bench.tags == {}


def test_a_foreign_registry_takes_nothing_for_another_image(bench: Bench) -> None:
    first, second = bench.push(b"a", 1), bench.push(b"b", 2)
    place = StoreRepository(store=RegistryClient(bench.registry.host), repository="one")
    signed = bench.sign(place, first)
    where = ImageReference(registry=bench.registry.host, repository="one", digest=second)
    with pytest.raises(UsageError) as caught:
        attach_signed(bench.factory, signed, where, QUIET)
    assert caught.value.code == "verdict-other-image"


def test_list_tells_what_is_built_pushed_and_verified(bench: Bench) -> None:
    def listed() -> tuple[bool, bool, list[str]]:
        said = bench.call("list", "one-12.1-cu121", "--json")
        (row,) = json_of(said, "list")["targets"]
        return row["built"], row["pushed"], row["verified"]

    assert listed() == (False, False, [])
    bench.build(b"a")
    assert listed() == (True, False, [])
    settings = bench.folder / "root" / "imagefactory.toml"
    write_settings(settings.parent, f'registry = "{bench.registry.host}"\n{settings.read_text()}')
    image = bench.push(b"a", 1)
    assert listed() == (True, True, [])
    for capability in ("8.0", "10.0"):
        bench.verify(image, capability)
    assert listed() == (True, True, ["8.0", "10.0"])
    assert "yes    yes     verified 8.0 10.0" in bench.call("list", "one-12.1-cu121").out
    bench.build(b"b")
    assert listed() == (True, False, [])
