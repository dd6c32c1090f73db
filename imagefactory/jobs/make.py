"""From a target's name to a submit file in this folder: what is offered, what of it is proven, what to write.

    Catalogue + trust -> Offer -> Form -> text, for write.py: FILE.sub (and FILE.dag with run-1/, run-2/, ...)

Pure: nothing is submitted or written. Raises FactoryError alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from imagefactory.trust.catalog import ASK_CENTER
from imagefactory.catalogue.model import Catalogue, Offer
from imagefactory.trust.offers import find_offer, judge_offer
from imagefactory.errors import CheckFailedError, NothingSelectedError, UsageError
from imagefactory.gpu.builds import rocm_of
from imagefactory.schedulers.pool import MACHINE_HAS, ImageKind, Inventory
from imagefactory.schedulers.sites import Site
from imagefactory.settings.choices import KUBERNETES, SLURM
from imagefactory.jobs import slurm
from imagefactory.submit.forms import ImageForm, choose_form, expected_grounds, forms_of
from imagefactory.submit.gather import gathering
from imagefactory.jobs.kubernetes import SUFFIX, format_manifest
from imagefactory.submit.places import Wish
from imagefactory.jobs.offer import Grounds
from imagefactory.jobs.slurm import NO_GPU, SlurmRequest, format_sbatch, request_gpus
from imagefactory.jobs.htcondor import GATHER, SubmitRun, SubmittedImage, asked_room, format_runs, format_submit
from imagefactory.submit.trial import first_trial, without_gpus
from imagefactory.trust.claims import work_together
from imagefactory.trust.verdict import Judged, Standing
from imagefactory.trust.policy import Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitAsk:
    """What a person asked for. `kind` is None for what fits best, `run.name` empty for the target's,
    `run.executable` for a first trial.

    `folder` is where .sif files lie, `predicted` whether predictions are taken too, and `faulty` those where
    some calls meet a known fault. `own`: the images are of a factory that the person works in. `rows` are of
    a sweep, without the count of runs. `inventory` are a Slurm cluster's nodes, None where none was asked.
    `files` are what a Job of Kubernetes takes along, by name. `prefix` is what commands name the target with:
    its center, where several are joined.
    """

    target: str
    site: Site
    kind: ImageKind | None
    folder: str
    run: SubmitRun
    rows: tuple[tuple[str, ...], ...] = ()
    predicted: bool = False
    faulty: bool = False
    own: bool = False
    inventory: Inventory | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitMade:
    """A submit file not yet written, and the DAG of a sweep, empty for one job and where the file has it.

    `gather` is the file of the job that gathers a sweep's results, empty where none does. `suffix` is the
    files', `request` what a batch script asks Slurm for, None of HTCondor's files. `together` are the
    capabilities of which as many GPUs as a job asks for were verified to work together.
    """

    taken: SubmittedImage
    run: SubmitRun
    text: str
    dag: str = ""
    own: bool = False
    request: SlurmRequest | None = None
    suffix: str = ".sub"
    gather: str = ""
    together: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return f"{self.run.name}{self.suffix}"

    @property
    def gather_file(self) -> str:
        return f"{self.run.name}-{GATHER}{self.suffix}" if self.gather else ""

    @property
    def fetch(self) -> str:
        """What this person does to have the file of the image. Only who has the factory can make it."""
        asks = f"ask the maintainer of the catalog for {Path(self.taken.form.image.address).name}"
        return self.taken.form.fetch or (
            f"imagefactory export {self.taken.target} --format sif" if self.own else asks
        )


def make_submit(catalogue: Catalogue, ask: SubmitAsk, trust: Trust, now: datetime) -> SubmitMade:
    """Decides all that the file says. Pure.

    Raises NothingSelectedError for a target that is not offered, and as `submit_offer`.
    """
    offer = find_offer(catalogue, ask.target, trust, now)
    made = submit_offer(offer, ask, trust, now)
    return replace(made, together=work_together(offer.judged, made.run.gpus))


def submit_offer(offer: Offer, ask: SubmitAsk, trust: Trust, now: datetime) -> SubmitMade:
    """The same of an offer that is judged already. An image for CPUs alone needs no verdict. Pure.

    Raises NothingSelectedError for a form that is not offered, CheckFailedError where nothing of it may be
    relied on, UsageError for a value that cannot stand in a submit file.
    """
    image = offer.image
    own = image.target if ask.own else ""
    form = choose_form(forms_of(offer, ask.folder), ask.site, ask.kind, own=own)
    grounds, run = form.grounds, replace(ask.run, name=ask.run.name or image.target)
    if rocm_of(image.cuda) and ask.site.batch != KUBERNETES:
        raise UsageError(
            "amd-not-supported",
            f"{image.target} is for AMD GPUs, and HTCondor ads do not show the processor of an AMD GPU",
            hint="write the submit file manually, and name the machines in its requirements",
        )
    if image.gpu:
        hoped = expected_grounds(grounds, image, faulty=ask.faulty)
        verified = tuple(one for one in hoped.classes if one.proven)
        grounds = hoped if ask.predicted else replace(grounds, classes=verified)
        if not grounds.classes:
            raise _not_verified((offer, form), hoped, trust, ask)
    else:
        run = without_gpus(run, image.target)
    taken = SubmittedImage(
        target=image.target,
        platform=image.platform,
        form=replace(form, grounds=grounds),
        classes=grounds.classes,
        judged=now,
    )
    run = run if run.executable else first_trial(run, image.framework)
    if ask.site.batch == SLURM:
        request = request_gpus(taken, run, ask.inventory) if run.gpus else NO_GPU
        script = format_sbatch(taken, run, request, ask.rows, ask.site.own)
        last = gathering(run, len(ask.rows), sent=False)
        return SubmitMade(
            taken=taken,
            run=run,
            text=script,
            own=ask.own,
            request=request,
            suffix=slurm.SUFFIX,
            gather=format_sbatch(taken, last, NO_GPU, (), ask.site.own) if run.gather else "",
        )
    if ask.site.batch == KUBERNETES:
        text = format_manifest(taken, run, ask.rows, ask.files)
        return SubmitMade(taken=taken, run=run, text=text, own=ask.own, suffix=SUFFIX)
    text = format_submit(taken, run, ask.site)
    made = SubmitMade(taken=taken, run=run, text=text, own=ask.own)
    if not run.columns:
        return made
    if run.gather:
        made = replace(made, gather=format_submit(taken, gathering(run, len(ask.rows), sent=True), ask.site))
    return replace(made, dag=format_runs(made.file, run.columns[1:], ask.rows, made.gather_file))


def wish_of(made: SubmitMade, site: Site) -> Wish:
    """What the jobs of that file ask of machines and GPUs, beside the kinds of GPU."""
    image, run = made.taken.form.image, made.run
    memory, disk = asked_room(image, run)
    return Wish(
        gpus=run.gpus,
        gpu_memory=run.gpu_memory,
        cpus=run.cpus,
        memory=memory,
        disk=disk,
        mig=run.mig,
        platform=made.taken.platform,
        needs=(MACHINE_HAS[image.kind], *site.attributes(image.address)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One line of what a catalogue offers: capabilities (`8.0`) on which it is verified, and is predicted to
    run, and the kinds of image there are; `kind` is the one that those are verified of. Without `gpu` it is
    for CPUs alone."""

    target: str
    gpu: bool
    kind: str
    kinds: tuple[str, ...]
    verified: tuple[str, ...]
    predicted: tuple[str, ...]


