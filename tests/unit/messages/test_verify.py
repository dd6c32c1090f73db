"""The most important messages of verification, verdicts and the catalog, as a person reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.errors import ImagefactoryError
from imagefactory.gpu.knowledge import find_gpu
from imagefactory.trust.catalog import sign_catalog, verify_catalog
from imagefactory.trust.catalog_package import catalog_repository
from imagefactory.trust.keys import find_key, read_signing_key
from imagefactory.trust.policy import named_key, parse_trust, read_text
from imagefactory.trust.verdict import sign
from imagefactory.verify.kits import read_nonce, read_returned_kit
from imagefactory.verify.nonces import LIFETIME, NonceStore, NonceSubject, check_open, check_run
from imagefactory.verify.report import VerifiedImage
from tests.made.catalog import make_catalog
from tests.made.verdicts import LAB, NOW, TRUST, whole_report

NONCE = "0" * 32
RUN = NonceSubject(
    subject=VerifiedImage(target="t", index="sha256:1", manifest="sha256:2", config="sha256:3"),
    suite="sha256:4",
    level="quick",
)


def exposed_key(folder: Path) -> None:
    (folder / "lab.pem").touch()
    (folder / "lab.pem").chmod(0o644)
    read_signing_key(folder / "lab.pem")


def kit_without_result(folder: Path) -> None:
    for name in ("kit.json", "expectations.json"):
        (folder / name).write_text("{}")
    read_returned_kit(folder)


def spent_nonce(folder: Path) -> None:
    nonces = NonceStore(folder)
    nonces.issue(NONCE, RUN, NOW)
    nonces.spend(NONCE, RUN, result="sha256:5", now=datetime(2026, 11, 22, 3, tzinfo=UTC))
    nonces.check(NONCE, RUN, NOW)


def expired_nonce(folder: Path) -> None:
    check_open(replace(NonceStore(folder).issue(NONCE, RUN, NOW), expires=NOW), NOW + LIFETIME)


def nonce_of_a_pool(folder: Path) -> None:
    check_run(NonceStore(folder).issue(NONCE, replace(RUN, pool="slurm"), NOW), RUN)


def expired_catalog(_: Path) -> None:
    catalog = make_catalog()
    verify_catalog(sign_catalog(catalog, LAB), TRUST, catalog.expires)


MESSAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "private-key-exposed": (
        exposed_key,
        "other users can read or write {folder}/lab.pem (mode 644)",
        "chmod 600 {folder}/lab.pem; if others could read it, create a new key and retire this one",
    ),
    "signing-key-not-found": (
        lambda folder: find_key(f"{folder}/lab.pem", {}),
        "signing-key: {folder}/lab.pem is not a file",
        "set the file of a key, or create one: imagefactory key create NAME",
    ),
    "project-not-found": (
        lambda folder: read_text(folder / "imagefactory.toml"),
        "{folder} has no imagefactory.toml",
        "select a project (imagefactory -C DIR key ...), or write your own file: --user",
    ),
    "trust-invalid": (
        lambda folder: parse_trust("[policy]\nexpires-days = 0\n", f"{folder}/imagefactory.toml"),
        "{folder}/imagefactory.toml: [policy] expires-days: expected a number of days",
        "write 1 to 366",
    ),
    "key-not-trusted": (
        lambda folder: named_key("", "lab", f"{folder}/imagefactory.toml"),
        "{folder}/imagefactory.toml: no key 'lab' is trusted",
        "list the keys: imagefactory key list",
    ),
    "kit-invalid": (
        read_nonce,
        "{folder} is not a kit",
        "pass the directory that verify --kit wrote",
    ),
    "kit-without-result": (
        kit_without_result,
        "{folder} has no result yet",
        "run it on the machine with the GPU: python3 {folder}/run.py",
    ),
    "nonce-unknown": (
        lambda folder: NonceStore(folder).look(NONCE),
        f"the nonce {NONCE} was not issued by {{folder}}",
        "pass the nonce store that issued it: --nonce-dir DIR",
    ),
    "nonce-replayed": (
        spent_nonce,
        f"the nonce {NONCE} was already spent on 2026-11-22 03:00 UTC",
        "create a new kit: each kit can produce only one verdict",
    ),
    "nonce-expired": (
        expired_nonce,
        f"the nonce expired at {NOW:%Y-%m-%d %H:%M} UTC",
        "create a new kit",
    ),
    "nonce-other-pool": (
        nonce_of_a_pool,
        "the nonce was issued for slurm, but this result is from no pool",
        "pass the original directory of the kit or sweep: imagefactory sweep collect DIR",
    ),
    "report-not-signable": (
        lambda _: sign(whole_report(hardware=None), LAB, now=NOW, days=90),
        "this report cannot be signed: the host saw no GPU",
        "correct the problem and verify the image again: imagefactory verify TARGET",
    ),
    "catalog-rejected": (
        expired_catalog,
        f"the catalog is rejected: expired, it was valid until {make_catalog().expires:%Y-%m-%dT%H:%M:%SZ}",
        "get a new one from the maintainers of the project (they run imagefactory site publish)",
    ),
    "no-catalog-set": (
        lambda _: catalog_repository(""),
        "no catalog is set, and this directory is not a project",
        "ask your center for its invitation, then run imagefactory site join ADDRESS|FILE; or select a "
        "project: "
        "-C DIR",
    ),
    "gpu-unknown": (
        lambda _: find_gpu("nonsense"),
        "unknown GPU 'nonsense'",
        "`nvidia-smi --query-gpu=compute_cap --format=csv` prints the compute capability",
    ),
}


@pytest.mark.parametrize("code", MESSAGES)
def test_a_message_states_the_problem_and_one_fix(tmp_path: Path, code: str) -> None:
    fail, message, hint = MESSAGES[code]
    with pytest.raises(ImagefactoryError) as caught:
        fail(tmp_path)
    error = caught.value
    assert (error.code, error.message, error.hint) == (
        code,
        message.format(folder=tmp_path),
        hint.format(folder=tmp_path),
    )
