"""Layer locks: what a machine that made nothing knows and pushes by one, and what is made against one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagefactory.actions.definition import define_target, layers_state, promised_image, verify_layer_lock
from imagefactory.actions.locked import base_locks, orphans
from imagefactory.actions.transfer import PushOptions, inputs_digest, push_target
from imagefactory.errors import EXIT_LOCK, EXIT_OK, EXIT_STALE, LockError
from imagefactory.lock.layers import layers_path, write_layer_lock
from imagefactory.model import Target
from imagefactory.oci.candidates import INPUTS_LABEL, read_records
from imagefactory.oci.graph import StoreRepository
from imagefactory.oci.manifests import Image
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.progress import QUIET
from imagefactory.project import Project, load_project
from tests.made.command import run, say
from tests.made.errors import fails
from tests.made.layer_locks import BYTES, LAYERS, MADE_WITH, TITLES, put_layer_lock
from tests.made.registry import RegistryMadeHere
from tests.made.verdicts import NOW

OPTIONS = PushOptions(now=NOW)


@pytest.fixture
def promised(factory: Project, target: Target) -> Image:
    """The image that a layer lock tells of a target which nobody has built here."""
    put_layer_lock(factory, target)
    image = promised_image(factory, target)
    assert image is not None
    return image


def push(factory: Project, target: Target, registry: RegistryMadeHere) -> str:
    return push_target(factory, target, replace(OPTIONS, registry=registry.host), QUIET).reference.digest


def fill(registry: RegistryMadeHere, repository: str, titles: tuple[str, ...] = TITLES) -> None:
    digests = [layer.descriptor.digest for layer in LAYERS if layer.title in titles]
    chosen = {digest: BYTES[digest] for digest in digests}
    registry.shelves.blobs |= chosen
    registry.repository(repository).blobs |= set(chosen)


def test_a_machine_that_made_nothing_pushes_three_documents(
    factory: Project, target: Target, promised: Image, registry: RegistryMadeHere
) -> None:
    fill(registry, "pytorch")
    assert push(factory, target, registry) == promised.digest
    there = registry.find("pytorch")
    assert set(there.tags.values()) == {promised.digest}
    assert {promised.digest, promised.manifest} <= set(there.manifests)
    assert promised.config in there.blobs
    assert registry.bytes_in < 20_000 < sum(map(len, BYTES.values()))
    assert registry.count["PUT upload"] == 2  # the config, and the empty blob of the record
    records = read_records(
        StoreRepository(store=RegistryClient(registry.host), repository="pytorch"), promised.digest
    )
    assert [row[INPUTS_LABEL] for row in records] == [inputs_digest(factory, target)]
    registry.log.clear()
    assert push(factory, target, registry) == promised.digest
    assert [str(one) for one in registry.log] == ["GET manifest"] * 2


def test_where_the_image_is_there_already_nothing_else_is_asked(
    factory: Project, target: Target, promised: Image, registry: RegistryMadeHere
) -> None:
    fill(registry, "pytorch")
    push(factory, target, registry)
    (factory.layout.path / "pushed" / f"{registry.host}.json").unlink()
    registry.log.clear()
    assert push(factory, target, registry) == promised.digest
    assert [str(one) for one in registry.log] == ["GET manifest"] * 2


def test_layers_of_another_familys_repository_are_mounted(
    factory: Project, target: Target, promised: Image, registry: RegistryMadeHere
) -> None:
    root = factory.settings.root_path
    (root / "recipes" / "other.yaml").write_text(
        (root / "recipes" / "pytorch.yaml").read_text().replace("family: pytorch", "family: other", 1)
    )
    fill(registry, "other")
    both = load_project(factory.settings, factory.environ)
    assert push(both, target, registry) == promised.digest
    assert set(BYTES) <= registry.find("pytorch").blobs
    assert registry.bytes_in < 20_000


def test_layers_that_no_repository_has_are_told_and_nothing_is_tagged(
    factory: Project, target: Target, promised: Image, registry: RegistryMadeHere
) -> None:
    fill(registry, "pytorch", ("debian-12", "bucket 0"))
    with fails("image-not-built") as caught:
        push(factory, target, registry)
    assert caught.value.message.endswith(": environment, torch 2.3.1")
    assert f"imagefactory build {target.name}" in caught.value.hint
    assert registry.find("pytorch").tags == {}


def test_what_has_no_layer_lock_or_a_stale_one_is_not_built(
    factory: Project, target: Target, registry: RegistryMadeHere
) -> None:
    assert layers_state(factory, target) == ""
    lock = put_layer_lock(factory, target)
    assert layers_state(factory, target) == "ok"
    for changes in ({"lock": f"sha256:{'1' * 64}"}, {"base": f"sha256:{'1' * 64}"}):
        write_layer_lock(factory.lock_folder, replace(lock, **changes))
        assert layers_state(factory, target) == "stale"
        with fails("image-not-built", r"is not built$"):
            push(factory, target, registry)
    layers_path(factory.lock_folder, target.name).write_text("format: \n")
    assert layers_state(factory, target) == "malformed"
    with pytest.raises(LockError, match=r"layers.txt:1: "):
        push(factory, target, registry)


def test_what_is_made_is_held_to_the_layer_lock(factory: Project, target: Target, promised: Image) -> None:
    definition = define_target(factory, target)
    bases = base_locks(factory, definition.base)
    verify_layer_lock(factory, definition, promised, lambda _: MADE_WITH, bases=bases)
    another = replace(LAYERS[2], diff_id=f"sha256:{'3' * 64}")
    wrong = replace(promised, layers=(*LAYERS[:2], another, LAYERS[3]))
    with fails(
        "layer-lock-mismatch",
        r"layers.txt:10: 'torch 2.3.1' .* sha256:33",
        hint=f"imagefactory lock --check --layers {target.name}",
    ):
        verify_layer_lock(factory, definition, wrong, lambda _: MADE_WITH, bases=bases)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"toolchain": "another codec"}, "is for layers by another codec, "),
        ({"lock": f"sha256:{'1' * 64}"}, "is outdated: the lock of pytorch-2.3-cu121 "),
        ({"base": f"sha256:{'1' * 64}"}, "is outdated: the base debian-12 "),
    ],
)
def test_what_another_lock_or_tool_made_is_told_and_not_held_to(
    factory: Project, target: Target, promised: Image, changes: dict[str, str], words: str
) -> None:
    write_layer_lock(factory.lock_folder, replace(put_layer_lock(factory, target), **changes))  # type: ignore[arg-type]
    told: list[str] = []
    other = replace(promised, layers=LAYERS[:1])
    definition, told_project = define_target(factory, target), replace(factory, tell=told.append)
    bases = base_locks(factory, definition.base)
    verify_layer_lock(told_project, definition, other, lambda _: MADE_WITH, bases=bases)
    assert words in told[0]


def test_a_check_of_locks_tells_of_stale_layer_locks(
    factory: Project, target: Target, promised: Image, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(factory.settings.root_path)
    assert run("-C", root, "lock", "--check", target.name) == EXIT_OK
    lock = put_layer_lock(factory, target)
    write_layer_lock(factory.lock_folder, replace(lock, base=f"sha256:{'1' * 64}"))
    assert run("-C", root, "lock", "--check", target.name) == EXIT_STALE
    assert run("-C", root, "lock", "--check", "--layers", target.name) == EXIT_STALE
    said = capsys.readouterr().err
    assert f"outdated layer locks: {target.name} (stale)" in said
    assert f"imagefactory lock --layers {target.name}" in said
    layers_path(factory.lock_folder, target.name).unlink()
    said = say(capsys, "-C", root, "lock", "--check", "--layers", target.name)
    assert (said.code, said.error_codes) == (EXIT_LOCK, ("layer-lock-missing",))


def test_the_digest_is_shown_before_anything_is_built(
    factory: Project, target: Target, promised: Image, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(factory.settings.root_path)
    assert run("-C", root, "show", target.name) == EXIT_OK
    assert promised.digest in capsys.readouterr().out


def test_a_layer_lock_of_no_target_is_an_orphan(factory: Project, target: Target, promised: Image) -> None:
    path = layers_path(factory.lock_folder, target.name)
    assert path not in orphans(factory)
    gone = path.rename(layers_path(factory.lock_folder, "pytorch-0.9-cu80"))
    assert gone in orphans(factory)
