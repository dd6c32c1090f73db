"""A Definition as a Dockerfile, for BuildKit and for buildah alike (no `# syntax=` line, which is fetched).

The package index and the certificates of the machine that builds come as secrets: mounted while the
packages are fetched, in no layer, no history and no cache. `instructions` says what the file must come
to; the text is another way to the same list, and tests parse it with a public parser and compare.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagefactory.gpu.platforms import AMD64
from imagefactory.model import Definition
from imagefactory.oci.layout import reference
from imagefactory.build.definition import entrypoint
from imagefactory.build.steps import INPUT, OWN, SITE, copies, steps
from imagefactory.build.render import facts, fill, named_indexes, wheels_to_bring


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction. `value` is its text with single blanks and no line ends, without its `flags`
    (`--from=build`); `pairs` the names and plain values of an ENV or LABEL, which then has no `value`."""

    keyword: str
    flags: tuple[str, ...] = ()
    value: str = ""
    pairs: tuple[tuple[str, str], ...] = ()


def instructions(definition: Definition) -> tuple[Instruction, ...]:
    """The instructions of the Dockerfile, in order. Pure, and apart from the template on purpose."""
    prefix = definition.prefix

    def runs(*, built: bool) -> list[Instruction]:
        return [
            Instruction(
                keyword="RUN",
                flags=tuple(f"--mount=type=secret,id={file},target={SITE}/{file}" for file in step.secrets),
                value=" ".join("; ".join(("set -eu", *step.commands)).split()),
            )
            for step in steps(definition)
            if step.built is built
        ]

    return (
        Instruction(keyword="ARG", value=f"BASE={definition.base.public}"),
        Instruction(keyword="FROM", value="${BASE} AS base"),
        *(_of_pulled_base(definition) if definition.base.image else ()),
        Instruction(keyword="ENV", pairs=_variables(definition)),
        *runs(built=False),
        Instruction(keyword="FROM", value="base AS build"),
        Instruction(keyword="COPY", value=" ".join(_copied(definition))),
        *runs(built=True),
        Instruction(keyword="FROM", value="base"),
        Instruction(keyword="LABEL", pairs=definition.labels),
        Instruction(keyword="COPY", flags=("--from=build",), value=f"{prefix} {prefix}"),
        *_of_start(definition),
    )


def _of_start(definition: Definition) -> tuple[Instruction, ...]:
    start, started = definition.start, entrypoint(definition)
    wanted = {
        "COPY": f"{OWN}/ /" if definition.files else "",
        "WORKDIR": "" if start.workdir == "/" else start.workdir,
        "USER": start.user,
        "ENTRYPOINT": json.dumps(started) if started else "",
        "CMD": json.dumps(start.command),
    }
    return tuple(Instruction(keyword=keyword, value=value) for keyword, value in wanted.items() if value)


def _copied(definition: Definition) -> tuple[str, ...]:
    """The words of the COPY: one file and its new name, or several and their folder."""
    files = copies(definition)
    return files[0] if len(files) == 1 else (*(name for name, _ in files), f"{INPUT}/")


def _of_pulled_base(definition: Definition) -> tuple[Instruction, ...]:
    """What takes back of an image's config what would hold for all that is built on it."""
    path = dict(definition.environment).get("PATH", "")
    return (
        Instruction(keyword="USER", value="0"),
        Instruction(keyword="WORKDIR", value="/"),
        Instruction(keyword="ENTRYPOINT", value="[]"),
        Instruction(keyword="ENV", value=f"PATH={path}:${{PATH}} PYTHONHOME= PYTHONPATH="),
    )


def _variables(definition: Definition) -> tuple[tuple[str, str], ...]:
    """The environment; on a pulled base PATH was set before, with what the base has there."""
    pulled = bool(definition.base.image)
    return tuple(pair for pair in definition.environment if not (pulled and pair[0] == "PATH"))


def render_dockerfile(definition: Definition) -> str:
    """The text of the Dockerfile. Raises UsageError for a value that it cannot hold."""
    target = definition.target
    made = steps(definition)
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
        bring=wheels_to_bring(definition),
        entrypoint=entrypoint(definition),
        init=entrypoint(definition) != definition.start.entrypoint,
        start=definition.start,
        own=f"{OWN}/" if definition.files else "",
        conda=bool(definition.lock.conda),
        copied=_copied(definition),
        prepare=[step for step in made if not step.built],
        make=[step for step in made if step.built],
        site=SITE,
    )
