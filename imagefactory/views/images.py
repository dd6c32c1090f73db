"""What a build made, as a person reads it."""

from __future__ import annotations

from imagefactory.gpu.capability import parse_capability
from imagefactory.gpu.platforms import emulated_here
from imagefactory.model import CheckState, Report, Target
from imagefactory.oci.model import Image
from imagefactory.progress import format_bytes
from imagefactory.views.text import format_fields
from imagefactory.actions.build import Built


def format_report(report: Report) -> str:
    """A smoke test that failed: a line for each fault, then the other checks by name."""
    failed = [check for check in report.checks if check.state is CheckState.FAILED]
    lines = []
    for check in failed:
        first, *others = check.detail.split("; ")
        lines += [f"{check.name}  FAILED  {first}".rstrip(), *(f"  {other}" for other in others)]
    for state, words in (
        (CheckState.PASSED, "passed"),
        (CheckState.NOT_APPLICABLE, "not applicable"),
        (CheckState.NOT_RUN, "not run"),
    ):
        names = [check.name for check in report.checks if check.state is state]
        lines += [f"{words}: {', '.join(names)}"] if names else []
    return "\n".join(lines)


def smoke_line(report: Report | None) -> str:
    if report is None:
        return "not run (--no-smoke)"
    if not report.passed:
        return f"FAILED: {report.failure}"
    count = sum(check.state is CheckState.PASSED for check in report.checks)
    kept = ", kept from an earlier run" if report.from_record else ""
    return f"passed inside the image: {count} checks on the CPU{kept}"


def format_built(built: Built, store: str) -> str:
    """What a build made, where it is, and what is not yet proven."""
    image, target, report = built.image, built.target, built.report
    gpu = report.gpu.value if report is not None else "not-tested"
    times = ", ".join(f"{name} {seconds:.1f}s" for name, seconds in built.seconds)
    fields = [("image", f"{image.name} in {store}")]
    if isinstance(image, Image):
        size = f"{format_bytes(image.size)} in {len(image.layers)} layers"
        fields += [(name, f"{digest}\n{use}") for name, digest, use in _digests(image)]
        fields.append(("size", size))
    else:
        fields += [("digest", image.digest), ("file", str(image.path))]
        fields.append(("size", format_bytes(image.file.size)))
    fields.append(("built", ("now" if built.fresh else "nothing changed") + (f" ({times})" if times else "")))
    if not built.published_base:
        fields.append(("note", "the base has newer packages than locked: not the published digest"))
    how = ", emulated" if emulated_here(target.platform) and report is not None else ""
    fields.append(("smoke test", smoke_line(report) + how))
    if report is not None and not report.passed:
        fields.append(("", format_report(report)))
    if target.gpu:
        must = f"it must support {_capabilities(target)}"
        fields.append(("on a GPU", f"{gpu}; {must}: imagefactory verify {target.name}"))
    fields += [
        (
            "try it",
            f"imagefactory run {target.name} -- python"
            if isinstance(image, Image)
            else f"apptainer exec {image.path} python",
        ),
    ]
    return f"{target.name}\n{format_fields(fields)}"


def _digests(image: Image) -> tuple[tuple[str, str, str], ...]:
    """Each digest, and what it is for."""
    return (
        ("digest", image.digest, "its name for pull, run, verify and submit files (the index)"),
        ("manifest", image.manifest, "what verdicts speak of: this platform's layers as they are packed"),
        ("config", image.config, "docker's image ID; stays where the same layers are packed anew"),
    )


def _capabilities(target: Target) -> str:
    return ", ".join(parse_capability(capability).sm for capability in target.capabilities)
