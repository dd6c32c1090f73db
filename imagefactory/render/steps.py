"""What happens inside an image while it is built by hand: one list for the Dockerfile and the definition.

Pure. The steps leave under the prefix what the assemble engine puts there: the packages of the
lock, their scripts, byte code, and the environment's own few files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from imagefactory.lock.pypi import MACHINES
from imagefactory.model import Definition
from imagefactory.render.define import interpreter, pyvenv_cfg, venv_links
from imagefactory.render.quoting import word, words

REQUIREMENTS = "/opt/requirements.txt"
"""Where the lock lies while it is installed. Not under /tmp: apptainer hides that while it builds."""

PIP = "/opt/pip"
"""The environment that holds pip, and is gone afterwards: the images carry no pip."""

SITE = "/mnt"
"""Where the settings of the machine that builds lie while packages are fetched. Every base has that
folder, empty, so nothing of the base is covered and nothing has to be made for it."""

SITE_FILES = (("pip.conf", "PIP_CONFIG_FILE"), ("ca.pem", "PIP_CERT"))
"""What may lie there, and the variable that tells pip of it. Each may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Shell commands with one purpose.

    `comment` is what a reader sees, one line an entry. `built` is true where the step makes the
    environment, false where it prepares what the image runs on: a Dockerfile throws away the stage
    of the former. Commands run under `set -eu`; a line end inside one means a blank. `site` is true
    where they read SITE_FILES.
    """

    comment: tuple[str, ...]
    built: bool
    commands: tuple[str, ...]
    site: bool = False


def steps(definition: Definition) -> tuple[Step, ...]:
    """The steps from a base to the environment, in order."""
    target, prefix = definition.target, definition.prefix
    python = interpreter(definition)
    architecture = target.platform.removeprefix("linux/")  # dpkg and OCI use the same words
    is_architecture = f'test "$(dpkg --print-architecture)" = {word(architecture)}'
    if definition.base.image:  # of any distribution
        is_architecture = f'test "$(uname -m)" = {word(MACHINES[target.platform])}'
    install = Step(
        comment=(
            "What the packages need at run time: Python with its headers, a C compiler for those that",
            "compile kernels, certificates. The factory's own base has all of it and skips this.",
        ),
        built=False,
        commands=(_install(definition.base.packages),),
    )
    return (
        *((install,) if definition.base.packages else ()),
        Step(
            comment=(
                f"The lock fits Python {target.python} on {target.platform} alone: a misfit stops here.",
            ),
            built=False,
            commands=(
                _insist(
                    is_architecture,
                    f"this lock is for {target.platform}: build with --platform {target.platform} "
                    "or on such a machine",
                ),
                _insist(
                    f"test -x {word(python)}",
                    f"this lock is for Python {target.python}, but the base has no {python}: "
                    "choose another BASE",
                ),
                *((_has_venv(python),) if definition.base.image else ()),
            ),
        ),
        Step(
            comment=(f"An empty virtual environment at {prefix}, without pip.",),
            built=True,
            commands=(
                f"mkdir -p {word(prefix + '/bin')} {word(definition.site_packages)}",
                *(f"ln -s {words((to, path))}" for path, to in venv_links(definition)),
                "\n    ".join(
                    ("printf '%s\\n'", *(word(text) for text in pyvenv_cfg(definition).splitlines()))
                )
                + f"\n    > {word(prefix + '/pyvenv.cfg')}",
            ),
        ),
        Step(
            comment=(
                "Every package of the lock and nothing else: wheels only, each with the sha256 of the lock.",
                "Byte code is made here, since nobody can write it later. Some packages carry files that are",
                "no Python of this version: compileall names them and they stay as they are.",
            ),
            built=True,
            site=True,
            commands=(
                *(_tell(f"{SITE}/{file}", variable) for file, variable in SITE_FILES),
                f"{word(python)} -m venv {word(PIP)}",
                f"{word(PIP + '/bin/pip')} --python {word(prefix + '/bin/python')} install\n"
                "    --require-hashes --no-deps --only-binary :all:\n"
                "    --no-cache-dir --no-compile --disable-pip-version-check --root-user-action ignore\n"
                f"    --requirement {word(REQUIREMENTS)}",
                f"{word(prefix + '/bin/python')} -m compileall -q -j 0\n"
                f"    --invalidation-mode unchecked-hash {word(definition.site_packages)} || true",
                f"test -n \"$(find {word(definition.site_packages)} -name '*.pyc' -print -quit)\"",
                f"rm -r {words((PIP, REQUIREMENTS))}",
            ),
        ),
    )


def _install(packages: Iterable[str]) -> str:
    """A command that installs Debian's `packages` unless all of them are there."""
    names = words(sorted(packages))
    return (
        f"if ! dpkg --status {names} > /dev/null 2>&1; then\n"
        "    apt-get update;\n"
        "    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends\n"
        f"        {names};\n"
        "    rm -rf /var/lib/apt/lists/*;\n"
        "fi"
    )


def _has_venv(python: str) -> str:
    """Of the factory's own bases it is known; many images have a Python without it."""
    return _insist(
        f"{word(python)} -I -c 'import ensurepip, venv' 2> /dev/null",
        f"pip installs into a virtual environment, and the base's {python} cannot make one (Debian: "
        "python3-venv): choose another base, or build with `imagefactory build --engine assemble`",
    )


def _tell(path: str, variable: str) -> str:
    """A command that sets `variable` to `path` if there is such a file."""
    return f"if test -e {word(path)}; then export {variable}={word(path)}; fi"


def _insist(test: str, message: str) -> str:
    return f"{test} || {{\n    echo {word(message)} >&2;\n    exit 1;\n}}"
