"""Render a Dockerfile and an Apptainer definition file from a BuildSpec, with templates.

The delimiters are `[[ ]]`, `[% %]` and `[# #]`, so that `{{ }}` is always Apptainer's own. Templates are
files of this package. A recipe's text is only used as a value.
"""

from __future__ import annotations

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
from imagefactory.gpu.capability import AMD64
from imagefactory.gpu.values import platform_of
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
    """Return the text of a file in templates/ with `values`. Raises UsageError for an invalid value."""
    return _environment().get_template(template).render(values)


def named_indexes(definition: BuildSpec) -> str:
    """Return the names of further package indexes for a sentence, empty for none."""
    return " and ".join(sorted(set(from_indexes(definition.lock.origins).values())))


def large_wheels(definition: BuildSpec) -> tuple[tuple[str, str], ...]:
    """Return (path in the project, size) of wheels too large to copy into the target's directory."""
    paths = from_files(definition.lock.origins)
    large = (wheel for wheel in own_wheels(definition) if wheel.size > LARGEST_COPY)
    return tuple((paths[wheel.name].removeprefix("./"), format_bytes(wheel.size)) for wheel in large)


def facts(definition: BuildSpec) -> str:
    """Return lines for the reader: the image's content, and its numbers of packages and bytes."""
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


def render_apptainer(definition: BuildSpec, *, bootstrap: str = "docker", image_path: str = "") -> str:
    """Return apptainer.def on the definition's public base, or on `image_path` with the agent `bootstrap`.

    spython can turn it into a Dockerfile. It turns each command line of %post into a RUN and has no build
    arguments, so each step is one command. Raises UsageError for an invalid value.
    """
    return fill(
        "apptainer.def.jinja",
        target=definition.target,
        base=definition.base,
        bootstrap=bootstrap,
        place=image_path or definition.base.public,
        # With apptainer users have their own home, or none.
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


def _copied(definition: BuildSpec) -> tuple[str, ...]:
    """Return the words of COPY: one file and its new name, or several and their directory."""
    files = copies(definition)
    return files[0] if len(files) == 1 else (*(name for name, _ in files), f"{INPUT}/")


def _variables(definition: BuildSpec) -> tuple[tuple[str, str], ...]:
    """Return the environment. On a pulled base PATH is already set, with the base's own directories."""
    pulled = bool(definition.base.image)
    return tuple(pair for pair in definition.environment if not (pulled and pair[0] == "PATH"))


def render_dockerfile(definition: BuildSpec) -> str:
    """Return the Dockerfile, for BuildKit and buildah. It has no `# syntax=` line, which would be fetched.

    The package index and the certificates of this machine are secrets: mounted while packages are fetched,
    and in no layer, history or cache. Raises UsageError for an invalid value.
    """
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
