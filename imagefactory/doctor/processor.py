"""Which images' programs this machine starts: its processor's own, and by emulation those of others. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from imagefactory.doctor.facts import Diagnosis, Health, MachineFacts
from imagefactory.gpu.platforms import MACHINES

OLDEST_GLIBC = (2, 28)


def judge_processor(facts: MachineFacts) -> Iterator[Diagnosis]:
    kind, version = facts.libc
    detail = f"{facts.machine}, {kind or 'unknown C library'} {version}".rstrip()
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if facts.machine not in MACHINES.values():
        yield Diagnosis(
            name="platform",
            state=Health.MISSING,
            detail=f"{detail}: images are for {', '.join(MACHINES)}",
            remedy=f"build and run on a machine of {' or '.join(MACHINES.values())}",
        )
    elif kind != "glibc" or numbers < OLDEST_GLIBC:
        yield Diagnosis(
            name="platform",
            state=Health.WARNING,
            detail=f"{detail}: the tools' wheels are made for glibc 2.28 or newer",
            remedy="use a machine with a newer glibc, such as Debian 12",
        )
    else:
        yield Diagnosis(name="platform", state=Health.OK, detail=detail)
    for probe in facts.emulated:
        yield Diagnosis(
            name=probe.name,
            state=Health.WARNING if probe.refusal else Health.OK,
            detail=f"{probe.refusal} (only images for {probe.name} need it)"
            if probe.refusal
            else probe.found,
            remedy=probe.remedy,
            needed_for=probe.name,
        )
