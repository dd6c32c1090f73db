"""Keys and trust: made for one person, read from one table, changed without a scratch on the rest."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from imagefactory.actions.promote import next_name, write_record
from imagefactory.cli import cli
from imagefactory.errors import EXIT_USAGE, ImagefactoryError, UsageError
from imagefactory.settings.choices import HTCONDOR, SLURM
from imagefactory.settings.load import load_settings
from imagefactory.trust.keys import (
    PublicKey,
    find_key,
    format_public,
    keys_directory,
    make_key,
    own_keys,
    parse_public,
    read_public,
    read_signing_key,
)
from imagefactory.trust.policy import (
    RECORDS,
    AcceptancePolicy,
    TrustGrant,
    TrustRules,
    add_key,
    format_record,
    parse_trust,
    read_trust,
    retire_key,
)
from imagefactory.verify.report import EVIDENCE_ACTIONS, EVIDENCE_KIT, EVIDENCE_LOCAL
from tests.made.errors import fails
from tests.made.full_disk import full_disk
from tests.made.trusted import write_settings
from tests.made.verdicts import DAY, LAB, NOW, STRANGER

ROW = f"""\
[[trust]]
name = "lab"
keyid = "{LAB.keyid}"
public = "TU5PUA=="
from = 2026-01-01
until = 2027-01-01
"""
GRANT = TrustGrant(key=PublicKey(name="lab", raw=LAB.public), since=date(2026, 1, 1), until=date(2027, 1, 1))
DIGEST, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
TOML = add_key("", GRANT, "x")


def test_a_new_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    made = make_key(folder, "lab")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "lab.pem").stat().st_mode) == 0o600
    assert read_signing_key(folder / "lab.pem").keyid == made.keyid
    assert read_public("lab", folder) == made == own_keys(folder)[0]
    with fails("key-exists"):
        make_key(folder, "lab")
    assert read_signing_key(folder / "lab.pem").public == made.raw


@pytest.mark.parametrize("room", [0, 100, 115])
def test_a_full_disk_leaves_no_key_and_the_same_command_makes_one(tmp_path: Path, room: int) -> None:
    """A public half has 113 bytes, a private one 119."""
    with full_disk(room), pytest.raises(OSError, match="File too large"):
        make_key(tmp_path, "lab")
    assert list(tmp_path.iterdir()) == []
    made = make_key(tmp_path, "lab")
    assert read_signing_key(tmp_path / "lab.pem").keyid == made.keyid


def test_a_key_without_its_public_half_is_taken_back(tmp_path: Path) -> None:
    (tmp_path / "lab.pub").mkdir()  # the last step fails: nothing can be renamed to it
    (tmp_path / "lab.pub/x").touch()
    with pytest.raises(OSError, match="lab"):
        make_key(tmp_path, "lab")
    assert [path.name for path in tmp_path.iterdir()] == ["lab.pub"]


@pytest.mark.parametrize("there", ["file", "link", "dangling"])
def test_a_private_key_is_never_written_over(tmp_path: Path, there: str) -> None:
    other, path = tmp_path / "other", tmp_path / "lab.pem"
    if there == "file":
        path.write_text("mine")
    else:
        path.symlink_to(other)
        if there == "link":
            other.write_text("mine")
    (tmp_path / "lab.pub").write_text("its own")
    with pytest.raises(UsageError):
        make_key(tmp_path, "lab")
    assert (tmp_path / "lab.pub").read_text() == "its own"
    assert other.exists() == (there == "link")


@pytest.mark.parametrize("name", ["", "../lab", "a/b", "Lab", "lab\n", ".pem", "x" * 65])
def test_names_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    with fails("key-name-invalid"):
        make_key(tmp_path, name)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    make_key(tmp_path, "lab")
    (tmp_path / "lab.pem").chmod(mode)
    with fails("private-key-exposed") as caught:
        read_signing_key(tmp_path / "lab.pem")
    assert f"{mode:o}" in caught.value.message
    assert "chmod 600" in caught.value.hint


def test_only_ed25519_without_a_password_signs(tmp_path: Path) -> None:
    path = tmp_path / "k.pem"
    pem, pkcs8 = Encoding.PEM, PrivateFormat.PKCS8
    for data, value in (
        (b"", "password"),
        (b"-----BEGIN PRIVATE KEY-----\nMA==\n-----END PRIVATE KEY-----\n", "password"),
        (
            Ed25519PrivateKey.generate().private_bytes(pem, pkcs8, BestAvailableEncryption(b"secret")),
            "password",
        ),
        (
            ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, pkcs8, NoEncryption()),
            "Ed25519",
        ),
        (format_public(LAB.public), "password"),
    ):
        path.write_bytes(data)
        path.chmod(0o600)
        with fails("private-key-invalid") as caught:
            read_signing_key(path)
        assert value in caught.value.message
    with fails("private-key-invalid") as caught:
        read_signing_key(tmp_path)
    assert "regular" in caught.value.message


def test_which_key_signs(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    folder = keys_directory(environ)
    assert folder == tmp_path / "imagefactory" / "keys"
    assert find_key("", environ) is None
    make_key(folder, "lab")
    assert find_key("", environ) == folder / "lab.pem"
    make_key(folder, "other")
    with fails("no-trusted-signing-key") as caught:
        find_key("", environ)
    assert " 2 keys" in caught.value.message
    assert "key trust" in caught.value.hint
    assert find_key("other", environ) == folder / "other.pem"
    assert find_key(str(folder / "other.pem"), environ) == folder / "other.pem"
    with fails("signing-key-not-found") as caught:
        find_key("third", environ)
    assert "third" in caught.value.message


def test_the_newest_trusted_key_signs(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    folder = keys_directory(environ)
    old, new, later, _ = (make_key(folder, name).keyid for name in ("old", "new", "later", "unknown"))
    first, second = NOW - 30 * DAY, NOW - DAY
    times = {old: (first, NOW + DAY), new: (second, NOW + DAY), later: (NOW + DAY, NOW + 9 * DAY)}

    def chosen(now: datetime, **changes: tuple[datetime, datetime]) -> str:
        found = find_key("", environ, {**times, **changes}, now)
        return found.stem if found else ""

    assert chosen(NOW) == "new"
    assert chosen(NOW, **{old: (first, NOW)}) == "new"
    assert chosen(NOW, **{new: (second, NOW)}) == "old"
    assert chosen(NOW + 2 * DAY) == "later"
    with fails("signing-key-ambiguous") as caught:
        chosen(NOW, **{new: (first, NOW + DAY)})
    assert "new and old" in caught.value.message
    with pytest.raises(UsageError) as caught:
        chosen(NOW - 60 * DAY)
    assert caught.value.hint.endswith("key trust unknown")


def test_the_setting_names_a_key_or_a_file(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    write_settings(tmp_path, 'signing-key = "keys/ci.pem"\n' + TOML, environ)
    from_file = load_settings(directory=tmp_path, start=tmp_path, environ=environ)
    assert from_file.signing_key.value == str(tmp_path / "keys" / "ci.pem")
    named = load_settings(
        directory=tmp_path, start=tmp_path, environ={**environ, "IMAGEFACTORY_SIGNING_KEY": "lab"}
    )
    assert named.signing_key.value == "lab"


def test_public_keys_in_pem_and_in_base64() -> None:
    import base64

    assert parse_public(format_public(LAB.public), "x").raw == LAB.public
    assert parse_public(base64.b64encode(LAB.public) + b"\n", "x").keyid == LAB.keyid


def test_the_pem_is_what_other_tools_write() -> None:
    from cryptography.hazmat.primitives.serialization import PublicFormat, load_pem_public_key

    key = load_pem_public_key(format_public(LAB.public))
    assert key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) == format_public(LAB.public)


def test_no_other_file_is_a_public_key(tmp_path: Path) -> None:
    make_key(tmp_path, "lab")
    ecdsa = ec.generate_private_key(ec.SECP256R1()).public_key()
    from cryptography.hazmat.primitives.serialization import PublicFormat

    for data in (
        b"",
        b"AAAA",
        b"\xff\xfe",
        format_public(LAB.public)[:-40],
        format_public(LAB.public + b"x"),
        ecdsa.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    ):
        with fails("public-key-invalid"):
            parse_public(data, "x")
    with fails("public-key-invalid") as caught:
        parse_public((tmp_path / "lab.pem").read_bytes(), "x")
    assert "private" in caught.value.message


def test_without_rows_nothing_is_trusted(tmp_path: Path) -> None:
    assert read_trust((tmp_path / "imagefactory.toml",)) == TrustRules() == parse_trust("", "x")
    assert TrustRules().key(LAB.keyid) is None
    assert AcceptancePolicy() == AcceptancePolicy(
        evidence=(EVIDENCE_LOCAL, EVIDENCE_KIT, HTCONDOR, SLURM, EVIDENCE_ACTIONS),
        days=90,
        suites=(),
    )


def test_this_project_s_own_file_trusts_no_test_key() -> None:
    assert read_trust((Path(__file__).parents[3] / "imagefactory.toml",)).keys == ()


def test_a_row_is_a_key_with_a_period() -> None:
    trust = parse_trust(TOML + '[policy]\nevidence = ["kit"]\nexpires-days = 7\n', "x")
    key = trust.key(LAB.keyid)
    assert key is not None
    assert (key.since, key.until) == (datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC))
    assert key.evidence == trust.policy.evidence == (EVIDENCE_KIT,)
    assert trust.policy.days == 7
    leap = parse_trust("[policy]\nexpires-days = 366\n", "x")  # a whole year, whichever
    assert leap.policy.days == 366


@pytest.mark.parametrize(
    ("text", "code", "value"),
    [
        ("trust = 1", "trust-invalid", "'trust'"),
        ("trust = [1]", "trust-invalid", "[[trust]] 1 is not"),
        ("[trust]\n", "trust-invalid", "'trust'"),
        ("[[trust]]\n", "trust-invalid", "'name'"),
        (TOML + 'owner = "me"\n', "trust-invalid", "'owner'"),
        (TOML.replace('name = "lab"', 'name = "the lab"'), "trust-invalid", "1 name"),
        (TOML.replace('name = "lab"', "name = 1"), "trust-invalid", "1 name"),
        (ROW, "public-key-invalid", "1 public"),
        (TOML.replace(LAB.keyid, STRANGER.keyid), "keyid-mismatch", "1 keyid"),
        (TOML.replace(LAB.keyid, LAB.keyid[:16]), "keyid-mismatch", "1 keyid"),
        (TOML.replace("2026-01-01", '"2026-01-01"'), "trust-invalid", "1 from"),
        (TOML.replace("2026-01-01", "2026-01-01T00:00:00"), "trust-invalid", "1 from"),
        (TOML.replace("2027-01-01", "9999-12-31T23:59:59-14:00"), "trust-invalid", "1 until"),
        (TOML.replace("2026-01-01", "0001-01-01T00:00:00+14:00"), "trust-invalid", "1 from"),
        ("a = " + "[" * 5000, "trust-invalid", "TOML"),
        (TOML.replace("2027-01-01", "2025-01-01"), "trust-invalid", "1 until"),
        (TOML + 'evidence = ["magic"]\n', "trust-invalid", "evidence: unknown type 'magic'"),
        (TOML + 'evidence = "local"\n', "trust-invalid", "evidence"),
        (TOML + TOML, "trust-duplicate", "name 'lab'"),
        (TOML + TOML.replace('"lab"', '"two"'), "trust-duplicate", "keyid"),
        ("policy = 1", "trust-invalid", "[policy] is not"),
        ("[policy]\nexpires = 3\n", "trust-invalid", "'expires'"),
        ("[policy]\nexpires-days = 0\n", "trust-invalid", "expires-days"),
        ("[policy]\nexpires-days = true\n", "trust-invalid", "expires-days"),
        ("[policy]\nexpires-days = 367\n", "trust-invalid", "expires-days"),
        ('[policy]\nsuites = ["abc"]\n', "trust-invalid", "suites"),
        ("[policy]\nevidence = [1]\n", "trust-invalid", "evidence"),
        ("[", "trust-invalid", "TOML"),
    ],
)
def test_a_wrong_row_is_said_by_file_and_key(text: str, code: str, value: str) -> None:
    with fails(code) as caught:
        parse_trust(text, "/site/imagefactory.toml")
    assert value in caught.value.message
    assert caught.value.message.startswith("/site/imagefactory.toml")
    assert caught.value.hint


WRITTEN = """\
# The lab's factory
store = "images"   # on the big disk

