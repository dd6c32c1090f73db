"""The command line: parse arguments, print results, set the exit code. Only this package prints or exits.

There is one file for each group of commands. output.py contains shared code. Commands are rows, loaded by
name. Each command imports what it needs when it runs, so that the program starts fast.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path

import click

from imagefactory import __version__
from imagefactory.cli.arguments import Command, CommandGroup
from imagefactory.cli.output import (
    CommandContext,
    ErrorDocument,
    error_json,
    explain,
    print_errors,
    print_json,
    print_result,
    write_terminal,
)
from imagefactory.errors import (
    DISTRIBUTION,
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ImagefactoryError,
    ToolError,
    UsageError,
    extra_hint,
    own_pip_command,
    without_logins,
)
from imagefactory.logs import LOG_VARIABLE, start_logging, stop_logging
from imagefactory.progress import STYLES, silence_progress

WAKER, WAKINGS = "signals", 3
MODULES = {
    **dict.fromkeys(("installer", "isal", "jinja2", "rich", "uv", "zstandard"), "build"),
    "classad2": "condor",
    "conda_lock": "conda",
    "cryptography": "sign",
    **dict.fromkeys(("cyclonedx", "license_expression", "packageurl", "spdx_tools"), "sbom"),
    "docker": "docker",
    "htcondor2": "condor",
    "rattler": "conda",
    "sigstore": "sigstore",
    "spython": "apptainer",
    "tomlkit": "sign",
}
"""Packages that a minimal installation lacks, and the extra that installs them."""
EXIT_CODES_TOPIC = "exit-codes"


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"`imagefactory help {EXIT_CODES_TOPIC}` explains the exit codes.",
)
@click.version_option(__version__, "-V", "--version", message="imagefactory %(version)s")
@click.option(
    "-C",
    "--directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help=(
        "Use the project in this directory.  [default: the nearest directory with imagefactory.toml, "
        "here or above, else the recipes of imagefactory]"
    ),
)
@click.option(
    "--progress",
    "style",
    type=click.Choice(STYLES),
    default="auto",
    show_default=True,
    help="How to print progress on stderr.",
)
@click.option("-v", "--verbose", is_flag=True, help="Print commands and requests to stderr, with times.")
@click.pass_context
def cli(ctx: click.Context, directory: Path | None, style: str, verbose: bool) -> None:
    """Build GPU container images that are locked, reproducible and verified.

    \b
    Start here:
      imagefactory doctor                       check this machine
      imagefactory list                         list the images that you can build
      imagefactory build pytorch-2.3-cu121      build an image and test it
      imagefactory run pytorch-2.3-cu121 -- python
      imagefactory job write pytorch-2.3-cu121  write a job for a cluster
    """
    ctx.obj = CommandContext(directory, style)
    start_logging(verbose=verbose, file=os.environ.get(LOG_VARIABLE, ""))
    ctx.call_on_close(stop_logging)


@click.command("help", cls=Command, hidden=True)
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, or of exit-codes."""
    if words == (EXIT_CODES_TOPIC,):
        return print_result("\n".join(f"{code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()))
    context = ctx.find_root()
    for word in words:
        group = context.command
        if not isinstance(group, click.Group):
            raise UsageError(
                "command-unknown",
                f"`{context.command_path}` has no commands",
                hint=f"run imagefactory help {' '.join(words[: words.index(word)])}",
            )
        command = group.resolve_command(context, [word])[1]
        assert command is not None
        context = command.context_class(command, parent=context, info_name=word)
    return print_result(context.get_help())


GROUPS = {
    "image": "Manage images in the store and in a registry.",
    "job": "Write and check job files for a cluster.",
    "key": "Create and trust the keys that sign verdicts.",
    "model": "Check models in other runtimes, and export them.",
    "recipe": "Write recipes and keep them up to date.",
    "site": "Join a site, or publish the images of your own.",
    "sweep": "Verify images on a cluster, in many jobs.",
    "verdict": "Show, revoke and synchronize verdicts.",
}
"""The help of each group of commands."""
COMMANDS = {
    "Start": {
        "init": "cli.recipes:init",
        "doctor": "cli.machine:doctor",
        "config": "cli.machine:config",
        "completion": "cli.machine:completion",
    },
    "Use images": {
        "search": "cli.search:search",
        "run": "cli.run:run",
        "emulate": "extras.emulate.command:emulate",
        "compat": "cli.compat:compat",
        "gpus": "cli.gpus:gpus",
        "job write": "cli.job:write",
        "job check": "extras.lint.command:check",
    },
    "Build images": {
        "list": "cli.recipes:list_targets",
        "show": "cli.recipes:show",
        "lock": "cli.build:lock",
        "render": "cli.build:render",
        "build": "cli.build:build",
        "push": "cli.transfer:push",
        "pull": "cli.transfer:pull",
        "recipe new": "cli.recipes:new",
        "recipe import": "extras.importers.command:import_recipe",
        "recipe add-version": "cli.recipes:add_version",
        "recipe outdated": "extras.nightly.command:outdated",
        "recipe update": "extras.nightly.command:update",
        "recipe build-wheel": "extras.wheels.command:build_wheel",
        "image list": "cli.store:image_list",
        "image remove": "cli.store:image_remove",
        "image prune": "cli.store:image_prune",
        "image check": "cli.store:image_check",
        "image export": "cli.transfer:export",
        "image copy": "cli.transfer:copy",
        "image promote": "cli.verdicts:promote",
        "image sbom": "extras.sbom.command:sbom",
        "image audit": "extras.sbom.command:audit",
        "image attest": "extras.sbom.command:attest",
    },
    "Verify": {
        "plan": "cli.plan:plan",
        "verify": "cli.verify:verify",
        "sweep start": "cli.sweeps:start",
        "sweep list": "cli.sweeps:list_",
        "sweep status": "cli.sweeps:status",
        "sweep collect": "cli.sweeps:collect",
        "sweep cancel": "cli.sweeps:cancel",
        "verdict list": "cli.verdicts:list_",
        "verdict revoke": "cli.verdicts:revoke",
        "verdict sync": "cli.verdicts:sync",
        "model check": "extras.portability.command:check",
        "model show": "extras.portability.command:show",
        "model export": "extras.portability.command:export",
        "report": "extras.site.command:report",
    },
    "Run a site": {
        "site join": "cli.join:join",
        "site list": "cli.join:site_list",
        "site remove": "cli.join:site_remove",
        "site invite": "cli.join:invite",
        "site publish": "cli.catalog:publish_catalog",
        "site nightly": "extras.nightly.command:nightly",
        "key create": "cli.keys:create",
        "key list": "cli.keys:list_",
        "key trust": "cli.keys:trust",
        "key retire": "cli.keys:retire",
        "key rotate": "cli.keys:rotate",
        "key log": "cli.keys:log",
    },
}
"""The commands by section and path, each with its module and function. Modules are imported when they run."""
cli.add_command(help_)
cli.add_rows(COMMANDS, GROUPS)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line. This is the only place that handles errors."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is ours
        _print_warnings_plainly()
        # Python searches for garbage after 700 objects, for a tenth of the time to read 10,000 images.
        gc.set_threshold(50_000)
    _clean_up_on_termination()
    _install_wakeup()
    try:
        check_not_namesake_package(Path(__file__).parents[1])
        code = cli.main(args=arguments, prog_name="imagefactory", standalone_mode=False)
    except ImagefactoryError as error:
        code = _exit_process(error, arguments)
    except click.exceptions.Exit as exit_:
        code = exit_.exit_code
    except click.ClickException as error:
        code = error.exit_code
        _print_json_error(arguments, UsageError("invalid-arguments", error.format_message()), code)
        write_terminal(2, without_logins(_usage_text(error)))
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            code = _exit_process(explain(error.__context__), arguments)
        else:
            code = _raise_interrupt(arguments)
    except KeyboardInterrupt:
        code = _raise_interrupt(arguments)
    except OSError as error:
        code = _exit_process(explain(error), arguments)
    except ModuleNotFoundError as error:
        extra = MODULES.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        missing = ToolError("extra-not-installed", f"{error.name} is not installed", hint=extra_hint(extra))
        code = _exit_process(missing, arguments)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _usage_text(error: click.ClickException) -> str:
    """Return an error of click in the style of imagefactory, or the help of a group without a command."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    message = error.format_message()
    if context and message == context.get_help():
        return message
    text = f"error: {message[:1].lower()}{message[1:].rstrip('.')}"
    return f"{text}\nhint: see `{context.command_path} --help`" if context else text


def _print_warnings_plainly() -> None:
    """Print tracebacks and warnings through `write`, since they may contain untrusted text."""
    sys.excepthook = _print_bug
    threading.excepthook = lambda bug: _print_bug(bug.exc_type, bug.exc_value, bug.exc_traceback)
    warnings.showwarning = lambda message, kind, *_: write_terminal(2, f"{kind.__name__}: {message}")


def _print_bug(
    kind: type[BaseException], error: BaseException | None, trace: types.TracebackType | None
) -> None:
    if not issubclass(kind, SystemExit):  # of a thread: it ends without a word
        write_terminal(2, "".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))


def check_not_namesake_package(package: Path) -> None:
    """Raise ToolError if another package named `imagefactory` is installed in this program's directory.

    Both packages have files with the same names, so the later installation overwrites the earlier one. A file
    that only the other package has (imagefactory 0.1.0 of 2017, its only release) shows this.
    """
    if (package / "imagefactory.py").exists():
        raise ToolError(
            "package-name-conflict",
            f"another program named imagefactory is installed in {package} and overwrites parts of this one",
            hint=f"{own_pip_command('uninstall', 'imagefactory')} && "
            + own_pip_command("install", f"--force-reinstall --no-deps {DISTRIBUTION}"),
        )


def _clean_up_on_termination() -> None:
    """Handle SIGTERM and a closed terminal like Ctrl-C, so that containers and builds end too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores the latter, and means it
            signal.signal(number, lambda signum, _: sys.exit(128 + signum))


@functools.cache
def _install_wakeup() -> None:
    """Wake the main thread after a signal that another thread received.

    The kernel may deliver a signal to any thread, but only the main thread runs the handler. If the main
    thread waits for a lock, it handles Ctrl-C only after the lock is free, which may never happen if a
    registry hangs. So this sends more signals, whose only effect is to end such a wait.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGURG, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    main_thread = threading.get_ident()

    def wake() -> None:
        while numbers := os.read(reading, 64):
            for _ in range(WAKINGS) if set(numbers) - {signal.SIGURG} else ():
                signal.pthread_kill(main_thread, signal.SIGURG)
                time.sleep(0.05)  # it may have been just about to wait

    threading.Thread(target=wake, daemon=True, name=WAKER).start()


def _raise_interrupt(arguments: Sequence[str]) -> int:
    """Print the last message.

    If other threads run, exit immediately, since a normal exit would wait for them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C prints nothing
    silence_progress()
    message = "interrupted: run the same command again to continue"
    _print_json_error(arguments, ImagefactoryError("interrupted", message), EXIT_INTERRUPTED)
    write_terminal(2, message)
    own_threads = (threading.main_thread().name, WAKER)
    if any(
        thread.name not in own_threads for thread in threading.enumerate()
    ):  # one may sit in a request for minutes
        with contextlib.suppress(OSError):  # nobody reads any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(EXIT_INTERRUPTED)
    return EXIT_INTERRUPTED


def _exit_process(error: ImagefactoryError, arguments: Sequence[str]) -> int:
    """Print an error that ended the whole command: to stderr, and as JSON with --json."""
    _print_json_error(arguments, error, error.exit_code)
    print_errors(error)
    return error.exit_code


def _print_json_error(arguments: Sequence[str], error: ImagefactoryError, exit_code: int) -> None:
    program_arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in program_arguments:
        print_json(
            ErrorDocument(format="imagefactory.error/1", errors=[error_json(error, exit_code=exit_code)])
        )
