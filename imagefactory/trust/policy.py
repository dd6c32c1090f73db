"""Trusted keys and the policy: the [[trust]] rows and the [policy] in imagefactory.toml files.

    [[trust]]
    name = "lab"
    keyid = "<64 hex digits>"
    public = "<base64 of the raw 32 bytes>"
    from = 2026-01-01          # a date means 00:00 UTC; a time needs an offset
    until = 2027-01-01         # statements issued from then on are not trusted
    evidence = ["local"]       # default: all types in the policy

    [policy]
    evidence = ["local", "kit", "htcondor", "slurm", "actions"]
    expires-days = 90
    suites = ["sha256:..."]    # digests of older suites that still count; the current one always counts
    promotion-signatures = 2   # keys that must approve before a tag in a registry moves (approval.py)

The rows of all files count: the user's, the site's, and those of a trusted project (settings/files.py). If
two files have the same key or name, the row in the nearest file counts, but only until the earliest end in
any of them. Only the policy of the nearest file counts.

The owner of a key chooses the dates of the statements that it signs. So after `until`, a date is not enough:
only statements recorded before count. `record` is the sha256 of `retired-keys/NAME.txt`, in the directory of
imagefactory.toml. That file lists the digests of the recorded payloads. `key retire` and `key rotate` write
both. Without the file, no statement by a retired key counts, except in a catalog that a valid key signed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

from imagefactory.errors import UsageError, os_problem
from imagefactory.fs import replacing
from imagefactory.serialize import DIGEST, format_time, printable_value
from imagefactory.settings.files import read_document
from imagefactory.trees import read_file
from imagefactory.trust.keys import NAME, Period, PublicKey, check_name, parse_public
from imagefactory.verify.report import evidence_types

DEFAULT_DAYS = 90
MOST_DAYS = 366
MOST_SIGNATURES = 8
RECORDS = "retired-keys"
"""The directory next to imagefactory.toml with a file for each retired key: the digests of its signed
payloads.
"""
LARGEST_RECORD = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A key, trusted for statements issued in [`since`, `until`) with evidence of these types.

    After `until`, only payloads recorded before count; `signed` has their digests.
    """

    name: str
    keyid: str
    public: bytes
    since: datetime
    until: datetime
    evidence: tuple[str, ...]
    signed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePolicy:
    """The policy. A verdict is valid for at most `days`. `suites` are the digests of other suites that count.

    `signatures` is the number of keys that must approve a promotion, 0 for none.
    """

    evidence: tuple[str, ...] = field(default_factory=evidence_types)
    days: int = DEFAULT_DAYS
    suites: tuple[str, ...] = ()
    signatures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRules:
    """The trusted keys and the policy. Without keys, no statement is trusted."""

    keys: tuple[TrustedKey, ...] = ()
    policy: AcceptancePolicy = AcceptancePolicy()

    def key(self, keyid: str) -> TrustedKey | None:
        return next((key for key in self.keys if key.keyid == keyid), None)

    @property
    def periods(self) -> Mapping[str, Period]:
        """Return the period of trust of each key, by key id."""
        return {key.keyid: (key.since, key.until) for key in self.keys}


def read_trust(files: Sequence[Path], limits: Sequence[Path] = ()) -> TrustRules:
    """Return the rules in these files (`Settings.files`), the nearest first.

    Without files, no key is trusted.

    The files in `limits` come last. They can shorten the periods of keys but not add keys.
    """
    documents = [(read_document(path), str(path)) for path in files]
    others = [(read_document(path), str(path)) for path in limits]
    nearest = next((document for document in (*documents, *others) if "policy" in document[0]), ({}, ""))
    policy = _parse_policy(nearest[0].get("policy", {}), f"{nearest[1]}: [policy]")
    keys: list[TrustedKey] = []
    for number, (document, location) in enumerate((*documents, *others)):
        parsed_keys = _parse_keys(document, location, policy, Path(location).parent)
        ends = {key.keyid: key for key in parsed_keys}
        keys = [
            replace(key, until=max(key.since, end.until), signed=end.signed)
            if (end := ends.get(key.keyid, key)).until < key.until
            else key
            for key in keys
        ]
        known = {word for key in keys for word in (key.name, key.keyid)}
        if number < len(documents):
            keys += [key for key in parsed_keys if not {key.name, key.keyid} & known]
    return TrustRules(keys=tuple(keys), policy=policy)


