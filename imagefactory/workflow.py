"""The two ways through a factory, each step in the order in which it happens.

    make:   lock -> define -> build -> push
    prove:  choose -> run -> report -> sign -> attach -> promote

A way does nothing by itself: what a step does, and what it raises, stands in its stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.factory import Factory
from imagefactory.model import Outcome, Target
from imagefactory.progress import Progress
from imagefactory.stages.build import BuildOptions, Built, build_image, check_build
from imagefactory.stages.candidates import Promoting
from imagefactory.stages.choose import Chosen, check_name, choose_image
from imagefactory.stages.define import define_target
from imagefactory.stages.promote import Promotion, promote
from imagefactory.stages.push import Pushed, PushOptions, push_target
from imagefactory.stages.sign import SignedReport, sign_report, signing_key
from imagefactory.stages.statements import attach_signed
from imagefactory.stages.verdicts import local_place, place_of
from imagefactory.stages.verify import VerifyBench, VerifyOptions, check_output, keep_report, verify_image
from imagefactory.verify.model import GpuReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """`push` is None for an image that stays here; `built` hears of it before it is sent anywhere."""

    build: BuildOptions
    push: PushOptions | None
    built: Callable[[Built], None]


def make_image(factory: Factory, target: Target, making: Making, progress: Progress) -> Pushed | None:
    """From the lock that `imagefactory lock` wrote to an image that was tried; what passed is pushed."""
    check_build(making.build)
    definition = define_target(factory, target)
    built = build_image(factory, definition, making.build, progress)
    making.built(built)
    if making.push is None or not built.passed:
        return None
    return push_target(factory, target, replace(making.push, made=built.image), progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One verification. `attached` are the places that have the verdict, `promotion` what became of tags."""

    chosen: Chosen
    report: GpuReport
    path: Path
    signed: SignedReport
    attached: tuple[str, ...] = ()
    promotion: Promotion | None = None

    @property
    def verified(self) -> bool:
        return self.report.outcome is Outcome.VERIFIED


def prove_image(
    factory: Factory, name: str, options: VerifyOptions, bench: VerifyBench, progress: Progress
) -> Verified:
    """From a name to a verdict. Raises NoGpuError where this machine has no GPU; nothing is fetched then."""
    check_name(factory, name)
    bench.evidence.read()
    key = signing_key(factory)
    if options.promote and key is None:
        raise UsageError(
            "--promote needs a verdict, and no key signs here", hint="imagefactory keys new NAME"
        )
    if options.output:
        check_output(options.output)
    chosen = choose_image(factory, name, options.registry, progress)
    report = verify_image(factory, chosen, options, bench, progress)
    path = keep_report(factory, report, options.output)
    made = sign_report(factory, report, key, bench.clock())
    done = Verified(chosen=chosen, report=report, path=path, signed=made)
    if made.signed is None:
        return done
    target, where = chosen.definition.target, chosen.where
    done = replace(done, attached=attach_signed(factory, made.signed, where, progress))
    if not options.promote:
        return done
    place = place_of(factory, where) if where else local_place(factory, target.family)
    wanted = Promoting(target=target, place=place, now=bench.clock())
    return replace(done, promotion=promote(factory, wanted, progress))