[policy]
expires-days = 30  # we are careful
"""


def test_edits_leave_everything_else_as_a_person_wrote_it() -> None:
    one = add_key(WRITTEN, GRANT, "x")
    assert one.startswith(WRITTEN)
    second = TrustGrant(
        key=PublicKey(name="ci", raw=STRANGER.public),
        since=date(2026, 1, 1),
        until=date(2026, 2, 1),
        evidence=(EVIDENCE_ACTIONS,),
    )
    two = add_key(one, second, "x")
    assert two.startswith(one)
    assert [key.name for key in parse_trust(two, "x").keys] == ["lab", "ci"]
    assert parse_trust(two, "x").keys[1].evidence == (EVIDENCE_ACTIONS,)
    moment = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
    retired = retire_key(two, "lab", moment, "x")
    assert retired == two.replace("until = 2027-01-01", "until = 2026-11-22T03:00:00Z")
    assert parse_trust(retired, "x").keys[0].until == moment
    assert retire_key(two, "lab", date(2026, 6, 1), "x") == two.replace("2027-01-01", "2026-06-01")


def test_edits_that_make_no_sense_are_refused() -> None:
    for grant in (
        GRANT,
        TrustGrant(key=PublicKey(name="two", raw=LAB.public), since=GRANT.since, until=GRANT.until),
    ):
        with fails("key-already-trusted"):
            add_key(TOML, grant, "x")
    with fails("key-not-trusted") as caught:
        retire_key(TOML, "other", date(2026, 6, 1), "x")
    assert "'other'" in caught.value.message
    with fails("key-already-retired"):
        retire_key(TOML, "lab", date(2028, 1, 1), "x")
    with pytest.raises(UsageError):
        retire_key(TOML, "lab", date(2025, 1, 1), "x")
    with pytest.raises(UsageError):
        add_key("trust = []\n", GRANT, "x")


def _call(tmp_path: Path, *arguments: str, code: int = 0) -> str:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}
    result = CliRunner().invoke(cli, ["-C", str(tmp_path), "key", *arguments], env=environ)
    if code:
        assert getattr(result.exception, "exit_code", result.exit_code) == code, result.output
        assert isinstance(result.exception, ImagefactoryError)
        return result.exception.code
    assert result.exception is None, result.output
    return result.output


def test_new_trust_show_retire(tmp_path: Path) -> None:
    path = tmp_path / "imagefactory.toml"
    write_settings(tmp_path, WRITTEN, {"XDG_CONFIG_HOME": str(tmp_path / "config")})
    assert "imagefactory key create" in _call(tmp_path, "list")
    said = _call(tmp_path, "create", "lab")
    keyid = read_public("lab", tmp_path / "config" / "imagefactory" / "keys").keyid
    assert keyid in said
    row = _call(tmp_path, "list").splitlines()[1]
    assert row.split() == ["lab", keyid[:16], "not-trusted", "-", "-", "-", "yes"]

    _call(tmp_path, "trust", "lab", "--evidence", "local", "--since", "2026-01-01", "--until", "2100-01-01")
    row = tomllib.loads(path.read_text())["trust"][0]
    assert (row["name"], row["keyid"], row["evidence"]) == ("lab", keyid, ["local"])
    shown = json.loads(_call(tmp_path, "list", "--json"))
    assert shown["format"] == "imagefactory.key-list/1"
    assert [(one["status"], one["own"], one["evidence"]) for one in shown["keys"]] == [
        ("trusted", True, ["local"])
    ]

    assert "trusted until" in _call(tmp_path, "retire", "lab")
    assert json.loads(_call(tmp_path, "list", "--json"))["keys"][0]["status"] == "retired"
    assert _call(tmp_path, "retire", "lab", code=EXIT_USAGE) == "key-already-retired"
    assert path.read_text().startswith(WRITTEN)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config", "imagefactory.toml"]


def test_another_s_public_key_is_trusted_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").touch()
    (tmp_path / "facility.pub").write_bytes(format_public(STRANGER.public))
    said = _call(tmp_path, "trust", str(tmp_path / "facility.pub"))
    assert STRANGER.keyid in said
    (key,) = read_trust((tmp_path / "imagefactory.toml",)).keys
    assert key.name == "facility"
    assert (key.until - key.since).days == 365
    assert _call(tmp_path, "trust", str(tmp_path / "facility.pub"), code=EXIT_USAGE) == "key-already-trusted"


def test_a_file_as_deep_as_a_well_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").write_text("a = " + "[" * 5000)
    _call(tmp_path, "list", code=EXIT_USAGE)


def test_a_year_ends_with_the_calendar(tmp_path: Path) -> None:
    (tmp_path / "imagefactory.toml").touch()
    _call(tmp_path, "create", "lab")
    assert "until 9999-12-31" in _call(tmp_path, "trust", "lab", "--since", "9999-06-01")


def test_trust_needs_a_factory_and_a_key(tmp_path: Path) -> None:
    assert _call(tmp_path, "trust", "nobody", code=EXIT_USAGE) == "key-not-found"
    _call(tmp_path, "create", "lab")
    assert _call(tmp_path, "trust", "lab", code=EXIT_USAGE) == "project-not-found"


def test_a_light_install_shows_and_trusts_keys(tmp_path: Path) -> None:
    write_settings(tmp_path, WRITTEN, {"HOME": str(tmp_path)})
    (tmp_path / "lab.pub").write_bytes(format_public(LAB.public))
    program = f"""
