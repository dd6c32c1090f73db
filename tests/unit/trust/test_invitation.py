"""Invitations: one small file, read strictly, and what it changes in a person's settings and what not."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import UsageError
from imagefactory.trust.invitation import (
    Invitation,
    create_invitation,
    fingerprint,
    format_invitation,
    invitation_place,
    join_center,
    parse_invitation,
)
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import TrustGrant, format_row, parse_trust
from tests.made.errors import fails
from tests.made.verdicts import LAB, NOW, STRANGER, TRUST

LAB_KEY = TrustGrant(
    key=PublicKey(name="lab", raw=LAB.public), since=date(2026, 1, 1), until=date(2027, 1, 1)
)
OTHER_KEY = TrustGrant(
    key=PublicKey(name="lab", raw=STRANGER.public), since=date(2026, 1, 1), until=date(2027, 1, 1)
)
INVITATION = Invitation(
    catalog="registry.example.org/gpu", site="chtc", sif_folder="/shared/gpu", keys=(LAB_KEY,)
)
TEXT = format_invitation(INVITATION)


def joined(text: str, invitation: Invitation = INVITATION, *others: dict[str, Any]) -> Any:
    return join_center(text, invitation, others, "settings.toml", NOW)


def test_what_is_written_is_read() -> None:
    assert parse_invitation(TEXT.encode(), "x") == INVITATION
    late = replace(LAB_KEY, until=datetime(2026, 12, 1, 12, tzinfo=UTC), evidence=("local", "kit"))
    bare = Invitation(catalog="/shared/catalog.json", site="generic", sif_folder="", keys=(late,))
    assert parse_invitation(format_invitation(bare).encode(), "x") == bare
    assert not {"sif-folder", "container"} & {*tomllib.loads(format_invitation(bare))}
    by_pyxis = replace(bare, site="slurm", container="pyxis")
    assert parse_invitation(format_invitation(by_pyxis).encode(), "x") == by_pyxis
    assert tomllib.loads(joined("", by_pyxis).text)["container"] == "pyxis"
    with fails("setting-invalid"):
        format_invitation(replace(bare, container="charliecloud"))


def test_the_keys_are_those_that_are_believed_there() -> None:
    (key,) = TRUST.keys
    retired = replace(key, name="old", keyid=STRANGER.keyid, public=STRANGER.public, until=NOW)
    first, second = create_invitation(replace(TRUST, keys=(retired, key)), NOW)
    assert (first.key.keyid, first.until) == (STRANGER.keyid, NOW)
    assert (second.key.name, second.key.keyid) == (key.name, key.keyid)
    assert create_invitation(replace(TRUST, keys=(retired,)), NOW) == ()


def test_a_rotation_is_told_loudly_and_retires_the_old_key() -> None:
    before = joined("").text
    retired = replace(LAB_KEY, until=NOW)
    new = TrustGrant(key=PublicKey(name="lab-2", raw=STRANGER.public), since=NOW, until=date(2027, 11, 1))
    made = joined(before, replace(INVITATION, keys=(retired, new)))
    assert (made.changed, made.fresh, made.before) == (True, (new,), (("lab", LAB.keyid),))
    trust = parse_trust(made.text, "x")
    assert (trust.keys[0].name, trust.keys[0].until) == ("lab", NOW)
    assert trust.key(STRANGER.keyid)
    only = joined(before, replace(INVITATION, keys=(retired,)))
    assert (only.changed, only.fresh) == (False, ())
    first = joined("", replace(INVITATION, keys=(retired, new)))
    assert first.fresh == (retired, new)  # whose fingerprints are shown


@pytest.mark.parametrize("until", [NOW, NOW - timedelta(days=20), date(2026, 1, 1)])
def test_no_invitation_brings_a_retired_key_back(until: date) -> None:
    """Nobody signs an invitation: an older one that is put there again must not undo a rotation."""
    text = joined("", replace(INVITATION, keys=(replace(LAB_KEY, until=until),))).text
    with pytest.raises(UsageError) as caught:
        joined(text, INVITATION)
    assert "lab" in caught.value.message
    earlier = replace(INVITATION, keys=(replace(LAB_KEY, until=date(2026, 1, 1)),))
    assert parse_trust(joined(text, earlier).text, "x").keys[0].until <= NOW


@pytest.mark.parametrize(
    ("old", "new", "code", "value"),
    [
        (TEXT, "", "invitation-invalid", "format"),
        (TEXT, "\x00", "invitation-invalid", "TOML"),
        ("invitation/1", "invitation/2", "invitation-invalid", "format"),
        ("site =", "sight =", "invitation-too-new", "'sight'"),
        ('"chtc"', '"mars"', "site-unknown", ""),
        ('"chtc"', "7", "invitation-invalid", "site is"),
        ('"registry.example.org/gpu"', '""', "no-catalog-set", ""),
        ('"/shared/gpu"', '"/shared/../gpu"', "invitation-invalid", "sif-folder"),
        (format_row(LAB_KEY), "", "invitation-without-keys", ""),
        (LAB.keyid, STRANGER.keyid, "keyid-mismatch", "keyid"),
        ('"lab"', '"\\u001b[2J"', "trust-invalid", "name"),
    ],
)
def test_anything_else_is_refused(old: str, new: str, code: str, value: str) -> None:
    assert old in TEXT
    with pytest.raises(UsageError) as caught:
        parse_invitation(TEXT.replace(old, new).encode(), "invitation.toml")
    assert (caught.value.code, bool(caught.value.hint)) == (code, True)
    assert value in caught.value.message


@pytest.mark.parametrize("place", ["https://registry.example.org", "/shared/a b"])
def test_a_catalog_is_a_path_or_in_a_registry(place: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_invitation(TEXT.replace("registry.example.org/gpu", place).encode(), "invitation.toml")
    assert place in caught.value.message
    assert caught.value.hint


@given(st.binary(max_size=300))
def test_noise_is_refused_by_that_word(data: bytes) -> None:
    with pytest.raises(UsageError):
        parse_invitation(data, "x")


def test_a_new_file_is_what_a_person_would_write() -> None:
    made = joined("")
    settings = 'catalog = "registry.example.org/gpu"\nsite = "chtc"\nsif-folder = "/shared/gpu"\n'
    assert made.text == f"{settings}\n{format_row(LAB_KEY)}"
    assert (made.fresh, made.before, made.changed) == ((LAB_KEY,), (), False)
    assert parse_trust(made.text, "x").key(LAB.keyid)
    again = joined(made.text)
    assert (again.text, again.changes, again.fresh) == (made.text, (), ())


OWN = """\
# my settings
store = "/scratch/store"   # large
site = "generic" # for now

