"""Combinations that fail or compute wrong results: versions of libraries against capabilities.

The rules are in `knowledge/known_bad.toml`, each with its source. A matching rule is a warning or, with some
effects (`ANSWERS`), the answer. Without a matching rule there may still be a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.drivers import driver_version
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.values import Compatibility, ScanResult

ANSWERS = {"does not run": Compatibility.NO, "runs in part": Compatibility.PARTLY}
"""The effects that are an answer instead of a warning: they apply whatever code there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLibrary:
    """A library in rules, and where its version is read. `files` may be empty."""

    name: str
    packages: tuple[str, ...]
    files: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBadRule:
    """One row of known_bad.toml. `capabilities` are ranges or AMD processors, one of which must match; empty
    is every GPU.

    `drivers` is a range too; such a rule matches only a known driver.
    """

    id: str
    needs: tuple[tuple[str, str], ...]
    capabilities: tuple[str, ...]
    drivers: str
    effect: str
    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBadMatch:
    """A rule that matches, and its sentence with the versions in the query."""

    id: str
    effect: str
    text: str
    source: str

    def __str__(self) -> str:
        return self.text


@cache
def components() -> tuple[RuleLibrary, ...]:
    """Return all components in known_bad.toml, in the order of the file."""
    return tuple(
        RuleLibrary(name=row["name"], packages=tuple(row["packages"]), files=row.get("files", ""))
        for row in read_table("known_bad")["component"]
    )


@cache
def rules() -> tuple[KnownBadRule, ...]:
    """Return all rules in known_bad.toml, in the order of the file."""
    return tuple(
        KnownBadRule(
            id=row["id"],
            needs=tuple(sorted(row["needs"].items())),
            capabilities=tuple(row.get("capabilities", ())),
            drivers=row.get("drivers", ""),
            effect=row["effect"],
            text=row["text"],
            source=row["source"],
        )
        for row in read_table("known_bad")["rule"]
    )


def find_rule(word: str) -> KnownBadRule | None:
    """Return the rule of a claim `known-bad:ID`, None for an unknown rule."""
    return next((rule for rule in rules() if f"known-bad:{rule.id}" == word), None)


def versions_of(packages: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the version of each component, for packages (name, version) in locks and scans.

    If two packages have one component, the one that known_bad.toml names first is used.
    """
    known = dict(packages)
    names = {}
    for component in components():
        name = next((package for package in component.packages if package in known), None)
        if name is not None:
            names[component.name] = known[name]
    return names


def versions_in(contents: ScanResult) -> dict[str, str]:
    """Return the version of each component in a scan, from packages or else from file names."""
    installed = versions_of((package.name, package.version) for package in contents.packages)
    for component in components():
        if component.files and component.name not in installed:
            names = [re.fullmatch(component.files, name) for name in contents.toolkit]
            versions = [package[1] for package in names if package]
            if versions:
                installed[component.name] = max(versions, key=len)
    return installed


def matching_rules(
    versions: Mapping[str, str], capability: Capability, driver: str = ""
) -> tuple[KnownBadMatch, ...]:
    """Return the matching rules in the order of the table. `versions` are by component.

    Without a `driver`, rules for only some drivers do not match, since another driver may be chosen.
    """
    return tuple(
        KnownBadMatch(id=rule.id, effect=rule.effect, text=rule.text.format_map(versions), source=rule.source)
        for rule in rules()
        if _rule_applies(rule, str(capability), driver)
        and all(name in versions and _within(versions[name], range_) for name, range_ in rule.needs)
    )


def worst_answer(faults: Iterable[KnownBadMatch]) -> KnownBadMatch | None:
    """Return the worst fault that is an answer, None if all are warnings."""
    answering = [fault for fault in faults if fault.effect in ANSWERS]
    return min(answering, key=lambda fault: list(ANSWERS).index(fault.effect), default=None)


def _rule_applies(rule: KnownBadRule, capability: str, driver: str) -> bool:
    there = not rule.capabilities or any(
        capability == limit if limit.startswith("gfx") else _within(capability, limit)
        for limit in rule.capabilities
    )
    return there and (not rule.drivers or (bool(driver) and _within(driver_version(driver), rule.drivers)))


@lru_cache(maxsize=1024)
def _within(version: str, specifiers: str) -> bool:
    """Return whether a version is in a range.

    Versions that PEP 440 does not allow (conda) are in no range.
    """
    try:
        return SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
