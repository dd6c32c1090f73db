"""The templates' environment, and the lines that both kinds of file show alike.

The delimiters are `[[ ]]`, `[% %]` and `[# #]`, so that `{{ }}` is always Apptainer's own. Templates
are files of this package; a recipe's text is only ever a value.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imagefactory.gpu.builds import platform_of
from imagefactory.lock.pypi.origins import from_files, from_indexes
from imagefactory.model import Definition
from imagefactory.progress import format_bytes
from imagefactory.build.definition import framework_package
from imagefactory.render.quoting import FILTERS, insist
from imagefactory.build.steps import LARGEST_COPY, own_wheels

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701 - no HTML here; `insist` lets out only what is quoted
        finalize=insist,
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


def named_indexes(definition: Definition) -> str:
    """The names of the package indexes beside the usual one, as a sentence has them; empty for none."""
    return " and ".join(sorted(set(from_indexes(definition.lock.origins).values())))


def wheels_to_bring(definition: Definition) -> tuple[tuple[str, str], ...]:
    """(path from the factory's root on, size) of wheels too large to be copied into the target's folder."""
    paths = from_files(definition.lock.origins)
    large = (wheel for wheel in own_wheels(definition) if wheel.size > LARGEST_COPY)
    return tuple((paths[wheel.name].removeprefix("./"), format_bytes(wheel.size)) for wheel in large)


def facts(definition: Definition) -> str:
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