import sys
for name in ("cryptography", "tomlkit", "requests", "tenacity", "rich", "jinja2", "uv", "zstandard"):
    sys.modules[name] = None
from imagefactory.cli import cli
for arguments in (["trust", "lab.pub"], ["list"]):
    cli.main(["-C", {str(tmp_path)!r}, "key", *arguments], standalone_mode=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin"},
    )
    assert LAB.keyid in done.stdout
    assert "trusted" in done.stdout.splitlines()[-1]


def test_a_person_without_a_factory_trusts_keys_in_a_file_of_his_own(tmp_path: Path) -> None:
    (tmp_path / "site.pub").write_bytes(format_public(STRANGER.public))
    assert _call(tmp_path, "trust", str(tmp_path / "site.pub"), code=EXIT_USAGE) == "project-not-found"
    said = _call(tmp_path, "trust", "--user", str(tmp_path / "site.pub"))
    (mine,) = tmp_path.glob("**/imagefactory/imagefactory.toml")
    assert str(mine) in said
    assert [key.name for key in read_trust((mine,)).keys] == ["site"]
    assert mine.stat().st_mode & 0o777 == 0o644
    mine.write_text(f"workers = 2\n{mine.read_text()}")
    mine.chmod(0o600)
    assert "trusted until" in _call(tmp_path, "retire", "--user", "site")
    assert mine.read_text().startswith("workers = 2\n")
    assert mine.stat().st_mode & 0o777 == 0o600
    assert json.loads(_call(tmp_path, "list", "--json"))["keys"][0]["status"] == "retired"
    assert not (tmp_path / "imagefactory.toml").exists()


