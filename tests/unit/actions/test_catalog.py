"""A factory makes a catalog of what its registry has, and others read it there with no factory at all."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner, Result

from imagefactory.actions.catalog import (
    CatalogRequest,
    ImageFacts,
    build_catalog,
    facts_of,
    predicted_claims,
    unpacked_size,
)
from imagefactory.actions.read_catalog import read_catalog
from imagefactory.actions.transfer import PushOptions, explain_no_candidate, push_target
from imagefactory.build.base.image import write_index
from imagefactory.cli import cli
from imagefactory.errors import (
    CheckFailedError,
    NothingSelectedError,
    RegistryError,
    StatementError,
    UsageError,
)
from imagefactory.gpu.knowledge import processors
from imagefactory.gpu.values import Cell, ClaimBasis, Compatibility
from imagefactory.lock.debian.lock import format_base_lock, read_base_lock
from imagefactory.matrix.plan import CellRuling
from imagefactory.model import Target
from imagefactory.oci.candidates import APPROVAL_TYPE, REVOCATION_TYPE, plain_tag
from imagefactory.oci.graph import EMPTY, EMPTY_BLOB, StoreRepository, artifact_of, read_manifest
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    digest_of,
    format_descriptor,
)
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.sif import SIF_TYPE, SifOrigin, sif_reference, store_sif
from imagefactory.progress import QuietProgress
from imagefactory.project import Project
from imagefactory.settings.choices import SettingValue
from imagefactory.settings.load import NONCE_STORE_KEY, load_settings
from imagefactory.trust.approval import ApprovalSubject, sign_approval
from imagefactory.trust.attached import SignedStatement, attach, read_subject
from imagefactory.trust.catalog import LIFE, Catalog, CatalogImage, CatalogSource, sign_catalog
from imagefactory.trust.catalog_package import CURRENT, pack_artifact
from imagefactory.trust.judgement import RevocationRequest, sign_revocation
from imagefactory.trust.keys import SigningKey, make_key, read_signing_key
from imagefactory.trust.offers import build_artifact, find_offer
from imagefactory.trust.policy import read_trust
from tests.made.catalog import PREDICTED
from tests.made.errors import fails
from tests.made.factory import NAME
from tests.made.layout import add_image
from tests.made.pushed import SHARED_KEY, elsewhere, push, put_base, verdict_on
from tests.made.registry import RegistryMadeHere
from tests.made.trusted import trust, write_settings
from tests.made.values import make_lock
from tests.made.verdicts import LAB, NOW, STRANGER

Files = Mapping[str, str]


def made_of(factory: Project, target: Target, registry: str = "", now: datetime = NOW) -> Catalog:
    making = CatalogRequest(targets=(target,), now=now, registry=registry)
    return build_catalog(factory, making, QuietProgress()).catalog


def the_image(catalog: Catalog) -> CatalogImage:
    (image,) = catalog.images
    return image


def family(registry: RegistryMadeHere) -> StoreRepository:
    return StoreRepository(store=RegistryClient(registry.host), repository="pytorch")


# --- made ----------------------------------------------------------------------------------------


def test_a_candidate_with_its_verdict_is_offered(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
    tmp_path: Path,
) -> None:
    verdict_on(factory, family(registry), pushed)
    catalog = made_of(factory, target, registry.host)
    image = the_image(catalog)
    assert image.reference == f"{registry.host}/pytorch@{pushed}"
    assert image.subject == replace(read_subject(family(registry), pushed), target=NAME)
    assert (image.version.startswith("2.3"), image.cuda, image.runtime) == (True, "12.1", "12.1")
    assert (image.size, image.unpacked) == (len(b"layer"), len(b"layer"))  # that layer is not packed
    claims = dict(reversed(image.predicted))  # the weightiest of a capability comes first
    told = [claim.rule for capability, claim in image.predicted if capability == "6.1"]
    assert told == ["code", "known-bad:triton-before-volta"]
    assert claims["8.0"].answer is Compatibility.YES
    assert claims["3.5"].answer is Compatibility.NO
    assert {claim.basis for claim in claims.values()} <= {ClaimBasis.PREDICTED, ClaimBasis.DOCUMENTED}
    offer = find_offer(catalog, NAME, read_trust(factory.settings.files), NOW)
    assert [one.proves for one in offer.judged] == [True]
    bare = the_image(made_of(elsewhere(factory, tmp_path), target, registry.host))  # its store is empty
    assert bare == replace(image, unpacked=0)


def test_the_driver_is_the_lowest_that_runs_machine_code(target: Target) -> None:
    assert facts_of(target, None, ()) == ImageFacts(
        version="2.3", runtime="12.1", driver="525", minor_compat=True
    )
    claims = [
        (one, replace(PREDICTED, answer=answer, driver=driver))
        for one, answer, driver in (
            ("7.0", Compatibility.YES, "550.54.14"),  # packed with zstd: older ones cannot read it
            ("8.0", Compatibility.YES, "555"),
            ("9.0", Compatibility.PTX, "520"),
            ("3.5", Compatibility.NO, "400"),
        )
    ]
    found = facts_of(target, None, claims)
    assert (found.driver, found.minor_compat) == ("550.54.14", False)
    unknown = facts_of(replace(target, cuda="99.1"), None, ())
    assert (unknown.driver, unknown.minor_compat) == ("", False)


def test_an_image_for_amd_has_no_driver_and_is_judged_on_processors(factory: Project, target: Target) -> None:
    amd = replace(target, cuda="rocm7", capabilities=("gfx90a",))
    assert facts_of(amd, None, ()) == ImageFacts(version="2.3")
    asked: list[str] = []

    def weighed(cell: Cell, _: object) -> CellRuling:
        asked.append(str(cell.question.capability))
        return CellRuling(claim=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imagefactory.actions.catalog.weigh_claims", weighed)
        predicted_claims(factory, amd, make_lock(), None)
    assert asked == [str(one) for one in processors()]


def test_the_unpacked_size_is_read_once_and_goes_with_its_layer(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    content = b"a tar" * 1000
    layer = "application/vnd.oci.image.layer.v1.tar"
    blobs = [
        (content, layer),
        (gzip.compress(content, mtime=0), f"{layer}+gzip"),
        (zstandard.compress(content), f"{layer}+zstd"),
    ]
    descriptors = [layout.add(data, kind) for data, kind in blobs]
    config = {"config": {}, "rootfs": {"diff_ids": [one.digest for one in descriptors]}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(one) for one in descriptors],
    }
    layout.tag("a:1", write_index(layout, manifest, "linux/amd64"))
    image = layout.image("a:1")
    assert image is not None
    assert unpacked_size(layout, image) == 3 * len(content)
    records = sorted((layout.path / "sizes").iterdir())
    assert len(records) == 3
    records[0].write_text("no JSON")
    assert unpacked_size(layout, image) == 3 * len(content)
    collect(layout, QuietProgress(), dry_run=False)
    assert len(list((layout.path / "sizes").iterdir())) == 3
    layout.untag("a:1")
    collect(layout, QuietProgress(), dry_run=False)
    assert list((layout.path / "sizes").iterdir()) == []


def test_a_layer_that_cannot_be_read_has_no_known_size(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    add_image(layout, "a:1", [b"\x1f\x8b is not gzip"])
    image = layout.image("a:1")
    assert image is not None
    (one,) = image.layers
    kind = replace(one.descriptor, media_type="application/vnd.oci.image.layer.v1.tar+gzip")
    assert unpacked_size(layout, replace(image, layers=(replace(one, descriptor=kind),))) == 0
    layout.blob_path(one.descriptor.digest).unlink()
    assert unpacked_size(layout, image) == 0


def test_what_is_not_there_is_left_out_and_said(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
) -> None:
    making = CatalogRequest(targets=(target,), now=NOW, registry=registry.host)
    place = StoreRepository(store=RegistryClient(registry.host), repository="pytorch")
    made = build_catalog(factory, making, QuietProgress())
    assert made.catalog.images == ()
    assert made.skipped == ((NAME, explain_no_candidate(factory, place)),)
    with pytest.raises(NothingSelectedError, match=NAME) as caught:
        build_catalog(factory, replace(making, named=True), QuietProgress())
    assert caught.value.code == "catalog-image-missing"


def test_a_new_lock_takes_nothing_away_that_is_verified(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
) -> None:
    """The tag that people use points to an older image with a verdict; the new candidate has none yet."""
    place = family(registry)
    verdict_on(factory, place, pushed)
    old = read_manifest(place, pushed)
    place.store.put_manifest("pytorch", old.data, old.descriptor.media_type, "2.3-cu121")
    path = factory.base_lock_path(factory.base_of(target))
    lock = read_base_lock(path)
    assert lock is not None
    first = replace(lock.packages[0], sha256="0" * 64)
    path.write_text(format_base_lock(replace(lock, packages=(first, *lock.packages[1:]))))
    put_base(factory, target)
    newer = _put_newer(factory, target)
    assert push(factory, target, registry) == newer != pushed
    image = the_image(made_of(factory, target, registry.host))
    assert image.subject.index == pushed
    assert image.predicted == ()  # of what lock it was made nobody knows
    verdict_on(factory, place, newer)
    assert the_image(made_of(factory, target, registry.host)).subject.index == newer


def test_where_keys_must_approve_what_the_lock_gives_waits(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str
) -> None:
    place, path = family(registry), factory.settings.root_path / "imagefactory.toml"
    verdict_on(factory, place, pushed)

    def offered(signatures: int) -> list[str]:
        rows = path.read_text().partition("[policy]")[0]
        write_settings(path.parent, f"{rows}[policy]\npromotion-signatures = {signatures}\n", factory.environ)
        return [one.subject.index for one in made_of(factory, target, registry.host).images]

    subject = replace(read_subject(place, pushed), target=NAME)
    manifest = read_manifest(place, subject.manifest).descriptor

    def approve(tag: str, *, key: SigningKey = LAB, index: str = pushed) -> None:
        wanted = ApprovalSubject(subject=replace(subject, index=index), place=str(place), tag=tag)
        envelope = sign_approval(wanted, key, NOW)
        attach(place, SignedStatement(kind=APPROVAL_TYPE, subject=manifest, envelope=envelope))

    assert (offered(0), offered(1)) == ([pushed], [])
    approve("2.3-cu121", key=STRANGER)
    approve("2.3-cu121", index="sha256:" + "1" * 64)
    approve("2.4-cu121")
    approve(f"2.3-cu121-{pushed[7:19]}.sif")
    assert offered(1) == []
    approve("2.3-cu121-sm80")
    assert (offered(1), offered(2)) == ([pushed], [])


def _put_newer(factory: Project, target: Target) -> str:
    from imagefactory.actions import build
    from imagefactory.actions import definition as define
    from imagefactory.build.assemble import AssembleEngine
    from imagefactory.oci.layout import reference

    layout, definition = factory.layout, define.define_target(factory, target)
    base = build.base_request(factory, definition.base).stored(layout)
    assert base is not None
    index = add_image(layout, reference(target), [b"newer"])
    engine = AssembleEngine(layout, layout.path, codec=factory.settings.codec.value, workers=1)
    layout.record("images", engine.image_key(definition, base), {"digest": index.digest, "size": index.size})
    return index.digest


def test_what_was_taken_back_is_not_in_it(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
) -> None:
    place = family(registry)
    verdict_on(factory, place, pushed)
    subject = replace(read_subject(place, pushed), target=NAME)
    back = sign_revocation(RevocationRequest(subject=subject, why="a bad night"), LAB, NOW)
    manifest = read_manifest(place, subject.manifest).descriptor
    attach(place, SignedStatement(kind=REVOCATION_TYPE, subject=manifest, envelope=back))
    image = the_image(made_of(factory, target, registry.host))
    assert image.envelopes == ()
    assert [data for _, data in image.revocations] == [back]


def test_verdicts_of_the_store_count_and_expired_ones_do_not(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
) -> None:
    from imagefactory.oci.layout import LayoutStore

    verdict_on(factory, StoreRepository(store=LayoutStore(factory.layout), repository=""), pushed)
    assert len(the_image(made_of(factory, target, registry.host)).envelopes) == 1
    later = NOW + timedelta(days=91)
    assert the_image(made_of(factory, target, registry.host, later)).envelopes == ()


def test_a_factory_without_a_registry_offers_its_store(
    factory: Project,
    target: Target,
    pushed: str,
) -> None:
    image = the_image(made_of(factory, target))
    assert (image.reference, image.subject.index) == ("", pushed)
    own = read_catalog(factory.settings, factory.environ, NOW, NAME)
    assert the_image(own).subject.index == pushed
    assert own.keyid == ""
    site = SettingValue(value="registry.invalid/gpu", origin="/etc/xdg/imagefactory/imagefactory.toml")
    outer = replace(factory.settings, catalog=site)
    assert read_catalog(outer, factory.environ, NOW, NAME) == own
    mine = replace(factory.settings, catalog=SettingValue(value="/no/file", origin="$IMAGEFACTORY_CATALOG"))
    with pytest.raises(UsageError, match="/no/file"):
        read_catalog(mine, factory.environ, NOW, NAME)
    with pytest.raises(NothingSelectedError, match="pytorch"):
        read_catalog(factory.settings, factory.environ, NOW, "pytorch-2.3-cu12")


# --- published and read --------------------------------------------------------------------------


@pytest.fixture
def signer(factory: Project, tmp_path: Path) -> Path:
    """The folder of settings of who runs the factory, with the one key there."""
    folder = tmp_path / "owner"
    make_key(folder / "imagefactory" / "keys", "site")
    return folder


def trust_row(signer: Path) -> str:
    key = read_signing_key(signer / "imagefactory" / "keys" / "site.pem")
    return (
        f'[[trust]]\nname = "site"\nkeyid = "{key.keyid}"\n'
        f'public = "{base64.b64encode(key.public).decode("ascii")}"\nfrom = 2026-01-01\nuntil = 2099-01-01\n'
    )


def run(factory: Project, signer: Path, registry: RegistryMadeHere, *more: str) -> Result:
    environ = {
        "XDG_CONFIG_HOME": str(signer),
        "XDG_CONFIG_DIRS": str(signer / "none"),
        "IMAGEFACTORY_STORE": factory.settings.store.value,
        "IMAGEFACTORY_CACHE": factory.settings.cache.value,
        "IMAGEFACTORY_REGISTRY": registry.host,
    }
    trust(factory.settings.root_path, environ)  # the owner of the factory
    root = str(factory.settings.root_path)
    return CliRunner().invoke(cli, ["-C", root, "site", "publish", "-q", NAME, *more], env=environ)


def as_researcher(folder: Path, text: str) -> tuple[Path, Mapping[str, str]]:
    """Somebody with an empty folder: all that is set stands in one file of his, or of his site's."""
    config = folder / "researcher" / "imagefactory"
    config.mkdir(parents=True, exist_ok=True)
    (config / "imagefactory.toml").write_text(text)
    empty = folder / "empty-folder"
    empty.mkdir(exist_ok=True)
    environ = {
        "HOME": str(empty),
        "XDG_CONFIG_HOME": str(folder / "nothing"),
        "XDG_CONFIG_DIRS": str(config.parent),
        "XDG_CACHE_HOME": str(folder / "researcher" / "cache"),
    }
    return empty, environ


