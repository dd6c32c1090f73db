"""Code that all commands share: context, output, and the exit code for errors of single targets."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NotRequired, ParamSpec, TypedDict

import click

from imagefactory import __version__
from imagefactory.errors import (
    STEERING,
    BuildError,
    ImagefactoryError,
    NothingSelectedError,
    OutdatedError,
    OutdatedPackageRow,
    RecipeError,
    UnbuiltError,
    UnbuiltPackageRow,
    UnsolvableError,
    UsageError,
    os_reason,
    printable,
    without_logins,
)
from imagefactory.plugins import has_extra
from imagefactory.progress import Progress, choose_progress, without_commands, wrap_message
from imagefactory.settings.choices import RUNNERS

if TYPE_CHECKING:
    from imagefactory.access import Access
    from imagefactory.gpu.capability import Capability
    from imagefactory.model import LockedPackage, Target
    from imagefactory.oci.manifests import Image, SifArtifact
    from imagefactory.project import Project
    from imagefactory.settings.files import UntrustedProjectError
    from imagefactory.settings.load import Settings
    from imagefactory.settings.sources import RestrictedSetting

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The context of every command: the settings, lazily read recipes, and progress."""

    directory: Path | None
    progress_style: str

    @property
    def settings(self) -> Settings:
        """The settings. On a terminal, the user can trust a project that sets restricted settings.

        Raises UntrustedProjectError without a terminal, or if the user does not agree.
        """
        from imagefactory.settings.files import UntrustedProjectError

        try:
            return self._load(strict=True)
        except UntrustedProjectError as error:
            if not self._may_ask() or not confirm_trust(error):
                raise
        return self._load(strict=True)

    @property
    def checked_settings(self) -> Settings:
        """The settings without those that an untrusted project may not set, for commands that print them."""
        return self._load(strict=False)

    def _load(self, *, strict: bool) -> Settings:
        from imagefactory.settings.load import load_settings

        return load_settings(directory=self.directory, start=Path.cwd(), environ=os.environ, strict=strict)

    def _may_ask(self) -> bool:
        """Return whether a person is at the terminal, not a program that reads JSON or completes words."""
        context = click.get_current_context(silent=True)
        if context is None or context.resilient_parsing or context.params.get("as_json"):
            return False
        return is_terminal() and self.progress_style != "json"

    @property
    def access(self) -> Access:
        """The settings and the environment, for commands that work on full references and need no recipes."""
        from imagefactory.access import Access

        return Access(settings=self.settings, environ=os.environ, tell=self.progress.note)

    @property
    def factory(self) -> Project:
        """The project with its valid recipes. `Project.select` reports the problems of the others."""
        from imagefactory.project import load_lenient

        return load_lenient(self._settings_with_note, os.environ, self._note_once())

    @property
    def factory_if_any(self) -> Project | None:
        """The project, None without recipes, since commands about frameworks work everywhere."""
        from imagefactory.project import recipes_directory

        try:
            recipes_directory(self.settings)
        except UsageError:
            if self.directory is not None:
                raise
            return None
        return self.factory

    @property
    def _settings_with_note(self) -> Settings:
        """The settings. If the recipes are the bundled ones, print a note."""
        settings = self.settings
        if settings.shipped:
            self.progress.note(
                f"note: no imagefactory.toml here or above: using the recipes of imagefactory {__version__}"
            )
        return settings

    def _note_once(self) -> Callable[[str], object]:
        """Return a function that prints each note once."""
        return functools.cache(self.progress.note)

    @property
    def progress(self) -> Progress:
        return choose_progress(self.progress_style, github=os.environ.get("GITHUB_ACTIONS") == "true")


