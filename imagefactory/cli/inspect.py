"""The command that says what an image, a wheel or a library can run on, by its own GPU code: inspect."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from imagefactory.cli.output import Call, complete_targets, json_option, say, say_json
from imagefactory.errors import EXIT_CHECK, UsageError

if TYPE_CHECKING:
    from imagefactory.gpu.capability import Capability
    from imagefactory.gpu.model import Prediction
    from imagefactory.report.inspect import Inquiry
    from imagefactory.stages.scan import Inspected


@click.command()
@click.argument("name", metavar="WHAT", shell_complete=complete_targets)
@click.option("--gpu", metavar="NAME", help='Answer for one GPU: V100, "GTX 1080 Ti", gfx90a.')
@click.option("--capability", metavar="X.Y", help="Answer for one compute capability.")
@click.option("--driver", default="", metavar="VERSION", help="The driver for Linux there: 535 or 535.54.03.")
@click.option("--all", "every", is_flag=True, help="Show all libraries and all capabilities.")
@json_option
@click.pass_obj
def inspect(
    call: Call, name: str, gpu: str | None, capability: str | None, driver: str, every: bool, as_json: bool
) -> None:
    """Say what WHAT can run on, predicted from the GPU code that is in it. Needs no GPU.

    Where verdicts on that very image are at hand and can be relied on, what was verified comes first.

    \b
      imagefactory inspect pytorch-2.3-cu121                     a target: its image, else its lock's packages
      imagefactory inspect pytorch:2.3-cu121                     an image of the store, or its digest
      imagefactory inspect registry.example.org/pytorch:2.3      an image of a registry
      imagefactory inspect torch-2.9.1-cp311-cp311-linux.whl     a wheel, a .sif, a folder, one library
      imagefactory inspect pytorch-2.3-cu121 --gpu "RTX 5090"    one answer in one line

    With --gpu or --capability the exit code is 0 where all of it runs and 9 where not.
    """
    from imagefactory.gpu.contradictions import contradictions
    from imagefactory.gpu.frameworks import cpu_only
    from imagefactory.gpu.predict import predict, predict_all
    from imagefactory.report.compat import claim_json
    from imagefactory.report.inspect import RUNS, Inspection, format_answer, format_inspection
    from imagefactory.report.inspect_json import inspection_json, prediction_json
    from imagefactory.stages.inspect import inspect_place, inspected_verdicts
    from imagefactory.verdicts.claims import verified_claims

    amd = _amd_target(gpu or "")
    if amd and (driver or capability):
        raise UsageError("what AMD's GPUs run depends on no driver or capability here", hint="leave it out")
    asked = None if amd else _asked(gpu, capability, driver)
    access = call.access
    inspected = inspect_place(access, lambda: call.factory, name, call.progress)
    if amd:
        return _say_amd(name, amd, inspected, as_json=as_json)
    verified = verified_claims(inspected_verdicts(access, name, inspected.digest, datetime.now(UTC)), driver)
    if asked is not None:
        prediction = _with_driver(predict(inspected.contents, asked[0]), driver)
        proof = verified.get(asked[0])
        if as_json:
            value = {
                "name": name,
                "gpu": asked[1].title,
                "driver_asked": driver,
                **prediction_json(prediction),
            }
            value["verified"] = claim_json(proof) if proof else None
            say_json("inspect-answer", {**value, "from": inspected.how, "digest": inspected.digest})
        else:
            say(format_answer(name, asked[1], prediction, proof))
        raise click.exceptions.Exit(0 if (proof or prediction).answer in RUNS else EXIT_CHECK)
    inspection = Inspection(
        name=name,
        how=inspected.how,
        digest=inspected.digest,
        contents=inspected.contents,
        predictions=tuple(_with_driver(prediction, driver) for prediction in predict_all(inspected.contents)),
        cpu_only=cpu_only(inspected.contents),
        contradictions=contradictions(inspected.contents),
        verified=verified,
    )
    if as_json:
        return say_json("inspect", inspection_json(inspection))
    return say(format_inspection(inspection, every=every))


def _amd_target(gpu: str) -> str:
    """A target of AMD's, empty for the name of another GPU. Raises UsageError for what only begins as one."""
    from imagefactory.gpu.capability import parse_code

    if not gpu.lower().startswith("gfx"):
        return ""
    try:
        return parse_code(gpu.lower()).processor
    except ValueError as error:
        raise UsageError(
            f"'{gpu}' is no processor of AMD's", hint="write --gpu gfx90a, or gfx90a:xnack-"
        ) from error


def _say_amd(name: str, target: str, inspected: Inspected, *, as_json: bool) -> None:
    from imagefactory.report.inspect import RUNS, answer_amd

    answer, reason = answer_amd(inspected.contents, target)
    if as_json:
        value = {"name": name, "gpu": target, "basis": "predicted", "answer": answer.value, "reason": reason}
        say_json("inspect-answer", {**value, "from": inspected.how, "digest": inspected.digest})
    else:
        say(f"{name} on {target}: {answer} (predicted): {reason}")
    raise click.exceptions.Exit(0 if answer in RUNS else EXIT_CHECK)


def _asked(gpu: str | None, capability: str | None, driver: str) -> tuple[Capability, Inquiry] | None:
    """The capability of the question, None without one. Raises UsageError."""
    from imagefactory.gpu.capability import parse_capability
    from imagefactory.gpu.knowledge import find_gpu
    from imagefactory.report.inspect import Inquiry

    if gpu and capability:
        raise UsageError("--gpu and --capability ask for the same", hint="leave one out")
    if gpu:
        known = find_gpu(gpu)
        title = f"{known.name} ({known.capability})"
        return known.capability, Inquiry(title=title, driver=driver)
    if capability:
        try:
            parsed = parse_capability(capability)
        except ValueError as error:
            raise UsageError(str(error), hint="a GPU's name goes with --gpu") from error
        return parsed, Inquiry(title=str(parsed), driver=driver)
    return None


def _with_driver(prediction: Prediction, driver: str) -> Prediction:
    from imagefactory.gpu.predict import with_driver

    if not driver:
        return prediction
    try:
        return with_driver(prediction, driver)
    except ValueError as error:
        raise UsageError(str(error), hint="write --driver 535, or 535.54.03") from error