def list_offers(catalogue: Catalogue, ask: SubmitAsk, trust: Trust, now: datetime) -> tuple[Offered, ...]:
    """All that a catalogue offers for a site, as `make_submit` would take it; no target is asked for.

    Raises NothingSelectedError where that is nothing.
    """
    rows = []
    for image in catalogue.images:
        forms = forms_of(judge_offer(catalogue, image, trust, now), ask.folder)
        try:
            form = choose_form(forms, ask.site, ask.kind)
        except NothingSelectedError:
            continue
        hoped = expected_grounds(form.grounds, image)
        rows.append(
            Offered(
                target=image.target,
                gpu=image.gpu,
                kind=form.image.kind.value,
                kinds=tuple(dict.fromkeys(one.image.kind.value for one in forms)),
                verified=tuple(str(one.capability) for one in form.grounds.classes),
                predicted=tuple(str(one.capability) for one in hoped.classes if not one.proven),
            )
        )
    if not rows:
        raise NothingSelectedError(
            "no-image-offered",
            f"no image that a job at site {ask.site.name} can use",
            hint="run imagefactory export TARGET --format sif, or imagefactory push TARGET"
            if ask.own
            else "ask your center to publish images for its jobs, or choose another site with --site",
        )
    return tuple(rows)


# --- deciding --------------------------------------------------------------------------------------


