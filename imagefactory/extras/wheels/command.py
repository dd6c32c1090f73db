"""The command `recipe build-wheel`, which compiles a package inside the image of a target."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

import click

from imagefactory.cli.arguments import Command
from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    json_option,
    print_json,
    print_next_command,
    print_result,
)


class WheelBuildDocument(TypedDict):
    """The wheel of a package."""

    format: Literal["imagefactory.recipe-build-wheel/1"]
    wheel: str
    built: bool
    """False if the same wheel existed."""


@click.command("build-wheel", cls=Command)
@click.argument("source", metavar="PACKAGE|FOLDER|ARCHIVE|GIT")
@click.option(
    "--in",
    "name",
    metavar="TARGET",
    required=True,
    shell_complete=complete_targets,
    help="Build in the image of this target, for use in it.",
)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    metavar="CAPABILITY",
    help="Compile only for this compute capability, such as 8.0 (repeatable).  [default: the target's]",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the wheel to this directory.  [default: wheels/ of the project]",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="Limit the build as in `run`: memory=16G, time=2h.  [default: as in `run`, and time=1d]",
)
@json_option
@click.pass_obj
def build_wheel(
    call: CommandContext,
    source: str,
    name: str,
    capabilities: tuple[str, ...],
    folder: Path | None,
    limits: tuple[str, ...],
    as_json: bool,
) -> None:
    """Build a wheel of a package in the image of a target.

    \b
    imagefactory recipe build-wheel torch-scatter==2.1.2 --in pytorch-2.15-cu132
    imagefactory recipe build-wheel ./mykernels --in pytorch-2.15-cu132

    The source is a package, a directory, an archive or git+https://HOST/REPOSITORY@COMMIT. The target's
    Python, packages and compiler build it, without network. pip, setuptools, ninja and, from CUDA 13 on,
    nvcc come from PyPI; they do not become part of an image. If nothing changed, the wheel is not built
    again.
    """
    from imagefactory.errors import UsageError
    from imagefactory.extras.wheels.build import TIMEOUT, CompileRequest, compile_wheel
    from imagefactory.gpu.capability import parse_capability
    from imagefactory.runtime.limits import parse_limits

    try:
        chosen = tuple(str(parse_capability(text)) for text in capabilities)
    except ValueError as error:
        raise UsageError("option-invalid", str(error), hint="write, for example, --capability 8.0") from error
    factory = call.factory
    target = factory.select_single(name)
    wheel_directory = folder or factory.settings.root_path / "wheels"
    if folder is None and factory.settings.shipped:
        raise UsageError(
            "project-not-found",
            "the wheel needs a directory, because there is no project here",
            hint="pass a directory: --dir DIR",
        )
    root = factory.settings.root_path
    if folder is None and not wheel_directory.resolve().is_relative_to(root.resolve()):
        raise UsageError(
            "folder-outside-project",
            f"{wheel_directory} is a link to a directory outside the project",
            hint="pass a directory: --dir DIR",
        )
    bounds = parse_limits(limits)
    timeout = bounds.pop("time", TIMEOUT)
    ask = CompileRequest(
        source=source,
        target=target,
        folder=wheel_directory,
        capabilities=chosen,
        limits=tuple(bounds.items()),
        timeout=timeout,
    )
    result = compile_wheel(factory, ask, call.progress)
    if as_json:
        print_json(
            WheelBuildDocument(
                format="imagefactory.recipe-build-wheel/1", wheel=str(result.wheel), built=result.compiled
            )
        )
        return
    size = result.wheel.stat().st_size
    status = "compiled" if result.compiled else "is unchanged: same source, image and tools"
    print_result(f"{result.wheel} {status} ({size / 1e6:.1f} MB)")
    if result.wheel.is_relative_to(root):
        write = f'packages: ["./{result.wheel.relative_to(root)}"]'
        call.progress.note(f"in a recipe on {target.name}: {write}")
    print_next_command("compat", str(result.wheel))
