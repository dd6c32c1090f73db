"""imagefactory completion."""

from __future__ import annotations

import click

from imagefactory.cli.output import say


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script for a shell.

    Write eval "$(imagefactory completion bash)" in ~/.bashrc."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    say(
        kind(
            click.get_current_context().find_root().command, {}, "imagefactory", "_IMAGEFACTORY_COMPLETE"
        ).source()
    )