def read_as(folder: Path, text: str, now: datetime | None = None) -> Catalog:
    empty, environ = as_researcher(folder, text)
    settings = load_settings(directory=None, start=empty, environ=environ)
    return read_catalog(settings, environ, now or datetime.now(UTC))


def test_what_a_factory_publishes_somebody_without_one_reads(
    factory: Project,
    registry: RegistryMadeHere,
    pushed: str,
    signer: Path,
    tmp_path: Path,
) -> None:
    now = datetime.now(UTC)
    verdict_on(factory, family(registry), pushed, now)
    toml = factory.settings.root_path / "imagefactory.toml"
    lab = toml.read_text()
    toml.write_text(lab + "\n" + trust_row(signer))
    ran = run(factory, signer, registry, "--json")
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["images"][0]["verified"] == ["8.0"]
    assert told["verdict_ages"]["oldest"].startswith(f"{now:%Y-%m-%d}")
    own, current = told["written"]
    assert current.startswith(f"{registry.host}/catalog:{CURRENT}@sha256:")
    assert f":{told['created'][:10].replace('-', '')}-" in own
    assert "note:" not in ran.stderr
    toml.write_text(f'catalog = "{registry.host}"\n{toml.read_text()}')
    said = run(factory, signer, registry).output
    assert "note:" not in said
    assert f"oldest verdict of {now:%Y-%m-%d}; " in said
    toml.write_text(toml.read_text().replace(registry.host, f"{registry.host}/other", 1))
    assert f"name another catalog: {registry.host}/other" in run(factory, signer, registry).output
    text = f'registry = "{registry.host}"\n{trust_row(signer)}\n{lab}'
    read = read_as(tmp_path, text)
    assert the_image(read).reference == f"{registry.host}/pytorch@{pushed}"
    empty, environ = as_researcher(tmp_path, text)
    settings = load_settings(directory=None, start=empty, environ=environ)
    (judged,) = find_offer(read, NAME, read_trust(settings.files), datetime.now(UTC)).judged
    assert judged.proves
    asked = registry.count["GET blob"]
    assert read_as(tmp_path, f'catalog = "{registry.host}:current"\n{text}') == read
    assert registry.count["GET blob"] == asked  # it was cached
    (cached,) = (tmp_path / "researcher" / "cache" / "imagefactory" / "catalogs").iterdir()
    cached.write_bytes(cached.read_bytes()[:-1] + b"?")
    assert read_as(tmp_path, text) == read
    assert registry.count["GET blob"] == asked + 1  # what is cached is looked at
    with pytest.raises(StatementError, match="expired"):
        read_as(tmp_path, text, now + timedelta(days=31))
    with pytest.raises(StatementError, match="wrong-key"):
        read_as(tmp_path, f'registry = "{registry.host}"\n{lab}')


