"""Rendered files as public readers read them, and values that try to become more than values."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

from dockerfile_parse import DockerfileParser
from dockerfile_parse.util import extract_key_values
from hypothesis import strategies as st

from imagefactory.build.definition import entrypoint
from imagefactory.build.render import _copied, _variables
from imagefactory.build.steps import OWN, SITE, steps
from imagefactory.model import BuildSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerfileInstruction:
    """One instruction. `value` is its text with single blanks, without its `flags` (`--from=build`)."""

    keyword: str
    flags: tuple[str, ...] = ()
    value: str = ""
    pairs: tuple[tuple[str, str], ...] = ()


def instructions(definition: BuildSpec) -> tuple[DockerfileInstruction, ...]:
    """Return the expected instructions of a Dockerfile, on purpose apart from the template."""
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


def _of_pulled_base(definition: BuildSpec) -> tuple[DockerfileInstruction, ...]:
    """What takes back of an image's config what would hold for all that is built on it."""
    path = dict(definition.environment).get("PATH", "")
    return (
        DockerfileInstruction(keyword="USER", value="0"),
        DockerfileInstruction(keyword="WORKDIR", value="/"),
        DockerfileInstruction(keyword="ENTRYPOINT", value="[]"),
        DockerfileInstruction(keyword="ENV", value=f"PATH={path}:${{PATH}} PYTHONHOME= PYTHONPATH="),
    )


def parsed(text: str) -> tuple[DockerfileInstruction, ...]:
    """The instructions as dockerfile-parse finds them, in the model's terms."""
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    found = []
    for each in parser.structure:
        keyword, value = each["instruction"], each["value"]
        if keyword in ("ENV", "LABEL"):
            pairs = extract_key_values(env_replace=False, args={}, envs={}, instruction_value=value)
            found.append(DockerfileInstruction(keyword=keyword, pairs=tuple(pairs)))
        elif keyword != "COMMENT":
            found.append(split_flags(keyword, value.split()))
    return tuple(found)


def split_flags(keyword: str, words: list[str]) -> DockerfileInstruction:
    """dockerfile-parse knows no flags: by Docker's reference they are the words with `--` in front."""
    count = next((n for n, word in enumerate(words) if not word.startswith("--")), len(words))
    return DockerfileInstruction(keyword=keyword, flags=tuple(words[:count]), value=" ".join(words[count:]))


def section_names(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.lstrip().startswith("%")]


SECTIONS = ["%files", "%post", "%environment", "%labels", "%runscript", "%help"]
BITS = st.sampled_from(
    [
        "a", "B9", " ", "'", '"', "\\", "$HOME", "${PATH}", "$(id)", "`id`", "#", "# escape=`", "%post",
        "[[ 7*7 ]]", "[% if %]", "{{7*7}}", "{{ BASE }}", "{%", "}}", "\n", "\\\n", "\nRUN id\n", "\r", "\0",
        "\u2028", "\u0085", "\u202e", "é", "=", "A=b", ";", "&&", "<<EOF", "FROM x", "ONBUILD", "\t", "\x7f",
    ]
)  # fmt: skip
HOSTILE_TEXT = st.lists(BITS, max_size=6).map("".join)
NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,12}", fullmatch=True)


def may_stand(value: str) -> bool:
    return value.isprintable() and not value.endswith("\\") and "{{" not in value


def sections(text: str) -> tuple[dict[str, str], list[tuple[str, list[str]]]]:
    """Header and sections of a definition as apptainer splits them: a line whose first word starts
    with % begins a section, comments and blank lines of the header do not count."""
    header: dict[str, str] = {}
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.lstrip().startswith("%"):
            found.append((line.strip()[1:], []))
        elif found:
            found[-1][1].append(line)
        elif line.strip() and not line.lstrip().startswith("#"):
            key, _, value = line.partition(":")
            assert key.lower() not in header
            header[key.lower()] = value.strip()
    return header, found


def body(text: str, name: str) -> str:
    return "\n".join(dict(sections(text)[1])[name])