def test_no_nearer_file_prolongs_a_key_that_another_one_ends(tmp_path: Path) -> None:
    """A person joined before the site's own file retired the key."""
    own, site = (tmp_path / name / "imagefactory.toml" for name in ("own", "site"))
    grant = TrustGrant(
        key=PublicKey(name="lab", raw=LAB.public), since=date(2026, 1, 1), until=date(2027, 1, 1)
    )
    text = add_key("", grant, "x")
    for path in (own, site):
        path.parent.mkdir()
        path.write_text(text)
    record = format_record([DIGEST])
    write_record(site.parent, "lab", record)
    site.write_text(retire_key(text, "lab", NOW, "x", record))
    for files in ((own, site), (site, own)):
        (key,) = read_trust(files).keys
        assert (key.until, key.signed) == (NOW, {DIGEST})
    with pytest.raises(UsageError):  # what was not seen in its time never enters a record
        retire_key(site.read_text(), "lab", NOW + DAY, "x", format_record([DIGEST, OTHER]))
    record_file = site.parent / RECORDS / "lab.txt"
    for other in (record + record, b"", format_record([OTHER])):
        record_file.write_bytes(other)
        assert read_trust((site,)).keys[0].signed == frozenset()
    record_file.unlink()
    record_file.symlink_to(own)
    assert read_trust((site,)).keys[0].signed == frozenset()