def parse_trust(text: str, location: str) -> TrustRules:
    """Parse the text of one file. Raises UsageError that names the file and the key."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(
            "trust-invalid",
            f"{location} is not valid TOML: {error}",
            hint='correct the line, such as name = "lab"',
        ) from error
    policy = _parse_policy(document.get("policy", {}), f"{location}: [policy]")
    return TrustRules(keys=_parse_keys(document, location, policy), policy=policy)


def _parse_keys(
    document: Mapping[str, Any], location: str, policy: AcceptancePolicy, directory: Path | None = None
) -> tuple[TrustedKey, ...]:
    """Return the rows of one file, without duplicate keys and names.

    A row without evidence has the policy's evidence.

    `directory` contains the records of retired keys. Without `directory`, the records are not read.
    """
    rows = document.get("trust", [])
    if not isinstance(rows, list):
        raise UsageError(
            "trust-invalid",
            f"{location}: 'trust' is not a list of tables",
            hint="write [[trust]] above each key",
        )
    keys = tuple(
        _parse_key(row, f"{location}: [[trust]] {n}", policy, directory)
        for n, row in enumerate(rows, start=1)
    )
    for field_name in ("name", "keyid"):
        values = [getattr(key, field_name) for key in keys]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice:
            raise UsageError(
                "trust-duplicate",
                f"{location}: duplicate {field_name} '{twice}' in [[trust]]",
                hint="delete one of the two rows",
            )
    return keys


def _parse_policy(row: object, location: str) -> AcceptancePolicy:
    table = _table(row, location, ("evidence", "expires-days", "suites", "promotion-signatures"))
    days, suites = table.get("expires-days", DEFAULT_DAYS), table.get("suites", [])
    if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= MOST_DAYS:
        raise UsageError(
            "trust-invalid",
            f"{location} expires-days: expected a number of days",
            hint=f"write 1 to {MOST_DAYS}",
        )
    if not isinstance(suites, list) or not all(isinstance(s, str) and DIGEST.fullmatch(s) for s in suites):
        raise UsageError(
            "trust-invalid",
            f"{location} suites: expected a list of digests",
            hint='write ["sha256:<64 hex digits>"]',
        )
    signatures = table.get("promotion-signatures", 0)
    if (
        isinstance(signatures, bool)
        or not isinstance(signatures, int)
        or not 0 <= signatures <= MOST_SIGNATURES
    ):
        raise UsageError(
            "trust-invalid",
            f"{location} promotion-signatures: expected a number of keys",
            hint=f"write 0 to {MOST_SIGNATURES}",
        )
    return AcceptancePolicy(
        evidence=_parse_evidence(table.get("evidence", list(evidence_types())), location),
        days=days,
        suites=tuple(suites),
        signatures=signatures,
    )


def _parse_key(row: object, location: str, policy: AcceptancePolicy, directory: Path | None) -> TrustedKey:
    table = _table(row, location, ("name", "keyid", "public", "from", "until", "evidence", "record"))
    for name in ("name", "keyid", "public", "from", "until"):
        if name not in table:
            raise UsageError(
                "trust-invalid",
                f"{location}: '{name}' is missing",
                hint="delete the row and run imagefactory key trust FILE",
            )
    name, text = table["name"], table["public"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(
            "trust-invalid",
            f"{location} name: expected a valid key name",
            hint="use lowercase letters, digits, '.', '_' and '-'",
        )
    if not isinstance(text, str):
        raise UsageError(
            "trust-invalid", f"{location} public: expected a string", hint="write the key in base64"
        )
    key = parse_public(text.encode("utf-8"), f"{location} public")
    if table["keyid"] != key.keyid:
        raise UsageError(
            "keyid-mismatch",
            f"{location} keyid: does not match the public key of '{name}'",
            hint=f"compare {key.keyid}, the id of that public key, with its owner, then correct the row",
        )
    since, until = (_parse_moment(table[word], f"{location} {word}") for word in ("from", "until"))
    if until < since:
        raise UsageError(
            "trust-invalid", f"{location} until: is earlier than 'from'", hint="write a later time"
        )
    evidence = _parse_evidence(table.get("evidence", list(policy.evidence)), location)
    record = table.get("record", "")
    if record != "" and not (isinstance(record, str) and DIGEST.fullmatch(record)):
        raise UsageError(
            "trust-invalid",
            f"{location} record: expected a digest",
            hint="delete this line and run imagefactory key retire NAME",
        )
    return TrustedKey(
        name=name,
        keyid=key.keyid,
        public=key.raw,
        since=since,
        until=until,
        evidence=evidence,
        signed=_read_record(directory, name, record) if directory and record else frozenset(),
    )


def _read_record(directory: Path, name: str, digest: str) -> frozenset[str]:
    """Return the lines of the record with that digest, none if the file is missing or was changed."""
    try:
        data = read_file(directory, f"{RECORDS}/{name}.txt", LARGEST_RECORD)
    except OSError:
        return frozenset()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        return frozenset()
    return frozenset(line for line in data.decode("ascii", "replace").splitlines() if DIGEST.fullmatch(line))


def _parse_evidence(value: object, location: str) -> tuple[str, ...]:
    kinds = evidence_types()
    words = ", ".join(kinds)
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise UsageError(
            "trust-invalid", f"{location} evidence: expected a list of strings", hint=f"write any of {words}"
        )
    unknown = [word for word in value if word not in kinds]
    if unknown:
        raise UsageError(
            "trust-invalid",
            f"{location} evidence: unknown type '{printable_value(unknown[0])}'",
            hint=f"write any of {words}",
        )
    return tuple(value)


def _parse_moment(value: object, location: str) -> datetime:
    """Return a time; a date means 00:00 UTC."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        with contextlib.suppress(OverflowError):  # at either end of the calendar
            return value.astimezone(UTC)
    elif isinstance(value, date) and not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    raise UsageError(
        "trust-invalid",
        f"{location} is not a date",
        hint="write 2026-01-31 or 2026-01-31T12:00:00Z, without quotes",
    )


