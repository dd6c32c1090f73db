"""What an engine made of a target, seen from inside: one small program (lister.py) looks around in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tests.services.factory import Factory

RUNNERS = {"assemble": "unshare", "docker": "docker", "apptainer": "apptainer"}
# What may differ, and why.
MADE_BY_THE_INSTALLER = ("INSTALLER", "RECORD", "REQUESTED")  # in a package's .dist-info
BYTE_CODE = ".pyc"  # pip leaves it to compileall, assemble makes it wheel by wheel


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one engine made: the JSON of its build, and lister.py's of its image."""

    built: Mapping[str, Any]
    inside: Mapping[str, Any]
    locked: frozenset[str]
    """The names of the target's packages, as `show` tells them."""

    def files(self) -> dict[str, tuple[str, bool, str]]:
        """Every file but byte code and what an installer notes of itself: kind, executable, content.

        Of console scripts, which each installer words for itself, only that they are there and can run.
        """
        found = {}
        for path, (kind, executable, content) in self.inside["files"].items():
            place = PurePosixPath(path)
            if place.suffix == BYTE_CODE:
                continue
            if place.name in MADE_BY_THE_INSTALLER and place.parent.name.endswith(".dist-info"):
                continue
            script = place.parent == PurePosixPath("bin") and kind == "file" and path in self.console_scripts
            found[path] = (kind, executable, "console script" if script else content)
        return found

    @property
    def console_scripts(self) -> frozenset[str]:
        return frozenset(self.inside["console_scripts"])


def see(factory: Factory, target: str, engine: str) -> Seen:
    # The setting makes `run` start the .sif that apptainer built, not one converted from another's image.
    factory = replace(factory, extra={**factory.extra, "IMAGEFACTORY_ENGINE": engine})
    built = factory.build(target, "--engine", engine)
    tools = Path(__file__).parent
    command = ("run", "--runner", RUNNERS[engine], "--mount", f"{tools}:/mnt", target)
    inside = factory.run(*command, "--", "python", "-B", "/mnt/lister.py").stdout
    locked = json.loads(factory.run("show", "--json", target).stdout)["packages"]
    names = frozenset(package["name"] for package in locked)
    return Seen(built=built, inside=json.loads(inside), locked=names)
