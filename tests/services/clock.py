"""Another time for one command: a library, loaded before all others, that adds seconds to what Python reads.

OpenSSL and the programs of pools read the time in other ways and keep the machine's own.
"""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

VARIABLE = "TESTS_LATER_SECONDS"
SOURCE = f"""\
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now)
{{
    const char *later = getenv("{VARIABLE}");
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && later && clock == CLOCK_REALTIME)
        now->tv_sec += atol(later);
    return failed;
}}
"""


def build_clock(folder: Path) -> Path:
    """The library, in `folder`."""
    made = folder / "clock.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-x", "c", "-", "-o"]
    subprocess.run([*command, str(made)], input=SOURCE, text=True, check=True)
    return made


def later(clock: str, days: float) -> dict[str, str]:
    """The environment of a command that runs so many days from now. `clock` is the library's path there."""
    return {"LD_PRELOAD": clock, VARIABLE: str(round(timedelta(days=days).total_seconds()))}
