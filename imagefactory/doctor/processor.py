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
        remedy = f"build and run on a machine of {' or '.join(MACHINES.values())}"
        yield Diagnosis("platform", Health.MISSING, f"{detail}: images are for {', '.join(MACHINES)}", remedy)
    elif kind != "glibc" or numbers < OLDEST_GLIBC:
        detail += ": the tools' wheels are made for glibc 2.28 or newer"
        yield Diagnosis(
            "platform", Health.WARNING, detail, "use a machine with a newer glibc, such as Debian 12"
        )
    else:
        yield Diagnosis("platform", Health.OK, detail)
    for probe in facts.emulated:
        note = f" (only images for {probe.name} need it)"
        yield probe.judge(Health.WARNING, use=probe.name, note=note)
