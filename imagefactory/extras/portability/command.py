"""The model commands."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    complete_targets,
    json_option,
    print_json,
    print_next_command,
    print_result,
    registry_option,
    runner_option,
    terminal_width,
)
from imagefactory.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from imagefactory.extras.portability.action import PortabilityOptions
    from imagefactory.extras.portability.report import FormattedPortableReport

MOST_BATCHES, LARGEST_BATCH = 8, 65536
REPORT_DIRECTORY = "portable"


class ModelCheckDocument(TypedDict):
    """The report of an image's models in other runtimes."""

    format: Literal["imagefactory.model-check/1"]
    report: FormattedPortableReport
    output: str
    portable: bool
    note: str
    """Which key signed the report, or why none did."""
    attached: list[str]


class ModelStatementRow(TypedDict):
    digest: str
    status: str
    reason: str
    report: FormattedPortableReport | None


class ModelDocument(TypedDict):
    """The signed checks of an image's models, and the files that `model export` wrote."""

    format: Literal["imagefactory.model/1"]
    manifest: str
    statements: list[ModelStatementRow]
    files: list[str]


@click.command(cls=Command)
@click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)
@section("What to compare")
@click.option(
    "--models",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A Python file with a function models() that returns your models.",
)
@click.option(
    "--to",
    multiple=True,
    required=True,
    metavar="RUNTIME[@TARGET]",
    help=(
        "Compare with onnxruntime-cpu, -cuda, -tensorrt, -migraphx, -rocm, openvino-cpu or tvm-cpu, "
        "in another image with @TARGET (repeatable)."
    ),
)
@click.option(
    "--batch",
    "batches",
    default="1,8",
    show_default=True,
    metavar="N,..",
    help="Measure the time of these batch sizes.",
)
@runner_option
@section("Results")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=REPORT_DIRECTORY,
    show_default=True,
    help="Write models and report to this directory.",
)
@registry_option
@json_option
@click.pass_obj
def check(
    call: CommandContext,
    /,
    *,
    name: str,
    models: Path,
    to: tuple[str, ...],
    batches: str,
    runner: str | None,
    place: str,
    output: Path,
    as_json: bool,
) -> None:
    """Check that models compute the same in other runtimes.

    \b
    imagefactory model check pytorch-onnx-2.15-cu132 --models models.py \\
        --to onnxruntime-cuda
    imagefactory model check pytorch-onnx-2.15-cu132 --models models.py \\
        --to onnxruntime-cpu@onnxruntime-1.31-cpu

    Each model is exported to ONNX in the image, run by each runtime, and compared on data that training did
    not use. If all are the same and you have a key, the result is signed and attached with the models.

    models() returns a list of dicts with `name`, `model` (PyTorch, TensorFlow or JAX) and `sample` (NumPy
    arrays by input name). Optional are `held_out`, `tolerance`, `override` and `batched`.

    Exit code 0 if all are the same, 9 if not.
    """
    from imagefactory.extras.portability.action import PortabilityOptions

    options = PortabilityOptions(
        models=models, to=to, batches=_batches(batches), output=output, registry=place, runner=runner or ""
    )
    _port(call, name, options, as_json=as_json)


@click.command(cls=Command)
@click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)
@registry_option
@json_option
@click.pass_obj
def show(call: CommandContext, name: str, place: str, as_json: bool) -> None:
    """Show the signed checks of an image's models.

    \b
    imagefactory model show pytorch-onnx-2.15-cu132
    """
    _show(call, name, place, output=None, as_json=as_json)


@click.command(cls=Command)
@click.argument("name", metavar="TARGET|IMAGE", shell_complete=complete_targets)
@registry_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="models",
    show_default=True,
    help="Write the files to this directory.",
)
@json_option
@click.pass_obj
def export(call: CommandContext, name: str, place: str, output: Path, as_json: bool) -> None:
    """Write the ONNX files of an image's signed models.

    \b
    imagefactory model export pytorch-onnx-2.15-cu132 -o models
    """
    _show(call, name, place, output=output, as_json=as_json)


def _port(call: CommandContext, name: str, options: PortabilityOptions, *, as_json: bool) -> None:
    import json

    from imagefactory.cli.verify import verify_dependencies
    from imagefactory.extras.portability import view as report
    from imagefactory.extras.portability.action import port_models
    from imagefactory.extras.portability.report import format_portable
    from imagefactory.extras.portability.view import format_page
    from imagefactory.fs import replace_text

    run = port_models(call.factory, name, options, verify_dependencies(), call.progress)
    value = format_portable(run.report)
    page = options.output / "portability.html"
    replace_text(options.output / "report.json", json.dumps(value, indent=1) + "\n")
    replace_text(page, format_page(run.report))
    word = report.status_of_check(run.report)
    if as_json:
        print_json(
            ModelCheckDocument(
                format="imagefactory.model-check/1",
                report=value,
                output=str(options.output),
                portable=run.report.portable,
                note=run.why,
                attached=list(run.attached),
            )
        )
    else:
        fields = [*report.format_files(run.report), ("page", str(page)), ("outcome", f"{word}, {run.why}")]
        fields += [("attached", repository) for repository in run.attached]
        print_result(
            f"{report.format_portability(run.report, terminal_width())}\n\n{report.fields_of(fields)}"
        )
    if not run.report.portable:
        raise CheckFailedError(
            "model-not-portable", f"{name}: {word}", hint=f"see the rows above; all details are in {page}"
        )
    if not run.attached:
        return print_next_command("key", "create", "lab")
    return print_next_command("model", "show", name, *_registry(options.registry))


def _show(call: CommandContext, name: str, repository: str, *, output: Path | None, as_json: bool) -> None:
    from imagefactory.extras.portability.action import read_portable, write_models
    from imagefactory.extras.portability.report import format_portable
    from imagefactory.extras.portability.view import format_statements

    result = read_portable(call.factory, name, repository, datetime.now(UTC), call.progress)
    written = write_models(result, output) if output else ()
    if as_json:
        rows = [
            ModelStatementRow(
                digest=row.digest,
                status=row.standing.value,
                reason=row.why,
                report=format_portable(row.statement.report) if row.statement else None,
            )
            for row in result.judged
        ]
        return print_json(
            ModelDocument(
                format="imagefactory.model/1",
                manifest=result.manifest,
                statements=rows,
                files=list(map(str, written)),
            )
        )
    print_result(format_statements(result.judged, result.manifest, terminal_width()))
    for path in written:
        print_result(f"wrote {path}")
    again = result.newest and not written
    return print_next_command("model", "export", name, *_registry(repository)) if again else None


def _registry(repository: str) -> tuple[str, ...]:
    return ("--registry", repository) if repository else ()


def _batches(text: str) -> tuple[int, ...]:
    """Return the batch sizes, sorted. Raises UsageError for an invalid list."""
    parts = [part.strip() for part in text.split(",")]
    fine = all(part.isdecimal() and 0 < int(part) <= LARGEST_BATCH for part in parts)
    if not fine or len(parts) > MOST_BATCHES:
        raise UsageError(
            "option-invalid",
            f"--batch {text} is not a list of at most {MOST_BATCHES} sizes from 1 to {LARGEST_BATCH}",
            hint="write, for example, --batch 1,8,32",
        )
    return tuple(sorted({int(part) for part in parts}))
