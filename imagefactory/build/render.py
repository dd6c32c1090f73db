"""The templates' environment, and the lines that both kinds of file show alike.

The delimiters are `[[ ]]`, `[% %]` and `[# #]`, so that `{{ }}` is always Apptainer's own. Templates
are files of this package; a recipe's text is only ever a value.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagefactory.build.definition import entrypoint, framework_package, new_places
from imagefactory.build.steps import (
    FILTERS,
    INPUT,
    LARGEST_COPY,
    OWN,
    SITE,
    copies,
    own_wheels,
    require_quotable,
    steps,
)
from imagefactory.gpu.builds import platform_of
from imagefactory.gpu.capability import AMD64
from imagefactory.lock.pypi.requirements import from_files, from_indexes
from imagefactory.model import BuildSpec
from imagefactory.oci.layout import reference
from imagefactory.progress import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - no HTML here; `insist` lets out only what is quoted
        finalize=require_quotable,
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#",
        comment_end_string="#]",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(FILTERS)
    return environment


def fill(template: str, **values: Any) -> str:
    """The text of `template` (a file name in templates/) with `values`.

    Raises UsageError for a value that cannot be written there.
    """
    return _environment().get_template(template).render(values)


def named_indexes(definition: BuildSpec) -> str:
    """The names of the package indexes beside the usual one, as a sentence has them; empty for none."""
    return " and ".join(sorted(set(from_indexes(definition.lock.origins).values())))


def large_wheels(definition: BuildSpec) -> tuple[tuple[str, str], ...]:
    """(path from the factory's root on, size) of wheels too large to be copied into the target's folder."""
    paths = from_files(definition.lock.origins)
    large = (wheel for wheel in own_wheels(definition) if wheel.size > LARGEST_COPY)
    return tuple((paths[wheel.name].removeprefix("./"), format_bytes(wheel.size)) for wheel in large)


def facts(definition: BuildSpec) -> str:
    """One line for the reader: what is in the image, how many packages and bytes are fetched for it."""
    target, lock = definition.target, definition.lock
    size = format_bytes(sum(package.size for package in lock.packages))
    fetched = f"{len(lock.wheels)} packages, {size} of wheels"
    if lock.conda:
        count = len(lock.wheels)
        wheels = f" and {count} wheel{'' if count == 1 else 's'}" if count else ""
        fetched = f"{len(lock.conda)} conda packages{wheels}, {size}"
    return (
        f"{target.framework} {framework_package(target, lock).version} for {platform_of(target.cuda)} "
        f"and Python {target.python} on {target.platform}: {fetched}."
    )


# --- A Definition as an Apptainer definition file
# spython turns it into a Dockerfile that builds: it makes each command line of %post a RUN of its own and
# knows no build arguments, so every step is one command, and the base stands where it is used.


def render_apptainer(definition: BuildSpec, *, bootstrap: str = "docker", place: str = "") -> str:
    """The text of apptainer.def, on the definition's public base, or on what `bootstrap` finds at `place`.

    Raises UsageError for a value that it cannot hold.
    """
    return fill(
        "apptainer.def.jinja",
        target=definition.target,
        base=definition.base,
        bootstrap=bootstrap,
        place=place or definition.base.public,
        # apptainer gives everybody their own home, or none.
        environment=tuple(pair for pair in definition.environment if pair[0] != "HOME"),
        labels=definition.labels,
        facts=facts(definition),
        indexes=named_indexes(definition),
        bring=large_wheels(definition),
        start=definition.start,
        own=new_places(definition),
        folder=OWN,
        conda=bool(definition.lock.conda),
        copied=copies(definition),
        site=SITE,
        steps=steps(definition),
    )


# --- A Definition as a Dockerfile, for BuildKit and for buildah alike (no `# syntax=` line, which is
# fetched)
# The package index and the certificates of the machine that builds come as secrets: mounted while the
# packages are fetched, in no layer, no history and no cache. `instructions` says what the file must come
# to; the text is another way to the same list, and tests parse it with a public parser and compare.


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerfileInstruction:
    """One instruction. `value` is its text with single blanks and no line ends, without its `flags`
    (`--from=build`); `pairs` the names and plain values of an ENV or LABEL, which then has no `value`."""

    keyword: str
    flags: tuple[str, ...] = ()
    value: str = ""
    pairs: tuple[tuple[str, str], ...] = ()


def instructions(definition: BuildSpec) -> tuple[DockerfileInstruction, ...]:
    """The instructions of the Dockerfile, in order. Pure, and apart from the template on purpose."""
    prefix = definition.prefix

    def runs(*, built: bool) -> list[DockerfileInstruction]:
        return [
            DockerfileInstruction(
                keyword="RUN",
                flags=tuple(f"--mount=type=secret,id={file},target={SITE}/{file}" for file in step.secrets),
                value=" ".join("; ".join(("set -eu", *step.commands)).split()),
            )
            for step in steps(definition)
            if step.built is built
        ]

    return (
        DockerfileInstruction(keyword="ARG", value=f"BASE={definition.base.public}"),
        DockerfileInstruction(keyword="FROM", value="${BASE} AS base"),
        *(_of_pulled_base(definition) if definition.base.image else ()),
        DockerfileInstruction(keyword="ENV", pairs=_variables(definition)),
        *runs(built=False),
        DockerfileInstruction(keyword="FROM", value="base AS build"),
        DockerfileInstruction(keyword="COPY", value=" ".join(_copied(definition))),
        *runs(built=True),
        DockerfileInstruction(keyword="FROM", value="base"),
        DockerfileInstruction(keyword="LABEL", pairs=definition.labels),
        DockerfileInstruction(keyword="COPY", flags=("--from=build",), value=f"{prefix} {prefix}"),
        *_of_start(definition),
    )


def _of_start(definition: BuildSpec) -> tuple[DockerfileInstruction, ...]:
    start, started = definition.start, entrypoint(definition)
    values = {
        "COPY": f"{OWN}/ /" if definition.files else "",
        "WORKDIR": "" if start.workdir == "/" else start.workdir,
        "USER": start.user,
        "ENTRYPOINT": json.dumps(started) if started else "",
        "CMD": json.dumps(start.command),
    }
    return tuple(
        DockerfileInstruction(keyword=keyword, value=value) for keyword, value in values.items() if value
    )


def _copied(definition: BuildSpec) -> tuple[str, ...]:
    """The words of the COPY: one file and its new name, or several and their folder."""
    files = copies(definition)
    return files[0] if len(files) == 1 else (*(name for name, _ in files), f"{INPUT}/")


def _of_pulled_base(definition: BuildSpec) -> tuple[DockerfileInstruction, ...]:
    """What takes back of an image's config what would hold for all that is built on it."""
    path = dict(definition.environment).get("PATH", "")
    return (
        DockerfileInstruction(keyword="USER", value="0"),
        DockerfileInstruction(keyword="WORKDIR", value="/"),
        DockerfileInstruction(keyword="ENTRYPOINT", value="[]"),
        DockerfileInstruction(keyword="ENV", value=f"PATH={path}:${{PATH}} PYTHONHOME= PYTHONPATH="),
    )


def _variables(definition: BuildSpec) -> tuple[tuple[str, str], ...]:
    """The environment; on a pulled base PATH was set before, with what the base has there."""
    pulled = bool(definition.base.image)
    return tuple(pair for pair in definition.environment if not (pulled and pair[0] == "PATH"))


def render_dockerfile(definition: BuildSpec) -> str:
    """The text of the Dockerfile. Raises UsageError for a value that it cannot hold."""
    target = definition.target
    rows = steps(definition)
    return fill(
        "Dockerfile.jinja",
        target=target,
        base=definition.base,
        environment=_variables(definition),
        labels=definition.labels,
        prefix=definition.prefix,
        path=dict(definition.environment).get("PATH", ""),
        nvidia="NVIDIA_VISIBLE_DEVICES" in dict(definition.environment),
        tag=reference(target),
        docker_build=f"docker build{'' if target.platform == AMD64 else f' --platform {target.platform}'}",
        facts=facts(definition),
        indexes=named_indexes(definition),
        bring=large_wheels(definition),
        entrypoint=entrypoint(definition),
        init=entrypoint(definition) != definition.start.entrypoint,
        start=definition.start,
        own=f"{OWN}/" if definition.files else "",
        conda=bool(definition.lock.conda),
        copied=_copied(definition),
        prepare=[step for step in rows if not step.built],
        make=[step for step in rows if step.built],
        site=SITE,
    )