def test_a_factory_reads_what_it_published_while_its_registry_is_down(
    factory: Project, registry: RegistryMadeHere, pushed: str, signer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = factory.settings.root_path
    with (root / "imagefactory.toml").open("a") as file:
        file.write(trust_row(signer))
    assert run(factory, signer, registry).exit_code == 0
    environ = {**factory.environ, "IMAGEFACTORY_REGISTRY": registry.host, "XDG_CONFIG_HOME": str(signer)}
    environ["IMAGEFACTORY_CACHE"] = factory.settings.cache.value
    trust(root, environ)
    settings = load_settings(directory=root, start=root, environ=environ)
    now = datetime.now(UTC)
    assert read_catalog(settings, environ, now, NAME).source is CatalogSource.MADE
    registry.fault = lambda _: "403"
    found = read_catalog(settings, environ, now, NAME)
    assert (found.source, the_image(found).subject.index) == (CatalogSource.KEPT, pushed)
    with pytest.raises(RegistryError):
        read_catalog(settings, environ, now + LIFE, NAME)


def test_a_file_is_written_and_nothing_pushed(
    factory: Project,
    registry: RegistryMadeHere,
    pushed: str,
    signer: Path,
    tmp_path: Path,
) -> None:
    (factory.settings.root_path / "imagefactory.toml").write_text(trust_row(signer))
    for name in ("catalog.json", "catalog.json.gz"):
        ran = run(factory, signer, registry, "--output", str(tmp_path / name))
        assert ran.exit_code == 0, ran.output
        assert "not verified" in ran.stdout
        read = read_as(tmp_path, f'catalog = "{tmp_path / name}"\n{trust_row(signer)}')
        assert the_image(read).subject.index == pushed
    assert "catalog" not in registry.shelves.repositories
    ran = run(factory, signer, registry, "--output", str(tmp_path / "no" / "folder"))
    assert ran.exit_code != 0


def test_without_a_key_that_counts_nothing_is_written(
    factory: Project,
    registry: RegistryMadeHere,
    pushed: str,
    signer: Path,
    tmp_path: Path,
) -> None:
    assert pushed
    (factory.settings.root_path / "imagefactory.toml").write_text("")
    ran = run(factory, signer, registry)
    assert isinstance(ran.exception, CheckFailedError)
    assert ran.exception.code == "signer-not-trusted"
    ran = run(factory, tmp_path / "nobody", registry)
    assert isinstance(ran.exception, CheckFailedError)
    assert ran.exception.code == "signing-key-missing"
    ran = run(factory, tmp_path / "nobody", registry, "--dry-run")
    assert ran.exit_code == 0, ran.output
    assert "catalog" not in registry.shelves.repositories


def test_sif_files_come_with_their_own_verdicts(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
) -> None:
    layout = factory.layout
    verdict_on(factory, family(registry), pushed)
    image = the_image(made_of(factory, target, registry.host))
    manifest = layout.manifest(image.subject.manifest)
    assert manifest is not None
    path = layout.path / "x.sif"
    path.write_bytes(b"a file")
    origin = SifOrigin(target=NAME, compression="fast", subject=manifest[0])
    kept = store_sif(layout, path, origin)
    (sif,) = the_image(made_of(factory, target, registry.host)).sifs
    assert (sif.sha256, sif.size, sif.reference, sif.envelopes) == (kept.file.digest, 6, "", ())
    options = PushOptions(now=NOW, registry=registry.host, made=kept)
    push_target(factory, target, options, QuietProgress())
    verdict_on(factory, family(registry), kept.digest)
    catalog = made_of(factory, target, registry.host)
    image = the_image(catalog)
    (sif,) = image.sifs
    assert sif.reference == f"{registry.host}/pytorch@{kept.digest}"
    assert (sif.subject.config, sif.subject.manifest) == (kept.file.digest, kept.digest)
    assert not image.only_sif
    offer = find_offer(catalog, NAME, read_trust(factory.settings.files), NOW)
    assert [[one.proves for one in each] for each in (offer.judged, offer.sifs[0].judged)] == [[True], [True]]
    assert sign_catalog(catalog, LAB)


def test_what_others_pushed_is_offered_only_with_a_verdict(
    factory: Project, target: Target, registry: RegistryMadeHere, pushed: str, tmp_path: Path
) -> None:
    """Anyone who may push can move a tag, and attach a .sif to an image."""
    client, place = RegistryClient(registry.host), family(registry)
    root = read_manifest(place, pushed)
    foreign = client.put_manifest("pytorch", root.data + b"\n", root.descriptor.media_type, plain_tag(target))
    bare = elsewhere(factory, tmp_path)  # a machine that does not know of either push
    stranger = replace(bare, environ={**bare.environ, NONCE_STORE_KEY: SHARED_KEY.upper()})
    assert made_of(stranger, target, registry.host).images == ()
    verdict_on(factory, place, pushed)
    assert the_image(made_of(stranger, target, registry.host)).reference.endswith(foreign.digest)

    file = Descriptor(media_type=SIF_TYPE, digest=digest_of(b"evil"), size=4)
    client.write("pytorch", file, lambda offset: iter([b"evil"[offset:]]))
    client.write("pytorch", EMPTY_BLOB, lambda offset: iter([EMPTY[offset:]]))
    manifest = read_manifest(place, read_subject(place, pushed).manifest).descriptor
    client.put_manifest("pytorch", artifact_of(SIF_TYPE, manifest, (file,), {}).data, MANIFEST_TYPE)
    assert the_image(made_of(factory, target, registry.host)).sifs == ()


def test_a_target_that_apptainer_built_is_its_sif(
    factory: Project, target: Target, registry: RegistryMadeHere
) -> None:
    layout = factory.layout
    path = layout.path / "x.sif"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"a file")
    kept = store_sif(layout, path, SifOrigin(target=NAME, compression="fast"), tag=sif_reference(target))
    pushed = push_target(factory, target, PushOptions(now=NOW, registry=registry.host), QuietProgress())
    assert pushed.reference.digest == kept.digest
    shelf = registry.repository("pytorch")
    shelf.tags["2.3-cu121"] = kept.digest  # as if it were promoted
    image = the_image(made_of(factory, target, registry.host))
    assert image.only_sif
    assert (image.size, image.unpacked, image.subject.config) == (6, 0, kept.file.digest)
    assert sign_catalog(made_of(factory, target, registry.host), LAB)