def _not_verified(
    chosen: tuple[Offer, ImageForm], hoped: Grounds, trust: Trust, ask: SubmitAsk
) -> CheckFailedError:
    """Why there is nothing to write, what is predicted, and what this person can do about it."""
    offer, form = chosen
    name, kind = f"{ask.prefix}{offer.image.target}", form.image.kind
    judged = _judged_of(offer, form)
    said = [f"{name} ({kind}) is not verified on any GPU by a key that you trust"]
    if not trust.keys:
        said[0] = f"{name}: you trust no key, so no verdict counts"
    poor = [judgement for judgement in judged if judgement.standing is not Standing.GOOD]
    said += [f"a verdict is {judgement.standing.value}: {judgement.why}" for judgement in poor[:5]]
    said += [f"not {capability}: {why}" for capability, why in form.grounds.refused]
    said += [f"not {row.where}: {row.said}" for row in form.grounds.revoked if not row.capability]
    guessed = [str(gpu_class.capability) for gpu_class in hoped.classes]
    against = [
        str(capability) for capability, _ in hoped.refused if (capability, _) not in form.grounds.refused
    ]
    said.append(f"predicted to run on {', '.join(guessed)}" if guessed else "no GPU is predicted to run it")
    said += [f"predicted or documented not to run on {', '.join(against)}"] if against else []
    strangers = not trust.keys or any(judgement.standing is Standing.WRONG_KEY for judgement in poor)
    if ask.own:
        hint = f"verify it: imagefactory verify {name} --pool htcondor"
        if strangers:
            hint = (
                "compare the fingerprint of the key with its owner, then run imagefactory keys trust FILE.pub"
            )
    else:
        hint = (
            f"choose another image (imagefactory find {offer.image.family}) or ask your center to verify it"
        )
        if strangers:
            hint = f"{ASK_CENTER}; then run imagefactory join ADDRESS|FILE and compare them"
    if guessed:
        hint += f"; or accept the risk: imagefactory submit {name} --accept predicted"
    return CheckFailedError("not-verified", "; ".join(said), hint=hint)


def _judged_of(offer: Offer, form: ImageForm) -> Sequence[Judged]:
    own = next((one.judged for one in offer.sifs if one.sif.subject == form.image.subject), None)
    return offer.judged if own is None else own


def summary(made: SubmitMade) -> Mapping[str, object]:
    """What was decided, for `--json`."""
    image = made.taken.form.image
    return {
        "target": made.taken.target,
        "image": {
            "kind": image.kind.value,
            "address": image.address,
            "manifest": image.subject.manifest,
            "config": image.subject.config,
        },
        "gpus": [
            {
                "capability": str(gpu_class.capability),
                "cuda": gpu_class.cuda,
                "basis": gpu_class.claim.basis.value,
                "reason": gpu_class.claim.reason,
                "source": gpu_class.claim.source,
            }
            for gpu_class in made.taken.classes
        ],
        "not": [
            {"capability": str(capability), "reason": why}
            for capability, why in made.taken.form.grounds.refused
        ],
    }
