"""Conda's match specs as recipes may write them, and the one spelling in which they are kept.

A subset of conda's grammar: `[channel::]name [bounds [build]]`. What conda reads in a way that surprises
(`>=1.*`, `==1.26.*`, which drop the star), alternatives (`|`), brackets (`[version=...]`) and regular
expressions (`^...$`) are left out. Rules: the match spec of conda's documentation; the spelling is that
of rattler, so that what a solver says of a package reads as the recipe does.

    numpy            numpy              numpy=1.26       numpy 1.26.*
    numpy<2          numpy <2           numpy==1.26.4    numpy ==1.26.4
    numpy 1.26.4     numpy ==1.26.4     numpy=1.26=py_0  numpy ==1.26 py_0
    jaxlib=*=*cuda*  jaxlib * *cuda*    numpy >=1, <2    numpy <2,>=1
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Where a channel that is only named lies.
CHANNEL_ROOT = "https://conda.anaconda.org"

_SEGMENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
# A host by name, as no client rewrites it: not a number, no port that https has anyway.
_HOST = (
    r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z]([a-z0-9-]*[a-z0-9])?(:(?!443/)([1-9][0-9]{0,3}|[1-5][0-9]{4}))?"
)
# Not `defaults`, which stands for several channels; no folder of one platform; no token of a person.
CHANNEL = (
    r"(?!(defaults|nodefaults|local)$|.*/(linux-64|noarch)/?$|.*/t/)"
    rf"({_SEGMENT}(/{_SEGMENT})*|https://{_HOST}(/{_SEGMENT})+/?|file://(/[A-Za-z0-9_][A-Za-z0-9._+-]*)+/?)"
)
NAME = r"_?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_])?"
_VERSION = r"([0-9]{1,4}!)?[0-9][A-Za-z0-9]*([._][A-Za-z0-9]+)*(\+[A-Za-z0-9]+([._][A-Za-z0-9]+)*)?"
_STAR = rf"{_VERSION}\.?\*"
_BOUND = rf"(==|!=|<=|>=|<|>|~=|=) ?{_VERSION}|(!=|=) ?{_STAR}"
_PLAIN = rf"({_STAR}|{_VERSION}|\*)"
_MORE = rf"(?:, ?(?:{_BOUND}|{_STAR}))*"
# Two stars in a row are no glob to rattler.
BUILD = r"(?:[A-Za-z0-9_.+]|\*(?!\*))+"
# name; name and a version that needs no operator; name=version=build; name and bounds.
SPEC = (
    rf"(?:(?P<channel>{CHANNEL.replace('$', '::').replace('/?', '')})::)?(?P<name>{NAME})"
    rf"(?: (?P<plain>{_STAR}{_MORE}|{_VERSION}|\*)(?: (?P<build>{BUILD}))?"
    rf"| ?==?(?P<exact>{_PLAIN})=(?P<exact_build>{BUILD})"
    r"| ?=(?P<any>\*)"
    rf"| ?(?P<bounds>(?:{_BOUND}){_MORE})(?: (?P<bounds_build>{BUILD}))?)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A match spec taken apart; str() gives its one spelling.

    `channel` is an address, empty for any channel; `version` the sorted bounds joined by commas, `*` or
    empty for any; `build` a build string in which `*` stands for anything, empty for any.
    """

    name: str
    version: str = ""
    build: str = ""
    channel: str = ""

    def __str__(self) -> str:
        version = self.version or ("*" if self.build else "")
        parts = [
            f"{channel_name(self.channel)}::{self.name}" if self.channel else self.name,
            version,
            self.build,
        ]
        return " ".join(part for part in parts if part)


def parse_spec(text: str) -> Spec:
    """The match spec of `text`. Raises ValueError for what recipes may not write."""
    match = re.fullmatch(SPEC, text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!a} is no match spec that recipes know")
    groups = match.groupdict(default="")
    build = groups["build"] or groups["exact_build"] or groups["bounds_build"]
    return Spec(
        name=groups["name"].lower(),
        version=_version(groups["plain"], groups["exact"], groups["bounds"]),
        build="" if build == "*" else build,
        channel=channel_address(groups["channel"]) if groups["channel"] else "",
    )


def normal_spec(text: str) -> str:
    """The one spelling of a match spec. Raises ValueError as parse_spec does."""
    return str(parse_spec(text))


def channel_address(channel: str) -> str:
    """A channel's full address without a slash at its end; a bare name lies at CHANNEL_ROOT."""
    return (channel if "://" in channel else f"{CHANNEL_ROOT}/{channel}").rstrip("/")


def channel_name(address: str) -> str:
    """The shortest way to write a channel's address: its name below CHANNEL_ROOT."""
    return address.removeprefix(f"{CHANNEL_ROOT}/")


def _version(plain: str, exact: str, bounds: str) -> str:
    alone = plain or exact
    if alone and not alone.endswith("*") and "," not in alone:
        alone = f"=={alone}"
    found = {_bound(bound.strip()) for bound in (bounds or alone).split(",")}
    return ",".join(sorted(found - {"", "*"}))


def _bound(bound: str) -> str:
    version = bound.lstrip("=!<>~")
    operator = bound.removesuffix(version)
    version = version.strip().lower()
    if version == "*" or not (operator == "=" or version.endswith("*")):
        return f"{operator}{version}"
    return f"{'!=' if operator == '!=' else ''}{version.rstrip('*').rstrip('.')}.*"
