"""A site's invitation: one small file with the settings that people need to use the catalog of the site.

    format = "imagefactory.invitation/1"
    catalog = "registry.example.org/gpu"      # or the path of a file on a shared file system
    catalog-mirrors = "mirror.example.org/gpu"    # optional
    center = "chtc"                             # the name of the site, optional
    site = "chtc"
    container = "pyxis"                         # optional, of Slurm jobs
    sif-folder = "/shared/gpu/images"           # optional

    [[trust]]                                   # trusted keys, as in imagefactory.toml
    ...

In a registry, the invitation is next to the catalog, with the tag `invitation`. An invitation is not signed,
because it lists the first keys to trust. So people must compare the fingerprint of a key with the one that
the site publishes elsewhere.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import Any

from imagefactory.errors import UsageError
from imagefactory.oci.store import ImageReference
from imagefactory.settings.choices import CONTAINERS, SITES, listed
from imagefactory.settings.load import CENTER, SIF_DIRECTORY
from imagefactory.trust.catalog_package import catalog_repository
from imagefactory.trust.keys import PublicKey
from imagefactory.trust.policy import (
    TrustedKey,
    TrustGrant,
    TrustRules,
    first_moment,
    format_row,
    parse_trust,
    row_values,
)
from imagefactory.verify.report import evidence_types

FORMAT = "imagefactory.invitation/1"
TAG = "invitation"
LARGEST = 1 << 16
_PATH = re.compile(r"/[A-Za-z0-9._+/-]{1,500}")
SETTINGS = ("catalog", "center", "site", "container", "sif-folder", "catalog-mirrors")
_HEADER = re.compile(r"\s*\[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """The settings of a site. `catalog` is `HOST[/PATH][:TAG]` or a path, `mirrors` lists several of these.

    All values may be empty. `container` is empty for Apptainer.
    """

    catalog: str
    site: str
    sif_folder: str
    keys: tuple[TrustGrant, ...]
    mirrors: str = ""
    center: str = ""
    container: str = ""

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings with values, by their names in imagefactory.toml."""
        values = (self.catalog, self.center, self.site, self.container, self.sif_folder, self.mirrors)
        return {name: value for name, value in zip(SETTINGS, values, strict=True) if value}


def invitation_place(text: str) -> ImageReference:
    """Return the reference of the invitation next to a catalog. Raises UsageError for an invalid address."""
    return replace(catalog_repository(text), tag=TAG)


def create_invitation(trust: TrustRules, now: datetime) -> tuple[TrustGrant, ...]:
    """Return the keys that readers should trust, with their periods.

    The result is empty if no key is trusted now.

    It includes retired keys: earlier statements of these keys still count, and readers learn that they are
    retired.
    """
    return tuple(map(_grant, trust.keys)) if any(key.since <= now < key.until for key in trust.keys) else ()


def _grant(key: TrustedKey) -> TrustGrant:
    kinds = evidence_types()
    return TrustGrant(
        key=PublicKey(name=key.name, raw=key.public),
        since=_date(key.since),
        until=_date(key.until),
        evidence=() if set(key.evidence) == set(kinds) else key.evidence,
    )


def _date(moment: datetime) -> date:
    """Return a date if `moment` is midnight in UTC, else the time. TOML supports both."""
    utc = moment.astimezone(UTC)
    return utc.date() if utc.time() == datetime.min.time() else utc


def fingerprint(keyid: str) -> str:
    """Return the 64 hex digits of a key id in groups of eight, so that two people can compare them."""
    return " ".join(keyid[start : start + 8] for start in range(0, len(keyid), 8))


def format_invitation(invitation: Invitation) -> str:
    """Return the text of the file. Raises UsageError if readers would reject it."""
    settings = "".join(f"{name} = {json.dumps(value)}\n" for name, value in invitation.settings.items())
    rows = "\n".join(format_row(grant) for grant in invitation.keys)
    text = f'format = "{FORMAT}"\n{settings}\n{rows}'
    parse_invitation(text.encode(), "the invitation")
    return text


