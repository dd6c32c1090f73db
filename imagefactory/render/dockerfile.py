"""A Definition as a Dockerfile, for BuildKit and for the classic builder alike (no `# syntax=` line).

`instructions` says what the file must come to; the text is another way to the same list, and tests
parse it with a public parser and compare.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagefactory.model import Definition
from imagefactory.oci.layout import reference
from imagefactory.render.steps import REQUIREMENTS, steps
from imagefactory.render.templating import COMMAND, facts, fill

PIP_ARGUMENTS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_TRUSTED_HOST")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction. `value` is its text with single blanks and no line ends; `pairs` the names and
    plain values of an ENV or LABEL, which then has no `value`."""

    keyword: str
    value: str = ""
    pairs: tuple[tuple[str, str], ...] = ()


def instructions(definition: Definition) -> tuple[Instruction, ...]:
    """The instructions of the Dockerfile, in order. Pure, and apart from the template on purpose."""
    prefix = definition.prefix

    def runs(*, built: bool) -> list[Instruction]:
        return [
            Instruction(keyword="RUN", value=" ".join("; ".join(("set -eu", *step.commands)).split()))
            for step in steps(definition)
            if step.built is built
        ]

    return (
        Instruction(keyword="ARG", value=f"BASE={definition.base.public}"),
        Instruction(keyword="FROM", value="${BASE} AS base"),
        Instruction(keyword="ENV", pairs=definition.environment),
        *runs(built=False),
        Instruction(keyword="FROM", value="base AS build"),
        *(Instruction(keyword="ARG", value=name) for name in PIP_ARGUMENTS),
        Instruction(keyword="COPY", value=f"requirements.txt {REQUIREMENTS}"),
        *runs(built=True),
        Instruction(keyword="FROM", value="base"),
        Instruction(keyword="LABEL", pairs=definition.labels),
        Instruction(keyword="COPY", value=f"--from=build {prefix} {prefix}"),
        Instruction(keyword="CMD", value=json.dumps(COMMAND)),
    )


def render_dockerfile(definition: Definition) -> str:
    """The text of the Dockerfile. Raises UsageError for a value that it cannot hold."""
    target = definition.target
    made = steps(definition)
    return fill(
        "Dockerfile.jinja",
        target=target,
        base=definition.base,
        environment=definition.environment,
        labels=definition.labels,
        prefix=definition.prefix,
        tag=reference(target),
        facts=facts(definition),
        command=COMMAND,
        requirements=REQUIREMENTS,
        prepare=[step for step in made if not step.built],
        make=[step for step in made if step.built],
        pip_arguments=PIP_ARGUMENTS,
    )