[mirrors]
"docker.io" = "mirror.example.org/hub"  # fast

[[trust]]  # a friend
name = "friend"
keyid = "{keyid}"
public = "{public}"
from = 2026-01-01 # since we met
until = 2026-06-01
"""


def own(**changes: str) -> str:
    row = dict(line.split(" = ") for line in format_row(OTHER_KEY).splitlines()[1:])
    text = OWN.format(keyid=row["keyid"].strip('"'), public=row["public"].strip('"'))
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def test_what_a_person_wrote_stays() -> None:
    made = joined(own())
    assert [line for line in own().splitlines() if line not in made.text.splitlines()] == [
        'site = "generic" # for now'
    ]
    assert 'site = "chtc" # for now' in made.text
    assert made.changes == (
        "catalog = registry.example.org/gpu",
        "site = chtc  (was generic)",
        "sif-folder = /shared/gpu",
        "key lab, from 2026-01-01 until 2027-01-01",
    )
    assert [key.name for key in parse_trust(made.text, "x").keys] == ["friend", "lab"]
    assert not made.changed  # a friend's key is none of that site


def test_a_longer_life_of_a_known_key_is_no_new_key() -> None:
    text = own(friend="lab").replace("until = 2026-06-01", "until = 2026-12-01")
    made = joined(text, replace(INVITATION, keys=(OTHER_KEY,)))
    assert (made.fresh, made.changed) == ((), False)
    assert "until = 2027-01-01" in made.text
    assert "from = 2026-01-01 # since we met" in made.text


def test_another_key_under_the_same_name_is_told_and_takes_its_place() -> None:
    made = joined(own(friend="lab"))
    assert made.changed
    assert made.before == (("lab", STRANGER.keyid),)
    assert [(key.name, key.keyid) for key in parse_trust(made.text, "x").keys] == [("lab", LAB.keyid)]
    renamed = replace(LAB_KEY, key=PublicKey(name="lab-2027", raw=LAB.public))
    first = joined("", replace(INVITATION, keys=(OTHER_KEY,))).text
    made = joined(first, replace(INVITATION, keys=(renamed,)))  # of a catalog that was joined before
    assert made.changed
    assert joined(first, replace(INVITATION, catalog="other.example.org", keys=(renamed,))).changed is False


def test_what_the_site_says_for_everybody_is_not_written_again() -> None:
    site = tomllib.loads(joined("").text)
    made = joined("", INVITATION, site)
    assert (made.text, made.changes) == ("", ())
    changed = joined("", replace(INVITATION, keys=(replace(LAB_KEY, key=OTHER_KEY.key),)), site)
    assert changed.before == (("lab", LAB.keyid),)
    assert parse_trust(changed.text, "x").key(STRANGER.keyid)


@pytest.mark.parametrize(
    "text",
    [
        'site = """\ngeneric"""\n',
        'site = "a\\"b"\n',
        'trust = [{name = "lab", keyid = "0", public = "1", from = 2026-01-01, until = 2026-01-02}]\n',
        '"site" = "generic"\n',
    ],
)
def test_what_cannot_be_changed_is_said_with_what_to_write(text: str) -> None:
    with fails("settings-not-editable") as caught:
        joined(text)
    for line in ('catalog = "registry.example.org/gpu"', "[[trust]]", f'keyid = "{LAB.keyid}"'):
        assert line in caught.value.hint


def test_places_and_fingerprints() -> None:
    assert str(invitation_place("registry.example.org/gpu")) == "registry.example.org/gpu/catalog:invitation"
    assert fingerprint(LAB.keyid).replace(" ", "") == LAB.keyid
    assert len(fingerprint(LAB.keyid)) < 76
