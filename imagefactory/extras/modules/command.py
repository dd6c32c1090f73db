"""imagefactory module."""

from __future__ import annotations

from pathlib import Path

import click

from imagefactory.cli.output import CommandContext, complete_targets, json_option, print_json, print_result


@click.command()
@click.argument("name", metavar="TARGET", shell_complete=complete_targets)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("modules"),
    show_default=True,
    metavar="FOLDER",
    help="Where image, wrappers and modulefile go: a folder that all machines see.",
)
@json_option
@click.pass_obj
def module(call: CommandContext, name: str, output: Path, as_json: bool) -> None:
    """Hand an image out as a module, for `module load`.

    For Lmod and Environment Modules. A wrapper for each of the image's programs, python and what was
    installed with it, starts that program in the image by apptainer, with the GPUs of the machine.

    \b
      imagefactory module pytorch-2.3-cu121 -o /software/gpu
      module use /software/gpu/modulefiles
      module load pytorch/2.3-cu121
    """
    from imagefactory.extras.modules.action import write_module
    from imagefactory.recipes.expand import select_single

    factory = call.factory
    result = write_module(factory, select_single(factory.targets, name), output, call.progress)
    path = result.folder / result.modulefile
    if as_json:
        return print_json(
            "module",
            {
                "target": result.target.name,
                "modulefile": str(path),
                "image": str(result.folder / "images" / result.image),
                "programs": result.programs,
            },
        )
    loaded = "/".join(result.modulefile.parts[1:])
    print_result(
        f"wrote {path}\n  image     {result.image}\n  programs  {len(result.programs)}, such as "
        f"{', '.join(result.programs[:4])}\n"
        f"try it: module use {result.folder / result.modulefile.parts[0]} && module load {loaded} && python"
    )
    return None