def parse_invitation(data: bytes, location: str) -> Invitation:
    """Parse the output of `format_invitation`. Raises UsageError that names the problem."""
    hint = "ask your center for a new one; imagefactory site invite writes it"
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(
            "invitation-invalid",
            f"{location} is not an invitation, as it is not valid TOML: {error}",
            hint=hint,
        ) from error
    if document.get("format") != FORMAT:
        raise UsageError(
            "invitation-invalid",
            f'{location} is not an invitation, as it has no line format = "{FORMAT}"',
            hint=hint,
        )
    if unknown := sorted({*document} - {"format", "trust", *SETTINGS}):
        raise UsageError(
            "invitation-too-new",
            f"{location}: unknown key {unknown[0][:40]!r}",
            hint="upgrade imagefactory to the version of your center, or a newer one",
        )
    invitation = Invitation(
        catalog=_text(document, "catalog", location),
        site=_text(document, "site", location) or SITES[0],
        sif_folder=_text(document, "sif-folder", location),
        keys=tuple(_grant(key) for key in parse_trust(data.decode(), location).keys),
        mirrors=_text(document, "catalog-mirrors", location),
        center=_text(document, "center", location),
        container=_text(document, "container", location),
    )
    for repository in (invitation.catalog, *listed(invitation.mirrors)):
        if not _PATH.fullmatch(repository):
            catalog_repository(repository)
    if invitation.site not in SITES:
        raise UsageError(
            "site-unknown",
            f"{location}: unknown site {invitation.site[:40]!r}",
            hint=f"known sites: {', '.join(SITES)}",
        )
    if invitation.container not in ("", *CONTAINERS):
        raise UsageError(
            "setting-invalid",
            f"{location}: unknown container program {invitation.container[:40]!r}",
            hint=f"known: {', '.join(CONTAINERS)}",
        )
    if invitation.center and not CENTER.fullmatch(invitation.center):
        raise UsageError(
            "invitation-invalid", f"{location}: invalid center name {invitation.center[:40]!r}", hint=hint
        )
    if invitation.sif_folder and not SIF_DIRECTORY.fullmatch(invitation.sif_folder):
        raise UsageError(
            "invitation-invalid",
            f"{location}: sif-folder {invitation.sif_folder[:80]!r} "
            "is not an absolute path or osdf:/// address",
            hint=hint,
        )
    if not invitation.keys:
        raise UsageError("invitation-without-keys", f"{location} has no key to trust", hint=hint)
    return invitation


