"""The verify command, which runs the GPU suite in an image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import click

from imagefactory.cli.arguments import Command, section
from imagefactory.cli.output import (
    CommandContext,
    ErrorRow,
    capability_of,
    complete_targets,
    exit_with_first_failure,
    gpus_option,
    json_option,
    print_json,
    print_next_command,
    print_result,
    reject_conflict,
    runner_option,
    terminal_width,
)
from imagefactory.errors import CheckFailedError, NoGpuError, UsageError
from imagefactory.verify.report import FULL, NODE, QUICK, SEVERAL

if TYPE_CHECKING:
    from imagefactory.actions.verify import KitDestination, KitFiles, VerifyDependencies, VerifyResult
    from imagefactory.cli.verdicts import PromotionRow
    from imagefactory.verify.report import FormattedGpuReport


class NoGpuRow(TypedDict):
    """An image that was not verified, because this machine has no suitable GPU."""

    name: str
    outcome: Literal["no-gpu"]
    reason: str
    signed: bool


class VerifyRow(TypedDict):
    name: str
    target: str
    outcome: str
    reason: str
    report: FormattedGpuReport
    path: str
    """The file of the report."""
    signed: bool
    note: str
    """Which key signed the verdict, or why none did."""
    keyid: str
    expires: str
    attached: list[str]
    promotion: PromotionRow | None


class VerifyDocument(TypedDict):
    """The outcome of each image, and its verdict."""

    format: Literal["imagefactory.verify/1"]
    results: list[NoGpuRow | VerifyRow]
    errors: list[ErrorRow]


class VerifyKitDocument(TypedDict):
    """The kit that was written."""

    format: Literal["imagefactory.verify-kit/1"]
    target: str
    kit: str
    nonce: str
    manifest: str
    reference: str
    nonce_directory: str
    expires: str


@click.command(cls=Command)
@click.argument("names", metavar="[TARGET|IMAGE]...", nargs=-1, shell_complete=complete_targets)
@section("Checks")
@click.option(
    "--suite",
    "level",
    type=click.Choice((QUICK, FULL, SEVERAL, NODE)),
    default=FULL,
    show_default=True,
    help="Run these checks. several uses all GPUs of the machine at once, for PyTorch images. node is for "
    "--kit: the kit checks a machine by the image's verdicts, in a minute.",
)
@runner_option
@gpus_option
@click.option(
    "--capability", default="", metavar="X.Y", help="Fail unless the GPU has this compute capability."
)
@section("Results")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the report to this file, as JSON.",
)
@click.option("--registry", default="", metavar="HOST[/PATH]", help="Also attach the verdict there.")
@click.option("--promote", is_flag=True, help="Then move the tags to verified images.")
@section("Kit")
@click.option(
    "--kit",
    type=click.Path(path_type=Path, file_okay=False),
    help="Run nothing; write a kit to this directory, for a GPU machine without imagefactory.",
)
@click.option(
    "--nonce-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --kit: store its nonce in this directory.  [default: in the store]",
)
@json_option
@click.pass_obj
def verify(
    call: CommandContext,
    /,
    *,
    names: tuple[str, ...],
    level: str,
    runner: str | None,
    gpus: str | None,
    capability: str,
    registry: str,
    promote: bool,
    output: Path | None,
    kit: Path | None,
    nonce_dir: Path | None,
    as_json: bool,
) -> None:
    """Run the GPU suite inside an image, on a GPU of this machine.

    \b
    imagefactory verify pytorch-2.3-cu121                the image in the store
    imagefactory verify pytorch-2.3-cu121@sha256:...     an image by its digest
    imagefactory verify registry.example.org/pytorch@sha256:...
    imagefactory verify pytorch-2.3-cu121 --kit DIR      for another machine

    To verify on the GPUs of a cluster, use `imagefactory sweep start`.

    If you have a key (`imagefactory key create`), the report is signed as a verdict and attached to the
    image. A kit runs on a GPU machine without imagefactory; `imagefactory sweep collect` then reads its
    results.

    Exit code 0 if the image is verified, 9 if not, also without a GPU.
    """
    from imagefactory.actions.verify import KitDestination, VerifyOptions, verify_and_attach, write_kit

    reject_conflict(
        promote and level == SEVERAL,
        f"--promote and --suite {SEVERAL} exclude each other: tags follow verdicts on one GPU",
        "remove --promote",
    )
    factory, progress = call.factory, call.progress
    if not names:
        raise UsageError("argument-missing", "no image is given", hint="run imagefactory verify TARGET")
    reject_conflict(
        nonce_dir and not kit, "--nonce-dir requires --kit", "add --kit DIR or remove --nonce-dir"
    )
    reject_conflict(
        len(names) > 1 and (output or kit),
        "--output and --kit require exactly one image",
        "pass one image, or remove them",
    )
    reject_conflict(
        kit and (promote or output or runner or gpus),
        "--kit excludes --promote, --output, --runner and --gpus: a kit runs elsewhere",
        "run python3 DIR/run.py --runner ... there, then imagefactory sweep collect DIR --promote here",
    )
    reject_conflict(
        level == NODE and (not kit or nonce_dir or capability),
        f"--suite {NODE} requires --kit, and excludes --nonce-dir and --capability",
        f"run imagefactory verify TARGET --suite {NODE} --kit DIR, then DIR/run.py on the node",
    )
    options = VerifyOptions(
        level=level,
        runner=runner or "",
        gpus=gpus or "",
        capability=str(capability_of(capability)) if capability else "",
        registry=registry,
        promote=promote,
        output=output,
    )
    if kit:
        order = KitDestination(folder=kit, nonce_dir=nonce_dir)
        return _print_kit(write_kit(factory, names[0], options, order, progress), order, as_json=as_json)
    results: list[NoGpuRow | VerifyRow] = []
    with exit_with_first_failure() as failures:
        for name in names:
            with failures.of(name):
                try:
                    run = verify_and_attach(factory, name, options, verify_dependencies(), progress)
                except NoGpuError as error:
                    results.append(NoGpuRow(name=name, outcome="no-gpu", reason=error.message, signed=False))
                    suite = "" if level == FULL else f" --suite {level}"
                    hint = f"{error.hint}; or carry a kit there: imagefactory verify {name}{suite} --kit DIR"
                    raise NoGpuError(error.code, f"{name}: no-gpu: {error.message}", hint=hint) from error
                results.append(_as_json(name, run))
                print_result(_as_text(run), unless=as_json)
                if not run.passed:
                    raise CheckFailedError(
                        "verification-failed",
                        f"{name}: {run.report.outcome}: {run.report.reason}",
                        hint=f"see the details in {run.path}",
                    )
                if options.promote and run.promotion is None:
                    raise CheckFailedError(
                        "verdict-not-signed",
                        f"{name}: no tag is moved: {run.signed.why}",
                        hint="only a signed verdict moves tags",
                    )
                for _, fault in run.promotion.faults if run.promotion else ():
                    failures.add(fault)
        if as_json:
            print_json(
                VerifyDocument(format="imagefactory.verify/1", results=results, errors=failures.as_json())
            )
    if not all(result["signed"] for result in results):
        return print_next_command("key", "create", "lab")
    show_verdicts = options.promote or options.level == SEVERAL
    return (
        print_next_command("verdict", "list", names[0])
        if show_verdicts
        else print_next_command("image", "promote", *names)
    )


def verify_dependencies() -> VerifyDependencies:
    """Return this machine. Tests replace it."""
    from imagefactory.actions.verify import VerifyDependencies

    return VerifyDependencies()


def _as_text(run: VerifyResult) -> str:
    from imagefactory.views.text import format_fields
    from imagefactory.views.verdicts import format_gpu_run, format_promotion

    fields = [("report", f"{run.path} (unsigned: it proves nothing)"), ("verdict", run.signed.why)]
    if run.signed.signed:
        verdict = run.signed.signed.verdict
        fields[-1] = ("verdict", f"{run.signed.why}, expires {verdict.expires:%Y-%m-%d}")
    fields += [("attached", repository) for repository in run.attached]
    blocks = [f"{format_gpu_run(run.report, terminal_width())}\n{format_fields(fields, indent='')}"]
    if run.promotion:
        blocks.append(format_promotion(run.promotion, terminal_width()))
    return "\n\n".join(blocks)


def _as_json(name: str, run: VerifyResult) -> VerifyRow:
    from imagefactory.cli.verdicts import promotion_json
    from imagefactory.serialize import format_time
    from imagefactory.verify.report import format_gpu_report

    signed = run.signed.signed
    return VerifyRow(
        name=name,
        target=run.chosen.subject.target,
        outcome=run.report.outcome.value,
        reason=run.report.reason,
        report=format_gpu_report(run.report),
        path=str(run.path),
        signed=signed is not None,
        note=run.signed.why,
        keyid=signed.verdict.keyid if signed else "",
        expires=format_time(signed.verdict.expires) if signed else "",
        attached=list(run.attached),
        promotion=promotion_json(run.promotion) if run.promotion else None,
    )


def _print_kit(written: KitFiles, order: KitDestination, *, as_json: bool) -> None:
    if as_json:
        return print_json(
            VerifyKitDocument(
                format="imagefactory.verify-kit/1",
                target=written.subject.target,
                kit=str(order.folder),
                nonce=written.nonce,
                manifest=written.subject.manifest,
                reference=written.reference,
                nonce_directory=str(written.nonce_dir),
                expires=written.expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
            )
        )
    if written.gpus:
        gpus = "".join(f"\n  {name}, until {end[:10]}" for name, end in sorted(written.gpus))
        print_result(
            f"wrote {order.folder}, which compares a machine with {written.subject.manifest} on{gpus}"
        )
        return print_next_command(f"{order.folder}/run.py", program="python3")
    source = f"pulls {written.reference}" if written.reference else "add --image: no registry has it"
    print_result(
        f"wrote {order.folder}, valid until {written.expires:%Y-%m-%d}, for {written.subject.manifest}\n"
        f"on a machine with a GPU:  python3 {order.folder}/run.py   ({source})\n"
        f"then, back here:          imagefactory sweep collect {order.folder}"
    )
    return print_next_command(f"{order.folder}/run.py", program="python3")