def first_moment(value: date) -> datetime:
    """Return the date or time in a row, in UTC. Raises UsageError for a time without an offset."""
    return _parse_moment(value, "[[trust]]")


def _table(value: object, location: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(
            "trust-invalid", f"{location} is not a table", hint=f"known keys: {', '.join(known)}"
        )
    for key in value:
        if key not in known:
            raise UsageError(
                "trust-invalid",
                f"{location}: unknown key '{printable_value(key)}'",
                hint=f"known keys: {', '.join(known)}",
            )
    return value


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # the exact bytes: the user may trust a file by their digest
    except OSError as error:
        raise UsageError(*os_problem("read", path, error), hint="check its permissions") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            "trust-invalid", f"{path} is not UTF-8 text: {error}", hint="save it as UTF-8"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustGrant:
    """The values of a row that `key trust` writes: a key, its period, and its evidence types (empty: the
    policy's).
    """

    key: PublicKey
    since: date
    until: date
    evidence: tuple[str, ...] = ()


def add_key(text: str, grant: TrustGrant, location: str) -> str:
    """Return the text of imagefactory.toml with a new [[trust]] row. The rest is unchanged.

    Raises UsageError if the name or the key is already trusted.
    """
    for key in parse_trust(text, location).keys:
        if grant.key.name == key.name or grant.key.keyid == key.keyid:
            raise UsageError(
                "key-already-trusted",
                f"{location}: '{key.name}' is already trusted, until {key.until:%Y-%m-%d}",
                hint="retire it, or change its dates there; a new key needs a new name",
            )
    row = format_row(grant)
    before = text.rstrip("\n")
    return _checked(f"{before}\n\n{row}" if before else row, text, location)


def format_row(grant: TrustGrant) -> str:
    """Return a [[trust]] row. Raises UsageError for an invalid name."""
    lines = ["[[trust]]", f'name = "{check_name(grant.key.name)}"']
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in row_values(grant).items())]) + "\n"


def row_values(grant: TrustGrant) -> dict[str, str]:
    """Return the values of a row without the name, as TOML."""
    values = {
        "keyid": f'"{grant.key.keyid}"',
        "public": f'"{base64.b64encode(grant.key.raw).decode("ascii")}"',
        "from": grant.since.isoformat(),
        "until": grant.until.isoformat(),
    }
    return values | ({"evidence": json.dumps(list(grant.evidence))} if grant.evidence else {})


def named_key(text: str, name: str, location: str) -> TrustedKey:
    """Return the key with that name or id in an imagefactory.toml. Raises UsageError."""
    key = next((key for key in parse_trust(text, location).keys if name in (key.name, key.keyid)), None)
    if key is None:
        raise UsageError(
            "key-not-trusted",
            f"{location}: no key '{name}' is trusted",
            hint="list the keys: imagefactory key list",
        )
    return key