def _text(document: Mapping[str, Any], name: str, location: str) -> str:
    value = document.get(name, "")
    if not isinstance(value, str) or not value.isascii() or not value.isprintable():
        raise UsageError(
            "invitation-invalid",
            f"{location}: {name} is not printable ASCII text",
            hint="ask your center for a new one; imagefactory site invite writes it",
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationSettings:
    """The result of accepting an invitation: `text` is the new settings file, `changes` has a line for each
    change.

    `fresh` are newly trusted keys. `before` are the names and ids of the keys that they replace: keys with
    the same name, or expired keys for the same catalog. If both have values, the key of the site has changed.
    """

    text: str
    changes: tuple[str, ...]
    fresh: tuple[TrustGrant, ...]
    before: tuple[tuple[str, str], ...]

    @property
    def changed(self) -> bool:
        return bool(self.fresh and self.before)


def join_center(
    text: str,
    invitation: Invitation,
    others: Sequence[Mapping[str, Any]],
    location: str,
    now: datetime,
    *,
    moved: bool = False,
) -> InvitationSettings:
    """Return a person's settings file with the missing settings added. The rest is unchanged.

    `others` are the documents of other settings files, such as the site's; their settings are not repeated.
    `moved` means that the person confirms a new address for a center joined before. Raises UsageError with
    the text to write manually if the file cannot be edited.
    """
    invitation_table = tomllib.loads(text)
    known: dict[str, Any] = {
        key: value for other in reversed((invitation_table, *others)) for key, value in other.items()
    }
    sheet = _TomlText(text)
    changes: list[str] = []
    fresh: list[TrustGrant] = []
    expected = dict(invitation_table)
    for name, value in invitation.settings.items():
        if known.get(name) != value:
            changes.append(f"{name} = {value}" + (f"  (was {known[name]})" if name in known else ""))
            sheet.put(name, json.dumps(value))
            expected[name] = value
    mine = [dict(row) for row in invitation_table.get("trust", [])]
    rows = [*mine, *(dict(row) for other in others for row in other.get("trust", []))]
    before = _existing_text(rows, invitation, same_place=moved or known.get("catalog") == invitation.catalog)
    check_not_retired(rows, invitation, location, now)
    for grant in invitation.keys:
        same = next((row for row in rows if row.get("keyid") == grant.key.keyid), None)
        named = next((row for row in rows if row.get("name") == grant.key.name), None)
        if same and (same.get("from"), same.get("until")) == (grant.since, grant.until):
            continue
        fresh += [] if same else [grant]
        changes.append(f"key {grant.key.name}, from {grant.since} until {grant.until}")
        values = {key: value for key, value in row_values(grant).items() if key != "evidence"}
        row_index = next((n for n, row in enumerate(mine) if row is (same or named)), None)
        if row_index is None:
            sheet.append(format_row(grant))
            mine.append(tomllib.loads(format_row(grant))["trust"][0])
        else:
            sheet.put_row(row_index, values)
            mine[row_index].update(
                tomllib.loads("\n".join(f"{key} = {value}" for key, value in values.items()))
            )
    text = sheet.text
    if mine:
        expected["trust"] = mine
    if _load_invitation(text) != expected:
        lines = [f"{name} = {json.dumps(value)}" for name, value in invitation.settings.items()]
        lines += [line for grant in invitation.keys for line in format_row(grant).splitlines()]
        raise UsageError(
            "settings-not-editable",
            f"imagefactory cannot edit {location} safely",
            hint="add these lines to it, the first ones above all tables:\n"
            + "\n".join(f"    {line}" for line in lines),
        )
    return InvitationSettings(text=text, changes=tuple(changes), fresh=tuple(fresh), before=tuple(before))


def _existing_text(
    rows: Sequence[Mapping[str, Any]], invitation: Invitation, *, same_place: bool
) -> list[tuple[str, str]]:
    """Return the trusted keys that the keys in an invitation would replace."""
    believed = {row["keyid"] for row in rows}
    ends = {grant.key.keyid: first_moment(grant.until) for grant in invitation.keys}
    names = {grant.key.name for grant in invitation.keys if grant.key.keyid not in believed}
    others = [
        row for row in rows if row["keyid"] not in ends or ends[row["keyid"]] < first_moment(row["until"])
    ]
    return [(row["name"], row["keyid"]) for row in others if same_place or row["name"] in names]


def check_not_retired(
    rows: Iterable[Mapping[str, Any]], invitation: Invitation, location: str, now: datetime
) -> None:
    """Raise UsageError if the invitation trusts a retired key: it is not signed, so it cannot make the key
    valid again.
    """
    for row in rows:
        grant = next(
            (candidate for candidate in invitation.keys if candidate.key.keyid == row["keyid"]), None
        )
        if (
            grant
            and first_moment(row["until"]) <= now
            and first_moment(grant.until) > first_moment(row["until"])
        ):
            raise UsageError(
                "invitation-revives-key",
                f"the key '{row['name']}' is retired in {location}, but this invitation would trust it again",
                hint="ask your center for its current invitation; if this is intended, delete that row first",
            )


def _load_invitation(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


class _TomlText:
    """A TOML text in which plain `key = value` lines can be changed. `site join` checks all other lines."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n" if self.lines else ""

    def put(self, name: str, value: str) -> None:
        """Replace the line of a key above all tables, or add a line below the last one there."""
        end = next((n for n, line in enumerate(self.lines) if _HEADER.match(line)), len(self.lines))
        if not self._put(range(end), name, value):
            numbers = (n for n in range(end) if self.lines[n].strip() and not self.lines[n].startswith("#"))
            self.lines.insert(max(numbers, default=-1) + 1, f"{name} = {value}")

    def put_row(self, number: int, values: Mapping[str, str]) -> None:
        """Replace or add lines in row `number` of [[trust]]."""
        heads = [n for n, line in enumerate(self.lines) if re.match(r"\s*\[\[\s*trust\s*\]\]", line)]
        if number >= len(heads):
            return
        later = (n for n in range(heads[number] + 1, len(self.lines)) if _HEADER.match(self.lines[n]))
        end = next(later, len(self.lines))
        for name, value in values.items():
            self._put(range(heads[number], end), name, value)

    def append(self, row: str) -> None:
        self.lines += ["", *row.splitlines()] if self.lines else row.splitlines()

    def _put(self, location: range, name: str, value: str) -> bool:
        line = re.compile(rf"(\s*{re.escape(name)}\s*=\s*)(\"[^\"]*\"|'[^']*'|[^\s#]+)(.*)")
        for number in location:
            if match := line.fullmatch(self.lines[number]):
                self.lines[number] = f"{match[1]}{value}{match[3]}"
                return True
        return False