def test_a_registry_that_has_none_says_who_makes_one(
    registry: RegistryMadeHere,
    signer: Path,
    tmp_path: Path,
) -> None:
    with fails("catalog-not-found", message=f"{registry.host}/gpu/catalog:current"):
        read_as(tmp_path, f'registry = "{registry.host}/gpu"\n{trust_row(signer)}')


def test_another_artifact_there_is_no_catalog(
    factory: Project,
    registry: RegistryMadeHere,
    pushed: str,
    signer: Path,
    tmp_path: Path,
) -> None:
    with registry.lock:
        shelf = registry.repository("pytorch")
        registry.shelves.repositories["catalog"] = shelf
        shelf.tags["current"] = pushed
    with fails("artifact-malformed"):
        read_as(tmp_path, f'registry = "{registry.host}"\n{trust_row(signer)}')


def test_the_same_catalog_is_the_same_artifact() -> None:
    first, second = (build_artifact(b"{}", NOW) for _ in range(2))
    assert first == second
    assert first.blobs[1][1] == pack_artifact(b"{}")


def test_nothing_to_catalog_selects_nothing(
    factory: Project,
    registry: RegistryMadeHere,
    signer: Path,
) -> None:
    ran = run(factory, signer, registry, "--dry-run")
    assert isinstance(ran.exception, NothingSelectedError)


def test_keys_trusted_by_a_site_judge_verdicts_too(
    factory: Project,
    target: Target,
    registry: RegistryMadeHere,
    pushed: str,
    tmp_path: Path,
) -> None:
    verdict_on(factory, family(registry), pushed)
    mine = factory.settings.root_path / "imagefactory.toml"
    site = tmp_path / "site.toml"
    mine.rename(site)
    assert the_image(made_of(factory, target, registry.host)).envelopes == ()
    both = replace(factory, settings=replace(factory.settings, files=(mine, site)))
    assert len(the_image(made_of(both, target, registry.host)).envelopes) == 1