def print_result(text: str, *, unless: bool = False) -> None:
    """Print a result for people, unless `unless` is true (with --json)."""
    if not unless:
        write_terminal(1, text)


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document to stdout: a TypedDict whose `format` names its type and version."""
    from imagefactory.serialize import plain

    print_json_document(json.dumps(document, indent=2, default=plain))


def print_json_document(text: str) -> None:
    """Print JSON, with terminal control characters escaped as JSON escapes them."""
    _echo(1, STEERING.sub(_json_escape, text))


def _json_escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[start : start + 2].hex()}" for start in range(0, len(units), 2))


def print_next_command(*words: str, program: str = "imagefactory") -> None:
    """Print the next useful command to stderr, as the last line.

    Prints nothing for programs (`--json`, `--progress json`) or with `-q`.
    """
    context = click.get_current_context()
    call = context.find_object(CommandContext)
    if call is None or call.progress_style in ("quiet", "json") or context.params.get("as_json"):
        return
    directory_option = ("-C", str(call.directory)) if call.directory and program == "imagefactory" else ()
    write_terminal(2, f"next: {shlex.join((program, *directory_option, *words))}")


def next_after_build(
    names: Sequence[str],
    on_gpus: Sequence[str],
    *,
    gpu: bool,
    scheduler: bool,
    registry: bool = False,
    pushed: bool = False,
) -> tuple[str, ...]:
    """Return the next command for built images, which works on this machine.

    `on_gpus` are the names of the images for GPUs. `gpu` and `scheduler` are what this machine has. With
    `registry`, tested images can be pushed.
    """
    if registry and not pushed:
        return "push", *names
    if on_gpus and gpu:
        return "verify", *on_gpus
    if on_gpus and scheduler:
        return "sweep", "start", *on_gpus
    if not pushed:
        return "run", names[0], "--", "python"
    return ("verify", on_gpus[0], "--kit", "kit") if on_gpus else ("image", "promote", *names)


def has_gpu() -> bool:
    """Return whether `verify` finds a GPU on this machine."""
    from imagefactory.errors import ImagefactoryError
    from imagefactory.verify.evidence import LocalEvidence

    try:
        return bool(LocalEvidence().read().gpus)
    except ImagefactoryError:
        return False


def has_scheduler() -> bool:
    """Return whether this machine has the commands of a scheduler."""
    from imagefactory.settings.choices import local_pool

    return bool(local_pool(os.environ))


def print_errors(error: ImagefactoryError, prefix: str = "") -> None:
    write_terminal(2, f"error: {without_logins(prefix)}{error.message}")
    if error.hint:
        write_terminal(2, f"hint: {error.hint}")


class DiagnosticRow(TypedDict):
    code: str
    location: str
    message: str
    fix: str


class ErrorRow(TypedDict):
    target: NotRequired[str]
    """The target or image, if the command continued with others; empty for an error of the recipes."""
    code: str
    exit_code: int
    message: str
    hint: str
    diagnostics: NotRequired[list[DiagnosticRow]]
    """The problems of a recipe."""
    tree: NotRequired[str]
    """The solver's explanation, if no versions fit together."""
    outdated: NotRequired[list[OutdatedPackageRow]]
    packages: NotRequired[list[UnbuiltPackageRow]]


class ErrorDocument(TypedDict):
    """The error that ended a command."""

    format: Literal["imagefactory.error/1"]
    errors: list[ErrorRow]


def error_json(
    error: ImagefactoryError, *, target: str | None = None, exit_code: int | None = None
) -> ErrorRow:
    """Return an error as JSON. `exit_code` replaces that of the error."""
    row = ErrorRow(
        code=error.code,
        exit_code=error.exit_code if exit_code is None else exit_code,
        message=error.message,
        hint=error.hint,
    )
    if target is not None:
        row["target"] = without_logins(target)
    if isinstance(error, RecipeError):
        row["diagnostics"] = [
            DiagnosticRow(
                code=item.code,
                location=without_logins(item.location),
                message=without_logins(item.message),
                fix=without_logins(item.fix),
            )
            for item in error.diagnostics
        ]
    if isinstance(error, UnsolvableError):
        row["tree"] = error.tree
    if isinstance(error, OutdatedError):
        row["outdated"] = list(error.outdated)
    if isinstance(error, UnbuiltError):
        row["packages"] = list(error.packages)
    return row


