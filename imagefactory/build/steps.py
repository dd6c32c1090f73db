"""The steps of a manual build inside an image: one list for the Dockerfile and the definition file.

No I/O. The steps create the same files under the prefix as the assemble engine: the packages of the lock,
their scripts, byte code, and the environment's own few files. A lock of wheels becomes a virtual environment
on the base's Python. Conda packages have their own Python; the base's Python only runs the program that
links them.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

from imagefactory.build.definition import (
    HOME,
    forward_links,
    interpreter,
    pyvenv_cfg,
    rank_wheels,
    venv_links,
)
from imagefactory.errors import UsageError
from imagefactory.gpu.capability import MACHINES
from imagefactory.lock.files import explicit
from imagefactory.lock.pypi.requirements import from_files
from imagefactory.model import BuildSpec, LockedCondaPackage, LockedWheel

# Recipes have allow-lists of their own; this is the second check. The templates print only values that
# passed one of these functions. Single quotes do the same in a POSIX shell and in a Dockerfile's ENV and
# LABEL: no `$`, backslash or escape inside them. A Dockerfile cannot quote a line end, so control
# characters are rejected.


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LABEL = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")
_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]*")


class QuotedText(str):
    """A text that is already quoted for its file."""

    __slots__ = ()


def _reject(value: str, reason: str) -> UsageError:
    return UsageError(
        "value-not-quotable",
        f"{value!r} cannot be in a Dockerfile or definition: {reason}",
        hint="change this value in the recipe",
    )


def single_line(value: str) -> QuotedText:
    """Return `value` as part of a comment or another line of text.

    Rejects characters that are not printable (all line ends, control and direction characters), a backslash
    at the end (it would join the next line) and `{{` (Apptainer's own substitution).
    """
    if not value.isprintable():
        raise _reject(value, "it has a line end or a control character")
    if value.endswith("\\"):
        raise _reject(value, "a backslash at its end would join it with the next line")
    if "{{" in value:
        raise _reject(value, "Apptainer replaces text in '{{ }}'")
    return QuotedText(value)


def shell_word(value: str) -> QuotedText:
    """Return `value` as one word of a shell, or as the value of an ENV or LABEL."""
    return QuotedText(shlex.quote(single_line(value)))


def shell_words(values: Iterable[str]) -> QuotedText:
    """Return words of a shell, separated by spaces."""
    return QuotedText(" ".join(shell_word(value) for value in values))


def variable(name: str) -> QuotedText:
    """Return the name of an environment variable."""
    if not _NAME.fullmatch(name):
        raise _reject(name, "a variable's name is letters, digits and '_', no digit first")
    return QuotedText(name)


def label(key: str) -> QuotedText:
    """Return the key of a label: dotted lower-case words."""
    if not _LABEL.fullmatch(key):
        raise _reject(key, "a label's key is lower-case words with '.', '-' or '_' between them")
    return QuotedText(key)


def trimmed(value: str) -> QuotedText:
    """Return the value of a label in `%labels`, which has no quotes and removes spaces at both ends."""
    if value != value.strip():
        raise _reject(value, "spaces at its ends would be lost")
    return single_line(value)


def image_reference(value: str) -> QuotedText:
    """Return an image reference such as docker.io/library/debian:12-slim."""
    if not _REFERENCE.fullmatch(value):
        raise _reject(value, "an image reference is name:tag or name@sha256:digest")
    return QuotedText(value)


def array(values: Iterable[str]) -> QuotedText:
    """Return the exec form of CMD: a JSON array, which is not read by a shell."""
    return QuotedText(json.dumps([single_line(value) for value in values], ensure_ascii=False))


def pairs(values: Iterable[tuple[str, str]], indent: int) -> QuotedText:
    """Return the names and values of one ENV, one in each line."""
    return _assignments(((variable(name), value) for name, value in values), indent)


def labels(values: Iterable[tuple[str, str]], indent: int) -> QuotedText:
    """Return the keys and values of one LABEL, one in each line."""
    return _assignments(((label(key), value) for key, value in values), indent)


def _assignments(values: Iterable[tuple[QuotedText, str]], indent: int) -> QuotedText:
    return QuotedText(f" \\\n{' ' * indent}".join(f"{name}={shell_word(value)}" for name, value in values))


def run(commands: Iterable[str]) -> QuotedText:
    """Return shell commands as one RUN, with a continuation on all lines but the last.

    A line end inside a command means a space. The commands are our own text; values inside them are quoted.
    """
    lines = (" \\\n    ".join(map(single_line, command.split("\n"))) for command in commands)
    return QuotedText("; \\\n    ".join(lines))


FILTERS = {
    "array": array,
    "label": label,
    "labels": labels,
    "line": single_line,
    "pairs": pairs,
    "reference": image_reference,
    "run": run,
    "trimmed": trimmed,
    "variable": variable,
    "word": shell_word,
    "words": shell_words,
}


def require_quotable(value: object) -> QuotedText:
    """Return a value that a template prints. Raises TypeError unless it is QuotedText."""
    if not isinstance(value, QuotedText):
        raise TypeError(f"a template prints {value!r} without a filter of imagefactory.build.steps")
    return value


REQUIREMENTS = "/opt/requirements.txt"
"""The path of the lock during installation. It is not under /tmp, which apptainer hides in a build."""

INPUT = "/opt/install"
"""The directory of a conda target's files during installation."""

LINKED = f"{INPUT}/linked.json"
"""The output of the linker, with the scripts to run."""

INSTALLER, LINKER = "install.py", "rattler.txt"
"""Names in a conda target's directory: the program that fetches and links, and its requirements."""

OWN = "files"
"""The subdirectory of a target's directory for project files, by their paths inside."""

WHEELS = "wheels"
"""The subdirectory of a target's directory for copies of the project's own wheels."""

LARGEST_COPY = 50_000_000
"""The most bytes of a wheel to copy into a target's directory. Larger ones burden a Git repository."""

PIP = "/opt/pip"
"""The environment of pip, deleted afterwards: the images have no pip."""

PART = f"{PIP}/part.txt"
"""The requirements file of one run of pip."""

SITE = "/mnt"
"""The directory of the building machine's settings while packages are fetched.

Every base has this directory, and it is empty, so the mount hides no file.
"""

PIP_CONF, CERTIFICATES, CHANNELS = "pip.conf", "ca.pem", "channels.json"
"""Optional files in SITE: pip's settings, certificates, and the addresses of conda channels.

The last one is `{"mirrors": {channel: address}, "auth": {host: ...}}`.
"""

OLDEST_PYTHON = (3, 10)
"""The oldest Python that rattler's wheels support."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellStep:
    """Shell commands with one purpose.

    `comment` is for readers, one line for each entry. `built` is true if the step creates the environment,
    in a stage that a Dockerfile discards. It is false if the step prepares the image itself. Commands run
    under `set -eu`. A line end inside a command means a space. `secrets` are the files of SITE that they
    read.
    """

    comment: tuple[str, ...]
    built: bool
    commands: tuple[str, ...]
    secrets: tuple[str, ...] = ()


def copies(definition: BuildSpec) -> tuple[tuple[str, str], ...]:
    """Return pairs of a file in the target's directory and its path while the steps run."""
    local = tuple(
        (f"{WHEELS}/{wheel.filename}", f"{INPUT}/{wheel.filename}") for wheel in own_wheels(definition)
    )
    if not definition.lock.conda:
        return (("requirements.txt", _requirements(definition)), *local)
    wheels = ("requirements.txt",) if definition.lock.wheels else ()
    names = (INSTALLER, *explicit_lists(definition), LINKER, *wheels)
    return (*((name, f"{INPUT}/{name}") for name in names), *local)


def own_wheels(definition: BuildSpec) -> tuple[LockedWheel, ...]:
    """Return the wheels of the lock that are in the project."""
    paths = from_files(definition.lock.origins)
    return tuple(wheel for wheel in definition.lock.wheels if wheel.name in paths)


def _requirements(definition: BuildSpec) -> str:
    """Return the path of the requirements while they are installed, next to their wheels."""
    alone = not definition.lock.conda and not own_wheels(definition)
    return REQUIREMENTS if alone else f"{INPUT}/requirements.txt"


def explicit_lists(definition: BuildSpec) -> dict[str, str]:
    """Return file name -> conda packages of a list with address and hash, for conda's `--file`.

    There is one list, or one for each parent, the lowest first. If two packages have one path, the package
    of the earlier list keeps it, so that a parent stays unchanged.
    """
    lists: list[str] = []
    known: set[LockedCondaPackage] = set()
    for lock in (*definition.under, definition.lock):
        added = tuple(package for package in lock.conda if package not in known)
        known.update(added)
        if added:
            lists.append(explicit(replace(lock, conda=added)))
    if len(lists) == 1:
        return {"explicit.txt": lists[0]}
    return {f"explicit-{number}.txt": text for number, text in enumerate(lists, 1)}


def steps(definition: BuildSpec) -> tuple[ShellStep, ...]:
    """Return the steps from a base to the environment, in order."""
    install = ShellStep(
        comment=(
            "What the packages need at run time: Python with its headers, a C and C++ compiler for those",
            "that compile kernels, certificates, an init. The factory's own base has it all and skips this.",
        ),
        built=False,
        commands=(_install(definition.base.packages),),
    )
    home = ShellStep(
        comment=("A home for whoever has none in the image: batch systems and Kubernetes choose any user.",),
        built=False,
        commands=(f"mkdir -p {shell_word(HOME)}", f"chmod 1777 {shell_word(HOME)}"),
    )
    forward = tuple(
        ShellStep(
            comment=("NVIDIA's hook looks here for a libcuda, which programs use on older drivers.",),
            built=False,
            commands=(f"mkdir -p {shell_word(path.rpartition('/')[0])}", f"ln -s {shell_words((to, path))}"),
        )
        for path, to in forward_links(definition.base, definition.lock)
    )
    rest = _conda_steps(definition) if definition.lock.conda else _wheel_steps(definition)
    return (*((install,) if definition.base.packages else ()), home, *forward, *rest)


def _wheel_steps(definition: BuildSpec) -> tuple[ShellStep, ...]:
    target, prefix, python = definition.target, definition.prefix, interpreter(definition)
    return (
        ShellStep(
            comment=(
                f"The lock fits Python {target.python} on {target.platform} alone: a misfit stops here.",
            ),
            built=False,
            commands=(
                _is_platform(definition),
                _require(
                    f"test -x {shell_word(python)}",
                    f"this lock is for Python {target.python}, but the base has no {python}: "
                    "choose another base",
                ),
                *((_has_venv(python),) if definition.base.image else ()),
            ),
        ),
        ShellStep(
            comment=(f"An empty virtual environment at {prefix}, without pip.",),
            built=True,
            commands=(
                f"mkdir -p {shell_word(prefix + '/bin')} {shell_word(definition.site_packages)}",
                *(f"ln -s {shell_words((to, path))}" for path, to in venv_links(definition)),
                "\n    ".join(
                    ("printf '%s\\n'", *(shell_word(text) for text in pyvenv_cfg(definition).splitlines()))
                )
                + f"\n    > {shell_word(prefix + '/pyvenv.cfg')}",
            ),
        ),
        ShellStep(
            comment=(
                "Every package of the lock and nothing else: wheels only, each with the sha256 of the lock.",
                *_LAST,
                *_BYTE_CODE,
            ),
            built=True,
            secrets=(PIP_CONF, CERTIFICATES),
            commands=(
                *_SET_PIP_FILES,
                f"{shell_word(python)} -m venv {shell_word(PIP)}",
                *_pip(definition),
                *_compile(definition, definition.site_packages),
                f"rm -r {shell_words((PIP, INPUT if own_wheels(definition) else REQUIREMENTS))}",
            ),
        ),
    )


def _conda_steps(definition: BuildSpec) -> tuple[ShellStep, ...]:
    target, prefix, lock = definition.target, definition.prefix, definition.lock
    base = definition.base
    python = base.python_path if base.python or base.interpreter else "python3"  # the base may have some
    installer = shell_words((f"{PIP}/bin/python", f"{INPUT}/{INSTALLER}"))
    lists = shell_words(f"{INPUT}/{name}" for name in explicit_lists(definition))
    pip = ShellStep(
        comment=("The wheels on top of them, each with the sha256 of the lock.", *_LAST),
        built=True,
        secrets=(PIP_CONF, CERTIFICATES),
        commands=(*_SET_PIP_FILES, *_pip(definition)),
    )
    return (
        ShellStep(
            comment=(
                f"The lock fits {target.platform} alone, and its installer runs with a Python of the base: a",
                "misfit stops here.",
            ),
            built=False,
            commands=(_is_platform(definition), _runs_linker(python)),
        ),
        ShellStep(
            comment=("rattler, which links conda's packages, in an environment that is gone afterwards.",),
            built=True,
            secrets=(PIP_CONF, CERTIFICATES),
            commands=(
                *_SET_PIP_FILES,
                f"{shell_word(python)} -m venv {shell_word(PIP)}",
                f"{shell_word(PIP + '/bin/pip')} install{_PIP_OPTIONS}\n"
                f"    --requirement {shell_word(INPUT + '/' + LINKER)}",
            ),
        ),
        ShellStep(
            comment=(
                f"Every conda package of the lock and nothing else, each with its sha256, at {prefix}.",
            ),
            built=True,
            secrets=(CHANNELS, CERTIFICATES),
            commands=(
                _set_if_file(CERTIFICATES, "SSL_CERT_FILE"),
                f"{installer}\n    --explicit {lists}\n    --channels {_site(CHANNELS)}\n"
                f"    --prefix {shell_word(prefix)} > {shell_word(LINKED)}",
            ),
        ),
        ShellStep(
            comment=("Scripts that some packages bring for their installation, apart from the fetching.",),
            built=True,
            commands=(f"{installer}\n    --prefix {shell_word(prefix)} --run-scripts {shell_word(LINKED)}",),
        ),
        *((pip,) if lock.wheels else ()),
        ShellStep(
            comment=_BYTE_CODE,
            built=True,
            commands=(
                # Byte code in packages has the time of a source that this installation changed.
                *_compile(definition, f"{prefix}/lib/python{target.python}", " -f -x /tests/"),
                f"rm -r {shell_words((PIP, INPUT))}",
            ),
        ),
    )


_BYTE_CODE = (
    "Byte code is made here, since nobody can write it later. Some packages carry files that are",
    "no Python of this version: compileall names them and they stay as they are.",
)
_LAST = ("What the recipe names comes last: of two wheels with one file, its file stays.",)
_PIP_OPTIONS = (
    "\n    --require-hashes --no-deps --only-binary :all:\n"
    "    --no-cache-dir --no-compile --disable-pip-version-check --root-user-action ignore"
)


def _pip(definition: BuildSpec) -> tuple[str, ...]:
    """Return commands that install the wheels of the lock into the environment.

    If two wheels have one file, pip keeps the file of the last one. So pip runs once for the wheels of each
    rank, by which the assemble engine decides. Within a run pip installs in reverse order of names, as the
    ranks require.
    """
    local = f" --find-links {shell_word(INPUT)}" if own_wheels(definition) else ""
    requirements = _requirements(definition)
    pip = (
        f"{shell_word(PIP + '/bin/pip')} --python {shell_word(definition.prefix + '/bin/python')} "
        f"install{_PIP_OPTIONS}"
    )
    groups: dict[tuple[int, bool], list[str]] = {}
    for number, unnamed, name in sorted(rank_wheels(definition).values()):
        groups.setdefault((number, unnamed), []).append(name)
    order, commands = [*reversed(groups.values())], list[str]()
    for count, group in enumerate(order[:-1], 1):
        later = [name for names in order[count:] for name in names]
        names, option = min((group, ""), (later, " -v"), key=lambda pair: len(pair[0]))
        lines = (
            " ".join(f"-e {shell_word(f'^{name}==')}" for name in names[start : start + 4])
            for start in range(0, len(names), 4)
        )
        commands.append(
            "\n    ".join((f"grep{option}", *lines, f"{shell_word(requirements)} > {shell_word(PART)}"))
        )
        commands.append(f"{pip}\n   {local} --requirement {shell_word(PART)}")
    return (*commands, f"{pip}\n   {local} --requirement {shell_word(requirements)}")


def _compile(definition: BuildSpec, directory: str, options: str = "") -> tuple[str, str]:
    """Return commands that compile all Python files of `directory` with the environment's own Python."""
    return (
        f"{shell_word(definition.prefix + '/bin/python')} -m compileall -q -j 0{options}\n"
        f"    --invalidation-mode unchecked-hash {shell_word(directory)} || true",
        f"test -n \"$(find {shell_word(directory)} -name '*.pyc' -print -quit)\"",
    )


def _is_platform(definition: BuildSpec) -> str:
    target = definition.target
    architecture = target.platform.removeprefix("linux/")  # dpkg and OCI use the same words
    test = f'test "$(dpkg --print-architecture)" = {shell_word(architecture)}'
    if definition.base.image:  # of any distribution
        test = f'test "$(uname -m)" = {shell_word(MACHINES[target.platform])}'
    return _require(
        test,
        f"this lock is for {target.platform}: build with --platform {target.platform} or on such a machine",
    )


def _runs_linker(python: str) -> str:
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return _require(
        f"{shell_word(python)} -I -c\n"
        f"    'import sys, ensurepip, venv; sys.exit(sys.version_info < {OLDEST_PYTHON})' 2> /dev/null",
        f"rattler, which links the packages, needs a Python from {oldest} on with venv in the base (Debian: "
        "python3-venv): choose another base, or build by imagefactory build --engine assemble",
    )


def _install(packages: Iterable[str]) -> str:
    """Return a command that installs Debian packages unless all of them are installed."""
    names = shell_words(sorted(packages))
    return (
        f"if ! dpkg --status {names} > /dev/null 2>&1; then\n"
        "    apt-get update;\n"
        "    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends\n"
        f"        {names};\n"
        "    rm -rf /var/lib/apt/lists/*;\n"
        "fi"
    )


def _has_venv(python: str) -> str:
    return _require(
        f"{shell_word(python)} -I -c 'import ensurepip, venv' 2> /dev/null",
        f"pip installs into a virtual environment, and the base's {python} cannot make one (Debian: "
        "python3-venv): choose another base, or build by imagefactory build --engine assemble",
    )


def _site(file: str) -> str:
    return shell_word(f"{SITE}/{file}")


def _set_if_file(file: str, variable: str) -> str:
    """Return a command that sets `variable` to the path of a file of SITE if it exists."""
    return f"if test -e {_site(file)}; then export {variable}={_site(file)}; fi"


_SET_PIP_FILES = (_set_if_file(PIP_CONF, "PIP_CONFIG_FILE"), _set_if_file(CERTIFICATES, "PIP_CERT"))


def _require(test: str, message: str) -> str:
    return f"{test} || {{\n    echo {shell_word(message)} >&2;\n    exit 1;\n}}"