@pytest.mark.parametrize(
    ("name", "taken", "new"),
    [
        ("lab", set(), "lab-2"),
        ("lab-2", {"lab", "lab-2"}, "lab-3"),
        ("lab", {"lab", "lab-2", "lab-3"}, "lab-4"),
        ("gpu-2026", {"gpu-2026"}, "gpu-2027"),
    ],
)
def test_the_name_of_the_next_key(name: str, taken: set[str], new: str) -> None:
    assert next_name(name, taken) == new


FIELD = 2**255 - 19
CURVE_D = -121665 * pow(121666, -1, FIELD) % FIELD
Point = tuple[int, int]


def add_points(one: Point, other: Point) -> Point:
    """RFC 8032, 5.1.4, in affine coordinates."""
    (x, y), (u, v) = one, other
    product = CURVE_D * x * u * y * v % FIELD
    return (
        (x * v + u * y) * pow(1 + product, -1, FIELD) % FIELD,
        (y * v + x * u) * pow(1 - product, -1, FIELD) % FIELD,
    )


def small_points() -> list[Point]:
    """All whose order divides 8: the multiples of one whose double is (sqrt(-1), 0), of order 4."""
    root = pow(2, (FIELD - 1) // 4, FIELD)
    # A double's y is y^2 + x^2 over something: 0 for x = root*y, and the curve is then d*y^4 + 2*y^2 = 1.
    squares = [(s - 1) * pow(CURVE_D, -1, FIELD) % FIELD for s in _roots(1 + CURVE_D)]
    start = next((root * y % FIELD, y) for square in squares for y in _roots(square))
    points = [start]
    for _ in range(7):
        points.append(add_points(points[-1], start))
    assert points[-1] == (0, 1)
    return points


def _roots(square: int) -> list[int]:
    guess = pow(square, (FIELD + 3) // 8, FIELD)
    both = (guess, guess * pow(2, (FIELD - 1) // 4, FIELD) % FIELD)
    return [sign * root % FIELD for root in both for sign in (1, -1) if root * root % FIELD == square % FIELD]


def encoded(point: Point, *, more: int = 0) -> bytes:
    return (point[1] + more | (point[0] & 1) << 255).to_bytes(32, "little")


def test_a_key_that_fits_what_nobody_signed_is_refused() -> None:
    points = small_points()
    assert len(set(points)) == 8
    for point in points:
        with fails("public-key-weak"):
            parse_public(base64.b64encode(encoded(point)), "mallory")
    again = encoded((0, 1), more=FIELD)  # the neutral point, its y written as more than the field holds
    with fails("public-key-weak"):
        parse_public(base64.b64encode(again), "mallory")


def test_what_such_a_key_would_do() -> None:
    """Else refusing it would be a superstition: R is the neutral point, S is 0, and any message fits."""
    neutral = encoded((0, 1))
    Ed25519PublicKey.from_public_bytes(neutral).verify(neutral + bytes(32), b"whatever you like")
