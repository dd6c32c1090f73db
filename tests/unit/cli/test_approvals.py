"""Two facilitators, two keys, one registry: promotion by approvals. Their GPU is made up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from imagefactory.actions.promote import PromotionRequest, promote
from imagefactory.errors import EXIT_CHECK, EXIT_NOTHING_SELECTED
from imagefactory.extras.nightly.night import waiting_tags
from imagefactory.oci.candidates import APPROVAL_TYPE
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.trust.approval import ApprovalSubject, parse_approval, sign_approval
from imagefactory.trust.attached import SignedStatement, put_statement, read_statements, read_subject
from imagefactory.trust.envelope import parse_envelope
from imagefactory.trust.keys import keys_directory, read_signing_key
from tests.made.command import Said, json_of
from tests.made.signing import QUIET, Bench
from tests.made.trusted import write_settings

TARGET, PLAIN, POINTER = "one-12.1-cu121", "12.1-cu121", "12.1-cu121-sm80"
EARLIER = timedelta(minutes=5)


@dataclass(frozen=True)
class Team:
    """`lab` and `mia`, each with a key, a store and settings of their own; two signatures promote."""

    bench: Bench
    patch: pytest.MonkeyPatch

    def call(self, who: str, *words: str, code: int = 0) -> Said:
        self.patch.setenv("XDG_CONFIG_HOME", str(self.bench.folder / ("config" if who == "lab" else who)))
        return self.bench.call(*words, store="store" if who == "lab" else f"store-{who}", code=code)

    def promote(self, who: str, *words: str, code: int = 0) -> dict[str, Any]:
        said = json_of(
            self.call(who, "image", "promote", TARGET, "--json", *words, code=code), "image-promote"
        )
        (result,) = said["results"]
        return {row["tag"]: row for row in result["tags"]}

    @property
    def place(self) -> StoreRepository:
        return StoreRepository(store=RegistryClient(self.bench.registry.host), repository="one")

    def approvals(self, image: str) -> list[tuple[str, str]]:
        """The tags and digests of all approvals that are attached to an image, as they say."""
        found = read_statements(self.place, self.bench.manifest(image), APPROVAL_TYPE)
        read = [parse_approval(parse_envelope(one.envelope, "x").payload, "x")[0] for one in found]
        return sorted((one.tag, one.subject.index) for one in read)

    def acts(self, who: str) -> list[str]:
        return [
            row["action"] for row in json_of(self.call(who, "key", "log", "--json"), "key-log")["entries"]
        ]

    def write(self, policy: str) -> None:
        """The policy, which both trust."""
        path = self.bench.folder / "root" / "imagefactory.toml"
        text = path.read_text().partition("[policy]")[0]
        for config in ("config", "mia"):
            environ = {"XDG_CONFIG_HOME": str(self.bench.folder / config)}
            write_settings(path.parent, f"{text}[policy]\n{policy}\n", environ)


@pytest.fixture
def team(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Team:
    team, root = Team(bench, monkeypatch), bench.folder / "root"
    text = (root / "imagefactory.toml").read_text()
    write_settings(root, f'registry = "{bench.registry.host}"\n{text}')
    team.call("mia", "key", "create", "mia")
    yesterday = f"{datetime.now(UTC) - timedelta(days=1):%Y-%m-%d}"
    public = keys_directory({"XDG_CONFIG_HOME": str(bench.folder / "mia")}) / "mia.pub"
    team.call("lab", "key", "trust", str(public), "--since", yesterday)
    team.write("promotion-signatures = 2")
    return team


def verified(team: Team, content: bytes = b"a", day: int = 1) -> str:
    image = team.bench.push(content, day)
    team.bench.verify(image, now=datetime.now(UTC) - EARLIER)
    return image


def test_the_second_key_moves_the_tags(team: Team) -> None:
    image = verified(team)
    rows = team.promote("lab", code=EXIT_CHECK)
    for tag in (PLAIN, POINTER):
        assert (rows[tag]["moved"], rows[tag]["approved"], rows[tag]["missing"]) == (False, ["lab"], 1)
        assert (rows[tag]["after"], rows[tag]["requested"]) == ("", image)
    assert team.bench.tags == {}
    assert team.promote("lab", code=EXIT_CHECK)[PLAIN]["approved"] == ["lab"]  # again changes nothing
    assert team.approvals(image) == [(PLAIN, image), (POINTER, image)]
    rows = team.promote("mia")
    assert {(row["moved"], row["missing"]) for row in rows.values()} == {(True, 0)}
    assert rows[PLAIN]["approved"] == ["lab", "mia"]
    assert team.bench.tags == {PLAIN: image, POINTER: image}
    assert not team.promote("lab")[PLAIN]["moved"]
    assert len(team.approvals(image)) == 4
    assert team.acts("lab").count("approve") == 2
    assert {"approve", "promote"} <= set(team.acts("mia"))
    assert "promote" not in team.acts("lab")


def test_a_dry_run_approves_nothing(team: Team) -> None:
    image = verified(team)
    assert team.promote("lab", "--dry-run", code=EXIT_CHECK)[PLAIN]["missing"] == 2
    assert team.approvals(image) == []


def test_who_has_no_key_approves_nothing_and_completes_what_others_approved(team: Team) -> None:
    image = verified(team)
    for path in keys_directory({"XDG_CONFIG_HOME": str(team.bench.folder / "mia")}).iterdir():
        path.rename(team.bench.folder / path.name)
    assert team.promote("mia", code=EXIT_CHECK)[PLAIN]["missing"] == 2
    assert team.approvals(image) == []
    team.promote("lab", code=EXIT_CHECK)
    attach(team, image, who="mia", tag=PLAIN, folder="")
    assert team.promote("mia", code=EXIT_CHECK)[PLAIN]["moved"]  # the other tag still waits
    assert team.bench.tags == {PLAIN: image}


def attach(
    team: Team, image: str, *, who: str, tag: str, folder: str | None = None, to: str = "", **changes: Any
) -> None:
    """As who may push, and has a key, does: attach an approval without a look at anything."""
    environ = {"XDG_CONFIG_HOME": str(team.bench.folder / ("config" if who == "lab" else who))}
    key = read_signing_key((keys_directory(environ) if folder is None else team.bench.folder) / f"{who}.pem")
    subject = read_subject(team.place, image)
    wanted = ApprovalSubject(subject=subject, place=changes.get("place", str(team.place)), tag=tag)
    envelope = sign_approval(wanted, key, changes.get("now", datetime.now(UTC)))
    there = team.place.store.manifest("one", team.bench.manifest(to or image))
    assert there
    put_statement(team.place, SignedStatement(kind=APPROVAL_TYPE, subject=there[0], envelope=envelope))


def test_no_approval_serves_again(team: Team) -> None:
    """For another image, another tag, another repository, a second time, or after its end."""
    old, image = verified(team), verified(team, b"b", 2)
    long_ago = datetime.now(UTC) - timedelta(hours=3)
    attach(team, old, who="mia", tag=PLAIN)
    attach(team, old, who="mia", tag=PLAIN, to=image)
    attach(team, image, who="mia", tag="12.1-cu121-sm90")
    attach(team, image, who="mia", tag=PLAIN, place="staging.example.org/one")
    attach(team, image, who="lab", tag=PLAIN, now=long_ago)
    attach(team, image, who="mia", tag=PLAIN, now=long_ago - timedelta(days=14))  # before it was trusted, too
    row = team.promote("lab", code=EXIT_CHECK)[PLAIN]
    assert (row["requested"], row["approved"], row["missing"]) == (image, ["lab"], 1)
    assert team.bench.tags == {}


def test_a_newer_image_needs_approvals_of_its_own(team: Team) -> None:
    old = verified(team)
    team.promote("lab", code=EXIT_CHECK)
    team.promote("mia")
    image = verified(team, b"b", 2)
    assert team.promote("mia", code=EXIT_CHECK)[PLAIN]["after"] == old
    assert team.bench.tags == {PLAIN: old, POINTER: old}
    team.promote("lab")
    assert team.bench.tags == {PLAIN: image, POINTER: image}


def test_a_revoked_image_keeps_no_tag_while_approvals_are_awaited(team: Team) -> None:
    old, image = verified(team), verified(team, b"b", 2)
    team.promote("lab", code=EXIT_CHECK)
    team.promote("mia")
    assert team.bench.tags[PLAIN] == image
    team.call("lab", "verdict", "revoke", TARGET, "--reason", "wrong sums")
    assert team.bench.tags == {}  # nobody approved the older one
    assert team.approvals(old) == []
    team.promote("lab", code=EXIT_CHECK)
    team.promote("mia")
    assert team.bench.tags[PLAIN] == old


def test_a_tag_goes_back_to_what_was_approved_long_ago(team: Team) -> None:
    """From a revoked image, and from where somebody without approvals put it; else fresh ones are needed."""
    other, old, image = team.bench.push(b"c", 1), verified(team, b"a", 2), verified(team, b"b", 3)
    later = datetime.now(UTC) + timedelta(days=30)

    def promoted() -> str:
        wanted = PromotionRequest(
            target=team.bench.factory.targets[0], place=team.place, now=later, approve=False
        )
        promote(team.bench.factory, wanted, QUIET)
        return team.bench.tags.get(PLAIN, "")

    def put(digest: str) -> None:
        there = team.place.store.manifest("one", digest)
        assert there
        team.place.store.put_manifest("one", there[1], there[0].media_type, PLAIN)

    for one in (old, image):
        for who in ("lab", "mia"):
            attach(team, one, who=who, tag=PLAIN)
    assert promoted() == ""
    put(old)
    assert promoted() == old  # it was approved, so what is newer needs approvals that count now
    put(other)
    assert promoted() == image
    team.call("lab", "verdict", "revoke", TARGET, "--reason", "wrong sums")
    put(image)
    assert promoted() == old


def test_a_revocation_ends_approvals(team: Team) -> None:
    image = verified(team)
    team.promote("lab", code=EXIT_CHECK)
    team.promote("mia")
    team.call("lab", "verdict", "revoke", TARGET, "--reason", "wrong sums")
    assert team.bench.tags == {}
    after = datetime.now(UTC) + timedelta(seconds=2)
    team.bench.verify(image, now=after)
    wanted = PromotionRequest(
        target=team.bench.factory.targets[0], place=team.place, now=after, approve=False
    )
    fates = {fate.tag: fate for fate in promote(team.bench.factory, wanted, QUIET).fates}
    assert (fates[PLAIN].approved, fates[PLAIN].missing, fates[PLAIN].wanted) == ((), 2, image)
    for who in ("lab", "mia"):
        attach(team, image, who=who, tag=PLAIN, now=after)
    promote(team.bench.factory, wanted, QUIET)
    assert team.bench.tags == {PLAIN: image}


def test_a_tag_that_nobody_approved_is_told(team: Team) -> None:
    """Moved before there was a policy, or by who may push; who promotes approves it."""
    image = verified(team)
    team.write("promotion-signatures = 0")
    team.promote("lab")
    assert team.approvals(image) == []
    team.write("promotion-signatures = 2")
    row = team.promote("lab", "--dry-run", code=EXIT_CHECK)[PLAIN]
    assert (row["after"], row["missing"], row["moved"]) == (image, 2, False)
    assert team.promote("lab", code=EXIT_CHECK)[PLAIN]["missing"] == 1
    assert team.promote("mia")[PLAIN]["missing"] == 0
    later = PromotionRequest(
        target=team.bench.factory.targets[0], place=team.place, now=datetime.now(UTC) + timedelta(days=30)
    )
    fates = {fate.tag: fate for fate in promote(team.bench.factory, later, QUIET).fates}
    assert fates[PLAIN].missing == 0  # its approvals ended after it had moved


def test_the_catalog_waits_too(team: Team) -> None:
    image = verified(team)
    words = ("site", "publish", "--dry-run", "--json")

    def images() -> list[str]:
        said = json_of(team.call("lab", *words), "site-publish")
        return [one["digest"] for one in said["images"]]

    team.write("promotion-signatures = 0")
    team.promote("lab")
    assert images() == [image]
    team.write("promotion-signatures = 2")
    said = team.call("lab", *words, code=EXIT_NOTHING_SELECTED)
    assert (said.error_codes, image in said.err) == (("catalog-not-approved",), True)
    team.promote("lab", code=EXIT_CHECK)
    team.call("lab", *words, code=EXIT_NOTHING_SELECTED)
    team.promote("mia")
    assert images() == [image]
    newer = verified(team, b"b", 2)
    team.promote("mia", code=EXIT_CHECK)
    assert images() == [image]
    team.promote("lab")
    assert images() == [newer]


def test_a_retired_key_approves_by_its_record_alone(team: Team) -> None:
    image = verified(team)
    team.promote("mia", code=EXIT_CHECK)
    attach(team, image, who="mia", tag=PLAIN, now=datetime.now(UTC) - timedelta(hours=1))
    team.call("lab", "key", "retire", "mia")
    attach(team, image, who="mia", tag=PLAIN, now=datetime.now(UTC) - timedelta(hours=2))  # backdated
    rows = team.promote("lab")
    assert rows[PLAIN]["approved"] == ["lab", "mia"]
    other = verified(team, b"b", 2)
    attach(team, other, who="mia", tag=PLAIN, now=datetime.now(UTC) - timedelta(hours=2))
    assert team.promote("lab", code=EXIT_CHECK)[PLAIN]["approved"] == ["lab"]


def test_a_night_says_what_waits(team: Team) -> None:
    verified(team)
    said = team.call("lab", "image", "promote", TARGET, "--json", code=EXIT_CHECK).json()
    assert len(waiting_tags(said)) == 2
    team.promote("mia")
    assert waiting_tags(team.call("lab", "image", "promote", TARGET, "--json").json()) == []
    for broken in ({}, {"results": 3}, {"results": [3, {"tags": [4]}]}):
        assert waiting_tags(broken) == []