def retire_key(text: str, name: str, until: date, location: str, record: bytes = b"") -> str:
    """Return the text of imagefactory.toml in which the key is trusted only for statements issued before
    `until`.

    `record` is the text of its file in `RECORDS`. Raises UsageError if the key is not trusted, or if its
    period ended earlier and it has a record.
    """
    import tomlkit

    key = named_key(text, name, location)
    moment = _parse_moment(until, "--until")
    document = tomlkit.parse(text)
    rows: Any = document["trust"]
    row = next(row for row in rows if row["name"] == key.name)
    # Statements that were not seen before the key ended must never enter a record later.
    if key.until <= moment and (not record or "record" in row):
        raise UsageError(
            "key-already-retired",
            f"{location}: '{key.name}' is trusted until {key.until:%Y-%m-%d %H:%M} UTC, which is earlier",
            hint="pass an earlier date, or keep that one",
        )
    if moment < key.until:
        row["until"] = max(moment, key.since) if isinstance(until, datetime) else until
    if record:
        row["record"] = f"sha256:{hashlib.sha256(record).hexdigest()}"
    return _checked(tomlkit.dumps(document), text, location)


def format_record(digests: Iterable[str]) -> bytes:
    """Return the text of a file in `RECORDS`: the digests of payloads, one on each line."""
    return "".join(f"{digest}\n" for digest in sorted(set(digests))).encode("ascii")


def _checked(text: str, before: str, location: str) -> str:
    """Return `text`. Raises UsageError if it is invalid or if more than its trust rows changed."""
    parse_trust(text, location)
    old, new = tomllib.loads(before), tomllib.loads(text)
    if {**old, "trust": 0} != {**new, "trust": 0}:
        raise UsageError(
            "trust-not-editable",
            f"{location}: the result of imagefactory's edit would not be valid",
            hint="write [[trust]] at the end of the file",
        )
    return text


def read_text(path: Path) -> str:
    """Return the text of an imagefactory.toml. Raises UsageError if the file does not exist."""
    if not path.is_file():
        raise UsageError(
            "project-not-found",
            f"{path.parent} has no {path.name}",
            hint="select a project (imagefactory -C DIR key ...), or write your own file: --user",
        )
    return _read(path)


def write_text(path: Path, text: str) -> None:
    """Replace an imagefactory.toml atomically."""
    path = path.resolve()
    try:
        with replacing(path, mode=path.stat().st_mode & 0o777 if path.exists() else 0o644) as file:
            file.write(text.encode())
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error


class KeyRow(TypedDict):
    name: str
    keyid: str
    public: str
    """The public key in base64."""
    status: Literal["trusted", "retired", "later", "not-trusted"]
    """`later`: trusted from a later day on."""
    valid_from: str | None
    valid_until: str | None
    evidence: list[str]
    """The sources of verdicts that the key is trusted for."""
    own: bool
    """Whether you have the private key."""


def list_keys(trust: TrustRules, public_keys: Sequence[PublicKey], now: datetime) -> list[KeyRow]:
    """Return the trusted keys and the user's keys by name, as JSON."""
    mine = {key.keyid: key for key in public_keys}

    def row(key: PublicKey, trusted: TrustedKey | None) -> KeyRow:
        status: Literal["trusted", "retired", "later", "not-trusted"] = "not-trusted"
        if trusted:
            started: Literal["trusted", "later"] = "trusted" if trusted.since <= now else "later"
            status = "retired" if trusted.until <= now else started
        evidence = trusted.evidence if trusted else ()
        return KeyRow(
            name=key.name,
            keyid=key.keyid,
            public=base64.b64encode(key.raw).decode("ascii"),
            status=status,
            valid_from=format_time(trusted.since) if trusted else None,
            valid_until=format_time(trusted.until) if trusted else None,
            evidence=[source for source in evidence if source in trust.policy.evidence],
            own=key.keyid in mine,
        )

    known = {key.keyid for key in trust.keys}
    rows = [row(PublicKey(name=key.name, raw=key.public), key) for key in trust.keys]
    rows += [row(key, None) for key in mine.values() if key.keyid not in known]
    return sorted(rows, key=lambda row: row["name"])
