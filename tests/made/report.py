"""A signed catalog of many images, read as a report. No GPU is behind it, and its key is thrown away."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from imagefactory.extras.site.action import ReportContents, read_cataloged_report
from imagefactory.extras.site.images import ReportImage, ReportLayer, ReportPackage
from imagefactory.extras.site.tables import TableRequest
from imagefactory.gpu.values import CellClaim, ClaimBasis, Compatibility
from imagefactory.lock.changes import VersionChange
from imagefactory.model import CheckResult, CheckState, Outcome
from imagefactory.oci.manifests import digest_of
from imagefactory.settings.load import load_settings
from imagefactory.trust.catalog import CatalogImage, sign_catalog
from imagefactory.trust.policy import TrustedKey
from imagefactory.trust.verdict import sign
from imagefactory.verify.report import FULL, GpuIdentity, GpuReport, VerifiedImage
from tests.made.catalog import make_catalog, make_image
from tests.made.verdicts import HOST, LAB, LAB_TRUSTED, MADE_UP, NOW, whole_report

GPUS = (
    ("7.0", "Made V100"),
    ("7.5", "Made T4"),
    ("8.0", "Made A100"),
    ("8.6", "Made A40"),
    ("8.9", "Made L4"),
)
GPUS += (("9.0", "Made H100"), ("10.0", "Made B200"), ("12.0", "Made RTX"))
FRAMEWORKS = (("pytorch", "torch"), ("jax", "jax"), ("tensorflow", "tensorflow"))
MEMORY = ("pinned", "pageable")
_FAILED = (Outcome.WRONG_NUMBERS, Outcome.NO_KERNEL, Outcome.LOAD_FAILED, Outcome.TIMEOUT)
_LATENCIES = (
    ("mlp-pytorch-gpu", 0.8),
    ("mlp-onnxruntime", 0.6),
    ("resnet-pytorch-gpu", 5.1),
    ("bert-pytorch-cpu", 64.0),
)


def catalog_report(folder: Path, images: Sequence[CatalogImage], now: datetime = NOW) -> ReportContents:
    """The report of a signed catalog in a file, for a person who trusts its key and has no factory."""
    config = folder / "config" / "imagefactory"
    config.mkdir(parents=True, exist_ok=True)
    path = folder / "catalog.json"
    path.write_bytes(sign_catalog(make_catalog(*images), LAB))
    (config / "imagefactory.toml").write_text(f'catalog = "{path}"\n{format_key_row(LAB_TRUSTED)}')
    environ = {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder), "XDG_CONFIG_DIRS": "/none"}
    settings = load_settings(directory=None, start=folder, environ=environ)
    return read_cataloged_report(settings, environ, (), TableRequest(now=now))


def format_key_row(key: TrustedKey) -> str:
    """`key` as a `[[trust]]` row of the settings."""
    public = base64.b64encode(key.public).decode()
    since, until = key.since.date().isoformat(), key.until.date().isoformat()
    return (
        f'[[trust]]\nname = "{key.name}"\nkeyid = "{key.keyid}"\npublic = "{public}"\n'
        f"from = {since}\nuntil = {until}\n"
    )


def many_images(count: int) -> tuple[CatalogImage, ...]:
    """Images of three frameworks, versions in turn: some are verified on some GPUs, some failed there."""
    return tuple(_image(number) for number in range(count))


def with_contents(report: ReportContents, packages: int = 60) -> ReportContents:
    """The same as a factory would tell it: with layers, packages and what changed."""
    return replace(report, images=tuple(_with_contents(one, packages) for one in report.images))


def _with_contents(image: ReportImage, packages: int) -> ReportImage:
    names = [f"package-{number}" for number in range(packages)]
    return replace(
        image,
        description="An image of the tests",
        layers=tuple(
            ReportLayer(title=name, digest=digest_of(name.encode()), size=9 << 20, unchanged=bool(number % 2))
            for number, name in enumerate(names[:20])
        ),
        packages=tuple(ReportPackage(name=name, version="1.2.3", size=1 << 20) for name in names),
        moves=(
            VersionChange(name="numpy", before="1.26.4", after="2.0.1"),
            VersionChange(name="new", before="", after="1.0"),
        ),
        since="the lock before 2026-11-20",
    )


def _image(number: int) -> CatalogImage:
    family, framework = FRAMEWORKS[number % len(FRAMEWORKS)]
    step = number // len(FRAMEWORKS)
    version, cuda = f"2.{step // 2}", ("12.1", "12.8")[step % 2]
    target = f"{family}-{version}-cu{cuda.replace('.', '')}"
    subject = VerifiedImage(
        target=target,
        **{part: digest_of(f"{target} {part}".encode()) for part in ("index", "manifest", "config")},
    )
    envelopes = []
    for place, (capability, name) in enumerate(GPUS):
        if (number + place) % 3 == 0:
            envelopes.append(_signed(gpu_report(subject, (capability, name), number * 10 + place)))
    return make_image(
        target=target,
        family=family,
        framework=framework,
        version=version,
        cuda=cuda,
        reference=f"registry.example.org/gpu/{family}@{subject.index}",
        subject=subject,
        runtime=cuda,
        required=tuple(capability for capability, _ in GPUS),
        predicted=tuple((capability, _claim(capability, number)) for capability, _ in GPUS[:7]),
        sifs=(),
        envelopes=tuple(envelopes),
    )


def _claim(capability: str, number: int) -> CellClaim:
    answer = (
        Compatibility.NO
        if capability == "10.0"
        else (Compatibility.YES, Compatibility.PARTLY, Compatibility.PTX)[number % 3]
    )
    return CellClaim(
        basis=ClaimBasis.DOCUMENTED if number % 4 == 3 else ClaimBasis.PREDICTED,
        answer=answer,
        rule="code",
        reason=f"libtorch_cuda.so has {'no ' if answer is Compatibility.NO else ''}code for {capability}",
        source="scan of a wheel that is made up",
        driver="525.60.13",
    )


def recorded_numbers() -> tuple[tuple[str, float], ...]:
    """What the check `profile` says of a GPU that does nothing as fast as any data sheet says."""
    curves = {
        **{f"product-{kind}": ((1 << 24, 1e-5), (1 << 34, 5e-3)) for kind in ("fp32", "fp16")},
        **{f"{what}-fp32": ((1 << 28, 1e-4), (1 << 32, 1e-3)) for what in ("convolution", "backward")},
        "move": ((1 << 14, 3e-6), (1 << 28, 2e-3)),
        **{f"{way}-{how}": ((1 << 12, 1e-5), (1 << 27, 2e-2)) for way in ("up", "down") for how in MEMORY},
    }
    numbers = {f"{name}-{work}-s": took for name, points in curves.items() for work, took in points}
    single = {"processors": 30.0, "context-bytes": float(300 << 20), "kernel-s": 4e-6, "launch-s": 7e-6}
    steps = {"step-bert-fp32-8-whole-s": 0.02, "pin-4096-s": 1e-6}
    return tuple(sorted({**numbers, **single, **steps}.items()))


def gpu_report(subject: VerifiedImage, gpu: tuple[str, str], seed: int) -> GpuReport:
    """A report on one GPU; by `seed` most pass, and each took as long as it says."""
    device = GpuIdentity(name=gpu[1], capability=gpu[0], uuid=MADE_UP.uuid, memory=MADE_UP.memory)
    failed = seed % 7 == 3
    plain = whole_report()
    checks = [
        replace(
            check,
            seconds=round(0.2 + (seed * 7 + place * 13) % 40 / 10, 2),
            state=CheckState.FAILED if failed and check.name == "matmul" else check.state,
            numbers=(("float32-error", 1.3e-7 * (place + 1)), ("float32-bound", 2e-6)),
        )
        for place, check in enumerate(plain.checks)
    ]
    numbers = tuple(
        (f"{name}-{part}-ms", round(value * factor * (1 + seed % 5 / 5), 3))
        for name, value in _LATENCIES
        for part, factor in (("p50", 1.0), ("p95", 1.4))
    )
    for name, its in (("portability", numbers), ("profile", recorded_numbers())):
        checks.append(
            CheckResult(name=name, state=CheckState.PASSED, detail="made up", seconds=12.5, numbers=its)
        )
    ended = NOW - timedelta(days=seed % 20, minutes=1)
    return replace(
        plain,
        subject=subject,
        level=FULL,
        nonce=f"{seed:032x}",
        started=ended - timedelta(minutes=2),
        ended=ended,
        device=device,
        hardware=replace(HOST, gpus=(device,)),
        checks=tuple(checks),
        outcome=_FAILED[seed % len(_FAILED)] if failed else Outcome.VERIFIED,
        reason="matmul is off by 0.3" if failed else "all that applies passed",
        contradictions=("predicted to run, and it did not",) if failed else (),
    )


def _signed(report: GpuReport) -> tuple[str, bytes]:
    envelope = sign(report, LAB, now=report.ended, days=60).envelope
    return digest_of(envelope), envelope