_COLORS = {
    "green": "ok yes passed verified good valid",
    "red": (
        "no failed FAILED error: missing malformed unsolvable wrong revoked expired invalid wrong-numbers "
        "no-kernel driver-too-old no-gpu wrong-gpu load-failed pull-failed timeout build-failed"
    ),
    "yellow": "warning warning: WARNING: part partly stale held no-match infrastructure undecided not-tested",
    "cyan": "next: hint:",
}
"""The terminal color of statuses that fill a cell or start a line."""
_LETTERS = {"Y": "green", "P": "green", "~": "yellow", "-": "red"}
_STATUS_COLORS = {word: color for color, words in _COLORS.items() for word in words.split()}
_CELL = (
    rf"(?m)(?P<before>^ *|(?<=  ))(?P<word>{'|'.join(map(re.escape, sorted(_STATUS_COLORS, reverse=True)))}|"
    r"[YP~-][dpv]!?)(?=$|  | \[| !|: |(?<=:) )"
)


def colorize(text: str, stream: int) -> str:
    """Return the text with these words in colors, if `stream` is a terminal with colors."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if plain or not os.isatty(stream):
        return text

    def color(match: re.Match[str]) -> str:
        word = match["word"]
        return match["before"] + click.style(word, fg=_STATUS_COLORS.get(word) or _LETTERS[word[0]])

    return re.sub(_CELL, color, text)


def write_terminal(stream: int, text: str) -> None:
    """Print a text for people without terminal control characters, except the colors of `colorize`.

    Texts may contain untrusted input: file names, layers, registries, records. All output goes through this
    function or through progress.py. Messages on stderr are wrapped to the terminal.
    """
    if os.environ.get("GITHUB_ACTIONS") == "true":
        text = without_commands(text)
    text = printable(text)
    width = terminal_width(stream)
    _echo(stream, colorize(wrap_message(text, width) if stream == 2 and width else text, stream))


def print_prose(text: str, indent: int = 2) -> None:
    """Print a result that is not a table.

    Lines are wrapped to the terminal, with indented continuation lines.
    """
    width = terminal_width()
    print_result(wrap_message(text, width, indent) if width else text)


def print_catalog_notes(notes: Iterable[str]) -> None:
    """Print which catalogs are outdated, and which expire soon."""
    for note in notes:
        write_terminal(2, f"note: {note}")


def confirm(question: str) -> bool:
    """Return whether the user at the terminal answers yes."""
    return click.confirm(printable(question), err=True)


def _echo(stream: int, text: str) -> None:
    """Print the text. A closed pipe (`| head`) or a full disk for stderr does not change the exit code."""
    try:
        click.echo(text, err=stream == 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    except OSError:
        if stream == 1:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # it is raised once, not again at the end
            raise


def terminal_width(stream: int = 1) -> int | None:
    """Return the columns of the terminal. None if it is not a terminal: lines are not wrapped, for `grep`."""
    return (os.get_terminal_size(stream).columns or None) if os.isatty(stream) else None


def is_terminal() -> bool:
    """Return whether a person at a terminal can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm_trust(error: UntrustedProjectError) -> bool:
    """Show the restricted settings of an untrusted project and let the user trust it.

    Record the answer yes.
    """
    from imagefactory.settings.files import trust_project

    write_terminal(2, f"{error.file} sets what only a trusted project may set:")
    write_terminal(2, "\n".join(f"  {line}" for line in restricted_lines(error.settings)))
    if not click.confirm("Trust this project, until that file changes?", err=True):
        return False
    trust_project(error.file.parent, error.content, os.environ)
    return True


def restricted_lines(settings: Iterable[RestrictedSetting]) -> Iterator[str]:
    """Return each setting with its line in the file, its value without secrets, and why it is restricted."""
    from imagefactory.serialize import printable_value
    from imagefactory.settings.files import without_secrets

    for setting in settings:
        value = printable_value(without_secrets(setting.value))
        yield f"{setting.line or '-'}: {setting.name} = {value}  ({setting.reason})"


