"""imagefactory init."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from imagefactory.cli.output import Call, json_option, say, say_json
from imagefactory.errors import UsageError, without_logins


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=None)
@click.option(
    "--with",
    "families",
    default="",
    metavar="FAMILY,...",
    help="Take along these families of those that come with imagefactory: recipes and locks.",
)
@click.option("--github", is_flag=True, help="Write the nightly build for GitHub Actions, with a README.")
@click.option("--gitlab", is_flag=True, help="Write the nightly build for GitLab CI, with a README.")
@json_option
@click.pass_obj
def init(call: Call, folder: Path | None, families: str, github: bool, gitlab: bool, as_json: bool) -> None:
    """Make a factory of your own in DIR (default: here). What is there is never overwritten.

    \b
    imagefactory init lab                        an empty one: settings, and bases with their locks
    imagefactory init lab --with pytorch,jax     with the recipes and locks of these families
    imagefactory init lab --github               with its nightly build in GitHub Actions
    """
    from imagefactory.actions.new_project import make_factory
    from imagefactory.stages.init_nights import night_files

    family_names = tuple(dict.fromkeys(name for text in families.split(",") if (name := text.strip())))
    root = folder or call.directory or Path()
    if without_logins(str(root)) != str(root):
        raise UsageError(
            "folder-name-invalid",
            f"{root} contains a password, so it is not a directory",
            hint="pass a directory name: imagefactory init lab",
        )
    services = [name for name, flag in (("github", github), ("gitlab", gitlab)) if flag]
    nights = night_files(services, root)
    tree = make_factory(root, family_names, call.settings, os.environ, nights)
    after = (
        f"imagefactory build {tree.target}" if tree.target else "imagefactory new pytorch --framework torch"
    )
    if root.absolute() != Path.cwd():
        after = f"cd {shlex.quote(str(root))} && {after}"
    where = str(root.absolute())
    if as_json:
        value = {"root": where, "families": tree.families, "written": tree.written, "next": after}
        return say_json("init", value)
    what = f"{len(tree.written)} files written" if tree.written else "nothing to write: all of it is there"
    say(f"{where}: {what}")
    say(f"  families  {', '.join(tree.families) or 'none yet'}")
    for name in nights:
        if name.endswith("README.md"):
            say(f"  nightly   {root / name} lists the variables, secrets and runners that it needs")
    say(f"next: {after}")
    return None
