"""The inspect command, which shows what an image, wheel or library can run on by its GPU code."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import (
    Call,
    capability_of,
    complete_targets,
    driver_of,
    json_option,
    say,
    say_json,
    terminal_width,
)
from imagefactory.errors import EXIT_CHECK, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagefactory.gpu.capability import Capability
    from imagefactory.gpu.values import Answer, Claim
    from imagefactory.views.inspect import Inquiry
    from imagefactory.stages.scan import Inspected


@click.command()
@click.argument("name", metavar="WHAT", shell_complete=complete_targets)
@click.option(
    "--gpu", "gpus", multiple=True, metavar="NAME", help='Answer for a GPU: V100, "RTX 5090", gfx90a.'
)
@click.option("--capability", "capabilities", multiple=True, metavar="X.Y", help="Answer for it.")
@click.option("--driver", default="", metavar="VERSION", help="The driver for Linux there: 535 or 535.54.03.")
@click.option("--all", "every", is_flag=True, help="Show all libraries and all capabilities.")
@json_option
@click.pass_obj
def inspect(
    call: Call,
    name: str,
    gpus: tuple[str, ...],
    capabilities: tuple[str, ...],
    driver: str,
    every: bool,
    as_json: bool,
) -> None:
    """Predict on which GPUs something runs, from the GPU code in it. Needs no GPU.

    Where verdicts on that very image are at hand and can be relied on, what was verified comes first.

    \b
      imagefactory inspect pytorch-2.3-cu121                     a target: its image, else its lock's packages
      imagefactory inspect pytorch:2.3-cu121                     an image of the store, or its digest
      imagefactory inspect registry.example.org/pytorch:2.3      an image of a registry
      imagefactory inspect torch-2.9.1-cp311-cp311-linux.whl     a wheel, a .sif, a folder, one library
      imagefactory inspect pytorch-2.3-cu121 --gpu "RTX 5090"    one answer in one line, and so for each --gpu

    With --gpu or --capability the exit code is 0 where all of it runs, on each of them, and 9 where not.
    """
    from imagefactory.gpu.contradictions import contradictions
    from imagefactory.gpu.frameworks import cpu_only
    from imagefactory.gpu.predict import predict_all
    from imagefactory.views.inspect import RUNS, Inquiry, Inspection, format_inspection
    from imagefactory.report.inspect_json import inspection_json
    from imagefactory.actions.inspect import inspect_place, inspected_verdicts
    from imagefactory.trust.claims import verified_claims

    driver = driver_of(driver)
    queries = [_gpu_asked(gpu, driver) for gpu in gpus]
    for text in capabilities:
        capability = capability_of(text, "to pass the name of a GPU, use --gpu")
        queries.append(Inquiry(title=str(capability), capability=capability, driver=driver))
    if driver and queries and all(query.capability.processor for query in queries):
        raise UsageError("option-conflict", "--driver does not apply to AMD GPUs", hint="remove --driver")
    access = call.access
    inspected = inspect_place(access, lambda: call.factory, name, call.progress)
    verified = verified_claims(inspected_verdicts(access, name, inspected.digest, datetime.now(UTC)), driver)
    if queries:
        answers = [_answer(name, query, inspected, verified) for query in queries]
        if not as_json:
            say("\n".join(line for _, line, _ in answers))
        elif len(answers) == 1:
            say_json("inspect-answer", answers[0][2])
        else:
            say_json("inspect-answers", {"answers": [value for _, _, value in answers]})
        raise click.exceptions.Exit(0 if all(answer in RUNS for answer, _, _ in answers) else EXIT_CHECK)
    inspection = Inspection(
        name=name,
        how=inspected.how,
        digest=inspected.digest,
        platform=inspected.platform,
        contents=inspected.contents,
        predictions=predict_all(inspected.contents, driver),
        cpu_only=cpu_only(inspected.contents),
        contradictions=contradictions(inspected.contents),
        verified=verified,
    )
    if as_json:
        return say_json("inspect", inspection_json(inspection))
    return say(format_inspection(inspection, terminal_width(), every=every))


def _answer(
    name: str, query: Inquiry, inspected: Inspected, verified: Mapping[Capability, Claim]
) -> tuple[Answer, str, dict[str, object]]:
    from imagefactory.gpu.amd import predict_amd
    from imagefactory.gpu.cells import beside
    from imagefactory.gpu.predict import predict
    from imagefactory.views.inspect import format_answer
    from imagefactory.report.inspect_json import prediction_json

    scanned = (
        predict_amd(inspected.contents, query.target)
        if query.target
        else predict(inspected.contents, query.capability, query.driver, gpu=query.title)
    )
    prediction = beside(scanned, inspected.platform, query.host)
    proof = verified.get(query.capability) if prediction is scanned else None
    value = {"name": name, "gpu": query.title, "driver_asked": query.driver, **prediction_json(prediction)}
    value["verified"] = proof
    line = format_answer(name, query, prediction, proof)
    answer = (proof or prediction).answer
    return answer, line, {**value, "from": inspected.how, "digest": inspected.digest}


def _gpu_asked(gpu: str, driver: str) -> Inquiry:
    from imagefactory.gpu.knowledge import find_gpu
    from imagefactory.views.inspect import Inquiry

    if gpu.lower().startswith("gfx"):
        return _processor_asked(gpu)
    known = find_gpu(gpu)
    driver = "" if known.capability.processor else driver
    title = f"{known.name} ({known.capability})"
    return Inquiry(title=title, capability=known.capability, driver=driver, host=known.host)


def _processor_asked(gpu: str) -> Inquiry:
    """Return an AMD processor, with or without features. Raises UsageError for an incomplete name."""
    from imagefactory.gpu.capability import parse_capability, parse_code
    from imagefactory.views.inspect import Inquiry

    try:
        target = parse_code(gpu.lower()).processor
        return Inquiry(title=target, capability=parse_capability(target.partition(":")[0]), target=target)
    except ValueError as error:
        raise UsageError(
            "option-invalid",
            f"'{gpu}' is not an AMD processor",
            hint="write --gpu gfx90a or --gpu gfx90a:xnack-",
        ) from error