def only_with(
    extra: str, option: Callable[[Callable[P, None]], Callable[P, None]]
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return the option that needs an extra, or nothing if that extra was deleted."""
    return option if has_extra(extra) else lambda command: command


def json_option(command: Callable[P, None]) -> Callable[P, None]:
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(command)


def complete_targets(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return target names for shell completion, none outside a project."""
    call = ctx.find_object(CommandContext) or CommandContext(None, "quiet")
    try:
        return [t.name for t in call.factory.targets if t.name.startswith(incomplete)]
    except ImagefactoryError:
        return []


def targets_argument(*, required: bool) -> Callable[[Callable[P, None]], Callable[P, None]]:
    return click.argument(
        "names",
        metavar="TARGET..." if required else "[TARGET]...",
        nargs=-1,
        required=required,
        shell_complete=complete_targets,
    )


class TargetRow(TypedDict):
    target: str
    family: str
    description: str
    source: str
    framework: str
    version: str
    cuda: str
    python: str
    base: str
    platform: str
    capabilities: Sequence[str]
    checks: Sequence[str]
    waive: Sequence[str]
    requirements: Sequence[str]
    constraints: Sequence[str]
    environment: dict[str, str]
    extends: str
    """The target whose image this one adds packages to; empty for none."""
    channels: Sequence[str]
    channel_priority: str
    virtual: dict[str, str]
    pip: Sequence[str]
    origins: dict[str, str]
    """The index or wheel of each package that comes from another place than the project's index."""
    sources: Sequence[str]
    recipe: str
    """The file and line of the recipe."""


def target_json(target: Target) -> TargetRow:
    return TargetRow(
        target=target.name,
        family=target.family,
        description=target.description,
        source=target.source,
        framework=target.framework,
        version=target.version,
        cuda=target.cuda,
        python=target.python,
        base=target.base,
        platform=target.platform,
        capabilities=target.capabilities,
        checks=target.checks,
        waive=target.waive,
        requirements=target.requirements,
        constraints=target.constraints,
        environment=dict(target.environment),
        extends=target.on,
        channels=target.channels,
        channel_priority=target.priority if target.channels else "",
        virtual=dict(target.virtual),
        pip=target.pip,
        origins=dict(target.origins),
        sources=target.sources,
        recipe=str(target.where),
    )


class PackageRow(TypedDict):
    """A locked package."""

    name: str
    version: str
    build: NotRequired[str]
    """Of a conda package."""
    url: NotRequired[str]
    """Of a conda package."""
    publisher: NotRequired[str]
    """Of a wheel that the index attests."""
    file: str
    sha256: str
    size: int


def package_json(package: LockedPackage, publisher: str = "") -> PackageRow:
    from imagefactory.model import LockedCondaPackage

    row = PackageRow(
        name=package.name,
        version=package.version,
        file=package.filename,
        sha256=package.sha256,
        size=package.size,
    )
    if isinstance(package, LockedCondaPackage):
        row["build"], row["url"] = package.build, package.url
    if publisher:
        row["publisher"] = publisher
    return row


class SifRow(TypedDict):
    """A .sif file."""

    name: str
    digest: str
    sha256: str
    size: int
    path: str
    source_manifest: str
    """The digest of the manifest that it was converted from; empty if Apptainer built it."""
    compression: str


class LayerRow(TypedDict):
    title: str
    digest: str
    size: int
    diff_id: str


class ImageRow(TypedDict):
    """An image in the store."""

    name: str
    digest: str
    manifest: str
    config: str
    size: int
    layers: list[LayerRow]


def artifact_json(artifact: Image | SifArtifact) -> ImageRow | SifRow:
    """Return an image or a .sif file as JSON."""
    from imagefactory.oci.manifests import Image

    return image_json(artifact) if isinstance(artifact, Image) else sif_json(artifact)


def sif_json(sif: SifArtifact) -> SifRow:
    return SifRow(
        name=sif.name,
        digest=sif.digest,
        sha256=sif.file.digest,
        size=sif.file.size,
        path=str(sif.path),
        source_manifest=sif.made_from,
        compression=sif.compression,
    )


def image_json(image: Image) -> ImageRow:
    return ImageRow(
        name=image.name,
        digest=image.digest,
        manifest=image.manifest,
        config=image.config,
        size=image.size,
        layers=[
            LayerRow(
                title=layer.title,
                digest=layer.descriptor.digest,
                size=layer.descriptor.size,
                diff_id=layer.diff_id,
            )
            for layer in image.layers
        ],
    )


# --- failures ---------------------------------------------------------------------------------------


class TargetFailures:
    """The errors of single targets. Other targets continue. The earliest failed stage sets the exit code."""

    def __init__(self, recipes: RecipeError | None = None) -> None:
        self.errors: list[tuple[str, ImagefactoryError]] = []
        self.recipes = recipes
        self._current = ""

    def of(self, name: str) -> TargetFailures:
        self._current = name
        return self

    def add(self, error: ImagefactoryError) -> None:
        self.errors.append((self._current, error))
        print_errors(error)

    def __enter__(self) -> TargetFailures:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, OSError | EOFError):
            error = explain(error)
        if not isinstance(error, ImagefactoryError):
            return False
        self.errors.append((self._current, error))
        print_errors(error, "" if self._current in error.message else f"{self._current}: ")
        return True

    def as_json(self) -> list[ErrorRow]:
        every = [("", self.recipes), *self.errors] if self.recipes else self.errors
        return [error_json(error, target=name) for name, error in every]


