"""A person in an empty folder, and one who joined a site's catalog. No GPU is behind its verdicts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imagefactory.model import Outcome
from imagefactory.trust.catalog import LIFE, CatalogImage, sign_catalog
from imagefactory.trust.keys import PublicKey, SigningKey
from imagefactory.trust.policy import TrustGrant, format_row
from imagefactory.trust.verdict import sign
from tests.made.catalog import make_catalog, make_image
from tests.made.command import Call, Said, say
from tests.made.verdicts import HOST, LAB, MADE_UP, SUITE, digest, whole_report

NOW = datetime.now(UTC).replace(microsecond=0)


def envelope(capability: str, letter: str, key: SigningKey = LAB, **more: Any) -> tuple[str, bytes]:
    gpu = replace(MADE_UP, capability=capability)
    report = whole_report(
        hardware=replace(HOST, gpus=(gpu,)), device=gpu, nonce=letter * 32,
        started=NOW - timedelta(hours=2), ended=NOW - timedelta(hours=1), **more,
    )  # fmt: skip
    return digest(letter), sign(report, key, now=NOW - timedelta(hours=1), days=30).envelope


def person_at(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Somebody in an empty folder, with no settings and no pool. A call fails where its code is another."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))  # no pool can be asked
    for name in ("config", "cache"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "nothing"))
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / "store"))

    def run(*arguments: str, code: int = 0) -> Said:
        said = say(capsys, *arguments)
        assert said.code == code, said
        return said

    return run


def join_site(tmp_path: Path, *more: CatalogImage) -> None:
    """Joins a site whose pytorch 2.3 is verified on 8.0, 2.5 on 9.0 too, and jax is predicted on 7.0."""
    old = make_image(envelopes=(envelope("8.0", "1"),), sifs=())
    new = replace(
        old,
        target="pytorch-2.5-cu124",
        version="2.5.1",
        cuda="12.4",
        envelopes=(envelope("8.0", "2"), envelope("9.0", "3")),
    )
    jax = replace(
        old,
        target="jax-0.4.30-cu12",
        family="jax",
        framework="jax",
        version="0.4.30",
        envelopes=(),
        cuda="12",
    )
    failed = replace(
        old, target="pytorch-2.1-cu121", version="2.1.2", predicted=(),
        envelopes=(envelope("8.0", "4", outcome=Outcome.NO_KERNEL, reason="no code"),),
    )  # fmt: skip
    join_catalog(tmp_path, (old, new, jax, failed, *more))


def join_catalog(tmp_path: Path, images: tuple[CatalogImage, ...]) -> None:
    """Joins a site with these images."""
    made = NOW - timedelta(hours=1)
    catalog = make_catalog(images=images, created=made, expires=made + LIFE, suites=(SUITE,))
    path = tmp_path / "catalog"
    path.write_bytes(sign_catalog(catalog, LAB))
    settings = tmp_path / "config/imagefactory"
    settings.mkdir(parents=True)
    grant = TrustGrant(
        key=PublicKey(name="lab", raw=LAB.public),
        since=(NOW - timedelta(days=9)).date(),
        until=(NOW + timedelta(days=99)).date(),
    )
    (settings / "imagefactory.toml").write_text(f'catalog = "{path}"\n\n{format_row(grant)}')