class exit_with_first_failure:
    """Exit with the code of the earliest failed stage after all targets ran.

    Invalid recipes of `factory` that `names` may select are reported first. They are the earliest stage.
    """

    def __init__(self, factory: Project | None = None, names: Sequence[str] = ()) -> None:
        faults = factory.problems_of(names) if factory else ()
        self.failures = TargetFailures(RecipeError(faults) if faults else None)

    def __enter__(self) -> TargetFailures:
        if self.failures.recipes:
            print_errors(self.failures.recipes)
        return self.failures

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        codes = [error.exit_code for _, error in self.failures.errors]
        if self.failures.recipes:
            codes.append(self.failures.recipes.exit_code)
        if kind is None and codes:
            raise click.exceptions.Exit(min(codes))


def reject_conflict(condition: object, message: str, hint: str) -> None:
    """Raise UsageError about options if the condition is true."""
    if condition:
        raise UsageError("option-conflict", message, hint=hint)


def capability_of(text: str, hint: str = "write, for example, --capability 8.0") -> Capability:
    """Return the value of --capability. Raises UsageError."""
    from imagefactory.gpu.capability import parse_capability

    try:
        return parse_capability(text)
    except ValueError as error:
        raise UsageError("option-invalid", f"--capability: {error}", hint=hint) from error


def driver_of(text: str) -> str:
    """Return the value of --driver, empty for none. Raises UsageError."""
    from imagefactory.gpu.drivers import read_driver

    try:
        return read_driver(text) if text else ""
    except ValueError as error:
        hint = "`nvidia-smi` shows the version at the top"
        raise UsageError("option-invalid", f"--driver: {error}", hint=hint) from error


def choose_targets(factory: Project, names: tuple[str, ...]) -> tuple[Target, ...]:
    """Return the selected targets of valid recipes, for commands that report the invalid recipes at the end.

    Raises RecipeError if a missing name may belong to an invalid recipe.
    """
    from imagefactory.recipes.expand import select

    try:
        return select(factory.targets, names)
    except NothingSelectedError as error:
        if problems := factory.problems_of(names):
            raise RecipeError(problems) from error
        raise


def explain(error: OSError | EOFError) -> ImagefactoryError:
    """Convert an error of the operating system that no adapter handled into a BuildError."""
    if isinstance(error, OSError):
        prefix = f"cannot use {error.filename}: " if error.filename else ""
        problem = f"{prefix}{os_reason(error)}"
    else:
        problem = str(error) or type(error).__name__
    return BuildError(
        "system-error",
        problem,
        hint="check the disk and its permissions, then run the command again",
    )


runner_option = click.option(
    "--runner",
    type=click.Choice(tuple(RUNNERS)),
    help="Start the image with this.  [default: the setting `runner`, else what fits the engine]",
)


gpus_option = click.option(
    "--gpus",
    metavar="all|GPU[,GPU]...",
    help="Use these GPUs, by number or UUID (also of a MIG slice), as in nvidia-smi -L. Fails without them.",
)


registry_option = click.option(
    "--registry",
    "place",
    default="",
    metavar="HOST[/PATH]",
    help="Use this registry.  [default: the setting `registry`]",
)
