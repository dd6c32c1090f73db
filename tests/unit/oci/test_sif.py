"""What decides about .sif files: manifests, apptainer's command lines, what is missing, what is believed.

The programs here are scripts that lie in the ways a build can; tests/engines has the real apptainer.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build.apptainer import share_layout
from imagefactory.errors import ImagefactoryError, StoreError, ToolError, UsageError
from imagefactory.model import Mount, RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import collect
from imagefactory.oci.manifests import MANIFEST_TYPE, Descriptor, SifArtifact, canonical_json
from imagefactory.oci.sif import (
    MAGIC,
    SIF_CONFIG_TYPE,
    SIF_TYPE,
    SifOrigin,
    around,
    copy_sif,
    find_sif,
    for_processor,
    format_sif_manifest,
    is_sif_manifest,
    load_sif,
    read_partition,
    sif_name,
    sifs_of,
    store_sif,
    stored_sifs,
)
from imagefactory.progress import QuietProgress
from imagefactory.runtime.apptainer import ApptainerRunner, CallerIdentity, explain, plan
from imagefactory.runtime.apptainer_command import (
    CAPABILITIES,
    ApptainerCommand,
    ApptainerMachine,
    SifRequest,
    clean,
    explain_missing,
    lacking_capabilities,
    mount_option,
)
from tests.made.errors import fails

SIF = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0 and the rest"
TARGET = "pytorch-2.3-cu121"


# --- in the store ----------------------------------------------------------------------------------


def kept(
    layout: Layout, tmp_path: Path, origin: SifOrigin, *, tag: str = "", data: bytes = SIF
) -> SifArtifact:
    path = tmp_path / "made.sif"
    path.write_bytes(data)
    with layout.in_use(QuietProgress()):
        return store_sif(layout, path, origin, tag=tag)


def subject_in(layout: Layout) -> Descriptor:
    config = layout.add(b"{}", "application/vnd.oci.empty.v1+json")
    plain = {"mediaType": config.media_type, "digest": config.digest, "size": config.size}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": plain, "layers": []}
    return layout.add(canonical_json(manifest), MANIFEST_TYPE)


def test_a_built_one_is_found_by_its_tag(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    sif = kept(layout, tmp_path, SifOrigin(target=TARGET, compression="fast"), tag="pytorch:2.3-cu121.sif")
    digest = f"sha256:{hashlib.sha256(SIF).hexdigest()}"
    assert sif == SifArtifact(
        name=f"{TARGET}-{digest[7:19]}.sif",
        digest=layout.tags()["pytorch:2.3-cu121.sif"].digest,
        file=Descriptor(media_type=SIF_TYPE, digest=digest, size=len(SIF)),
        path=layout.blob_path(digest),
        made_from="",
        compression="fast",
    )
    assert sif.config == digest
    assert find_sif(layout, "pytorch:2.3-cu121.sif") == sif
    assert find_sif(layout, "pytorch:2.5-cu124.sif") is None
    assert not (tmp_path / "made.sif").exists()


def test_a_converted_one_is_kept_by_its_subject(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        subject = subject_in(layout)
    layout.tag("pytorch:2.3-cu121", subject)
    origin = SifOrigin(target=TARGET, compression="small", subject=subject)
    sif = kept(layout, tmp_path, origin)
    assert sif.made_from == subject.digest
    assert sifs_of(layout, subject.digest) == (sif,)
    collect(layout, QuietProgress())
    assert sifs_of(layout, subject.digest) == (sif,)
    layout.untag("pytorch:2.3-cu121")
    collect(layout, QuietProgress())
    assert sifs_of(layout, subject.digest) == ()
    assert not sif.path.exists()


def test_a_damaged_one_has_its_name_still_and_hides_no_other(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        subject = subject_in(layout)
    layout.tag("pytorch:2.3-cu121", subject)
    origin = SifOrigin(target=TARGET, compression="small", subject=subject)
    lost, whole = (kept(layout, tmp_path, origin, data=SIF + more) for more in (b"1", b"2"))
    lost.path.unlink()
    found = {one.name: one for one in stored_sifs(layout, subject.digest)}
    assert found.keys() == {lost.name, whole.name}
    assert found[whole.name].artifact == whole
    error = found[lost.name].artifact
    assert isinstance(error, StoreError)
    assert error.code == "sif-unusable"
    assert "image prune" in error.hint
    assert (found[lost.name].subject, found[lost.name].digest) == (subject.digest, lost.digest)
    assert sifs_of(layout, subject.digest) == (whole,)
    collect(layout, QuietProgress())
    assert [one.artifact for one in stored_sifs(layout, subject.digest)] == [whole]


def test_the_manifest_is_what_apptainer_pulls() -> None:
    file = Descriptor(media_type=SIF_TYPE, digest="sha256:" + "a" * 64, size=5)
    config = Descriptor(media_type=SIF_CONFIG_TYPE, digest="sha256:" + "b" * 64, size=2)
    subject = Descriptor(
        media_type=MANIFEST_TYPE, digest="sha256:" + "c" * 64, size=7, annotations=(("not", "taken"),)
    )
    made = format_sif_manifest(file, config, SifOrigin(target=TARGET, compression="fast", subject=subject))
    name = f"{TARGET}-aaaaaaaaaaaa.sif"
    assert made == {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": SIF_TYPE,
        "config": {"mediaType": SIF_CONFIG_TYPE, "digest": "sha256:" + "b" * 64, "size": 2},
        "layers": [
            {
                "mediaType": SIF_TYPE,
                "digest": "sha256:" + "a" * 64,
                "size": 5,
                "annotations": {"org.opencontainers.image.title": name},
            }
        ],
        "annotations": {
            "org.opencontainers.image.title": name,
            "imagefactory.sif.compression": "fast",
            "imagefactory.target": TARGET,
        },
        "subject": {"mediaType": MANIFEST_TYPE, "digest": "sha256:" + "c" * 64, "size": 7},
    }
    assert is_sif_manifest(made)
    assert not is_sif_manifest({"layers": []})
    assert not is_sif_manifest({"layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar"}]})
    assert sif_name("x", "sha256:" + "0123456789ab" * 6) == "x-0123456789ab.sif"


def test_one_that_apptainer_itself_pushed_is_one_too(tmp_path: Path) -> None:
    """Its push writes no artifactType and no annotations of ours."""
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        file, config = layout.add(SIF, SIF_TYPE), layout.add(b"{}", SIF_CONFIG_TYPE)
        rows = [
            {"mediaType": each.media_type, "digest": each.digest, "size": each.size}
            for each in (file, config)
        ]
        rows[0] |= {"annotations": {"org.opencontainers.image.title": "theirs.sif"}}
        manifest = layout.add(
            canonical_json({"schemaVersion": 2, "config": rows[1], "layers": [rows[0]]}), MANIFEST_TYPE
        )
    sif = load_sif(layout, manifest.digest)
    assert (sif.name, sif.made_from, sif.compression) == ("theirs.sif", "", "")


def test_what_is_not_there_whole_is_said(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        other = subject_in(layout)
    with fails("blob-missing"):
        load_sif(layout, "sha256:" + "0" * 64)
    with fails("not-a-sif"):
        load_sif(layout, other.digest)
    sif = kept(layout, tmp_path, SifOrigin(target=TARGET, compression="fast"))
    sif.path.write_bytes(SIF[:-1])
    with fails("blob-missing"):
        load_sif(layout, sif.digest)


def test_a_copy_is_whole_or_not_there(tmp_path: Path) -> None:
    sif = kept(Layout(tmp_path / "store"), tmp_path, SifOrigin(target=TARGET, compression="fast"))
    out = tmp_path / "out"
    out.mkdir()
    copy_sif(sif, out / "a.sif", QuietProgress())
    assert (out / "a.sif").read_bytes() == SIF
    assert (out / "a.sif").stat().st_mode & 0o777 == 0o755
    sif.path.write_bytes(SIF[:-1] + b"!")
    with fails("store-corrupt"):
        copy_sif(sif, out / "a.sif", QuietProgress())
    with fails("cannot-write-file"):
        copy_sif(sif, tmp_path / "nowhere" / "a.sif", QuietProgress())
    assert [path.name for path in out.iterdir()] == ["a.sif"]
    assert (out / "a.sif").read_bytes() == SIF


def test_a_lent_layout_names_one_image_and_copies_nothing(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "store")
    with layout.in_use(QuietProgress()):
        subject = subject_in(layout)
    assert share_layout(layout, subject.digest, tmp_path / "lent") == subject
    index = json.loads((tmp_path / "lent/index.json").read_bytes())
    assert [entry["digest"] for entry in index["manifests"]] == [subject.digest]
    assert (tmp_path / "lent/blobs/sha256" / subject.digest[7:]).samefile(layout.blob_path(subject.digest))
    with pytest.raises(StoreError, match="0" * 64):
        share_layout(layout, "sha256:" + "0" * 64, tmp_path / "other")


# --- what is believed ------------------------------------------------------------------------------


def liar(folder: Path, script: str) -> ApptainerCommand:
    """An apptainer that does `script`, in which $made is the file it is asked for."""
    program = folder / "bin" / "apptainer"
    program.parent.mkdir()
    which = 'for word in "$@"; do case "$word" in *.sif) made="$word";; esac; done'
    program.write_text(f'#!/bin/sh\nverb="$1"\n{which}\n{script}\n')
    program.chmod(0o755)
    return ApptainerCommand({**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"})


LIST = 'if [ "$verb" = sif ]; then echo "4 |1 |NONE |4096-8192 |FS (Squashfs/*System/amd64)"; exit %d; fi\n'
LIST_OK = LIST % 0
WRITE = r"""printf '#!/usr/bin/env run-singularity\n\000SIF_MAGIC\000' > "$made"
"""
LIES = {
    "no file": ("exit 0", "no file"),
    "no .sif": ('echo text > "$made"', "not a .sif"),
    "empty": (': > "$made"', "not a .sif"),
    "cut": ('echo "#!/usr/bin/env run-singularity" > "$made"', "not a .sif"),
    "no file system": ('if [ "$verb" = sif ]; then exit 0; fi\n' + WRITE, "root file system"),
    "unreadable": (LIST % 1 + WRITE, "root file system"),
    "a whole file, but a failure": (
        LIST_OK + WRITE + "echo why >&2; exit 3",
        ":\n  why",
    ),
    "killed": ("kill -9 $$", "137"),
}


@pytest.mark.parametrize("name", list(LIES))
def test_no_lie_is_believed(tmp_path: Path, name: str) -> None:
    script, why = LIES[name]
    command, output = liar(tmp_path, script), tmp_path / "out" / "x.sif"
    output.parent.mkdir()
    output.write_bytes(b"of an earlier time")
    with fails("apptainer-build-failed") as caught:
        command.build(SifRequest(folder=tmp_path, spec="oci:image", output=output), lambda _: None)
    assert why in caught.value.message
    assert [path.read_bytes() for path in output.parent.iterdir()] == [b"of an earlier time"]


def test_the_truth_is_believed(tmp_path: Path) -> None:
    script = (
        LIST_OK + 'env; echo "$@"; printf "#!/usr/bin/env run-singularity\\n\\000SIF_MAGIC\\000" > "$made"'
    )
    command, lines = liar(tmp_path, script), []
    environ = {
        **command.environ,
        "APPTAINERENV_X": "1",
        "SINGULARITY_BIND": "/",
        "SECRET": "canary",
        "HOME": "/h",
    }
    order = SifRequest(
        folder=tmp_path,
        spec="x.def",
        output=tmp_path / "x.sif",
        binds=((tmp_path / "a,b", "/mnt"),),
        hide=lambda text: text.replace("x.def", "****"),
    )
    ApptainerCommand(environ).build(order, lines.append)
    assert (tmp_path / "x.sif").read_bytes()[32:41] == b"SIF_MAGIC"
    said = "\n".join(lines)
    assert "HOME=/h" in lines
    assert "canary" not in said
    assert not [line for line in lines if line.startswith(("APPTAINERENV_", "SINGULARITY_"))]
    assert "x.def" not in said
    assert f'"source={tmp_path}/a,b"' in said


def test_much_on_both_streams_ends(tmp_path: Path) -> None:
    """spython's own way reads one pipe: 64 KiB on the other one, and nothing ever ends."""
    much = r"head -c 300000 /dev/zero | tr '\000' x; echo"
    script = f"{LIST_OK}({much}) >&2; {much}; echo last\n{WRITE}"
    lines: list[str] = []
    liar(tmp_path, script).build(
        SifRequest(folder=tmp_path, spec="x", output=tmp_path / "x.sif"), lines.append
    )
    assert "".join(lines) == "x" * 600_000 + "last"  # a line without end is told in parts


# --- what is missing -------------------------------------------------------------------------------

HERE = ApptainerMachine(
    version="1.4.5",
    uid=0,
    mksquashfs_help="Compressors:\n\tgzip (default)\n\tzstd\n",
    user_namespaces="",
    spython=True,
)


@pytest.mark.parametrize(
    ("changes", "code", "named", "hint"),
    [
        ({"version": "1.1.9"}, "tool-too-old", "1.1.9", "1.2"),
        ({"spython": False}, "extra-not-installed", "spython", "gpu-imagefactory[apptainer]"),
        ({"mksquashfs_help": ""}, "tool-missing", "mksquashfs", "apt-get install squashfs-tools"),
        ({"mksquashfs_help": "Compressors:\n\tgzip (default)\n"}, "tool-too-old", "mksquashfs", "4.4"),
        (
            {"uid": 1000, "user_namespaces": "Operation not permitted"},
            "user-namespaces-denied",
            "Operation not permitted",
            "imagefactory doctor",
        ),
    ],
)
def test_what_is_missing_is_said_with_what_mends_it(
    changes: dict[str, object], code: str, named: str, hint: str
) -> None:
    error = explain_missing(replace(HERE, **changes), building=True)  # type: ignore[arg-type]
    assert isinstance(error, ToolError)
    assert error.code == code
    assert named in error.message
    assert hint in error.hint


def test_nothing_is_missing() -> None:
    assert explain_missing(HERE, building=True) is None
    bare = replace(HERE, spython=False, mksquashfs_help=None, uid=1000, version="1.2.0-rc.1")
    assert explain_missing(bare, building=False) is None


def test_no_apptainer_and_another_program_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagefactory.runtime.apptainer_command.SYSTEM_PATH", "")
    with fails("tool-missing", "apptainer") as missing:
        ApptainerCommand({"PATH": str(tmp_path)}).require(building=False)
    assert "install apptainer" in missing.value.hint
    program = tmp_path / "singularity"
    program.write_text("#!/bin/sh\necho singularity-ce version 4.1.0\n")
    program.chmod(0o755)
    with fails("tool-unexpected"):
        ApptainerCommand({"PATH": str(tmp_path)}).require(building=False)
    program.write_text("#!/bin/sh\necho apptainer version 1.3.6-1.el9\n")
    assert ApptainerCommand({"PATH": str(tmp_path)}).version() == "1.3.6-1.el9"


def test_capabilities_that_root_lacks() -> None:
    assert len(CAPABILITIES) == 41
    status = "Name:\tx\nCapPrm:\t000001fffeffffff\nCapEff:\t0000000000000000\n"
    assert lacking_capabilities(status, last=40, uid=0) == ("CAP_SYS_RESOURCE",)
    assert lacking_capabilities(status, last=40, uid=1000) == ()
    whole = "CapPrm:\t000001ffffffffff\n"
    assert lacking_capabilities(whole, last=40, uid=0) == ()
    docker = "CapPrm:\t00000000a80425fb\n"
    assert "CAP_SYS_ADMIN" in lacking_capabilities(docker, last=40, uid=0)
    assert "CAP_CHECKPOINT_RESTORE" in lacking_capabilities(docker, last=40, uid=0)
    assert "CAP_CHECKPOINT_RESTORE" not in lacking_capabilities(docker, last=37, uid=0)


def test_lines_are_fit_for_a_terminal() -> None:
    assert clean("\x1b[31mFATAL:  \x1b[0m no\x07 way \r\n") == "FATAL:   no  way"


# --- how a command is started ----------------------------------------------------------------------

ROOT = CallerIdentity(uid=0, gid=0, unshare="/usr/bin/unshare")
USER = CallerIdentity(uid=1000, gid=1000, unshare="/usr/bin/unshare")


def options(spec: RunSpec, caller: CallerIdentity) -> tuple[list[str], list[str]]:
    """What stands before apptainer, and its options."""
    argv = plan("/usr/bin/apptainer", "/store/x.sif", spec, caller, started=5).argv
    at, end = argv.index("/usr/bin/apptainer"), argv.index("/store/x.sif")
    assert argv[end + 1 : end + 5] == ("/bin/sh", "-c", 'echo >/dev/fd/5; exec "$@"', "sh")
    assert argv[end + 5 :] == spec.argv
    return list(argv[:at]), list(argv[at + 1 : end])


ALWAYS = ["--silent", "exec", "--containall", "--cleanenv", "--no-home", "--no-eval", "--pwd", "/"]
NO_NET = ["--net", "--network", "none"]
UNSHARE = "/usr/bin/unshare"


@pytest.mark.parametrize(
    ("caller", "changes", "before", "after"),
    [
        (ROOT, {}, [], ["--no-privs", "--writable-tmpfs", *NO_NET]),
        (ROOT, {"network": True, "read_only": True}, [], ["--no-privs"]),
        (
            ROOT,
            {"uid": 65534, "read_only": True},
            [],
            ["--no-privs", "--security", "uid:65534", "--security", "gid:65534", *NO_NET],
        ),
        (ROOT, {"gpus": True, "read_only": True}, [], ["--no-privs", *NO_NET, "--nv"]),
        (USER, {"uid": 1000, "read_only": True}, [], NO_NET),
        (
            USER,
            {"uid": 65534, "read_only": True},
            [UNSHARE, "--user", "--map-user=65534", "--map-group=65534", "--net"],
            ["--userns"],
        ),
        (
            USER,
            {"uid": 0, "network": True},
            [UNSHARE, "--user", "--map-user=0", "--map-group=0"],
            ["--userns", "--no-privs", "--writable-tmpfs"],
        ),
    ],
)
def test_plan(
    caller: CallerIdentity, changes: dict[str, object], before: list[str], after: list[str]
) -> None:
    spec = RunSpec(argv=("python", "-c", "1"), **changes)  # type: ignore[arg-type]
    assert options(spec, caller) == (before, [*ALWAYS, *after])


def test_no_unshare_no_other_user() -> None:
    with fails("tool-missing", "unshare"):
        options(RunSpec(argv=("true",)), replace(USER, unshare=""))


def test_variables_do_not_stand_on_the_command_line() -> None:
    spec = RunSpec(argv=("true",), environment=(("A", "b,c=d"),))
    made = plan("apptainer", "x.sif", spec, ROOT, started=3)
    assert made.environment == (("APPTAINERENV_A", "b,c=d"),)
    assert not any("b,c" in word for word in made.argv)


def test_mounts_are_csv_and_in_order() -> None:
    mounts = (
        Mount(source=Path('/h/a,"b'), target="/in/deep", writable=True),
        Mount(source=Path("/h"), target="/in"),
    )
    _, given = options(RunSpec(argv=("true",), mounts=mounts, read_only=True, network=True), ROOT)
    values = [value for name, value in itertools.pairwise(given) if name == "--mount"]
    assert [next(csv.reader([value])) for value in values] == [
        ["type=bind", "source=/h", "destination=/in", "ro"],
        ["type=bind", 'source=/h/a,"b', "destination=/in/deep"],
    ]
    assert mount_option(Path("/a"), "/b") == "type=bind,source=/a,destination=/b,ro"


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(argv=()),
        RunSpec(argv=("",)),
        RunSpec(argv=("a\0b",)),
        RunSpec(argv=("true",), workdir="here"),
        RunSpec(argv=("true",), uid=-1),
        RunSpec(argv=("true",), uid=2**32 - 1),
        RunSpec(argv=("true",), environment=(("", "x"),)),
        RunSpec(argv=("true",), environment=(("A=B", "x"),)),
        RunSpec(argv=("true",), mounts=(Mount(source=Path("/a"), target="b"),)),
        RunSpec(argv=("true",), mounts=(Mount(source=Path("/a"), target="/b/../c"),)),
        RunSpec(argv=("true",), mounts=(Mount(source=Path("/a"), target="/."),)),
        RunSpec(argv=("true",), mounts=(Mount(source=Path("/a"), target="/dev/shm"),)),
        RunSpec(argv=("true",), mounts=(Mount(source=Path("a"), target="/b"),)),
    ],
)
def test_specs_that_cannot_be(spec: RunSpec) -> None:
    with pytest.raises(UsageError):
        plan("apptainer", "x.sif", spec, ROOT, started=3)
    with pytest.raises(UsageError):
        ApptainerRunner(ApptainerCommand({}), pytest.fail).run(SifArtifact, spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "kind", "code", "named"),
    [
        (
            "FATAL:   failed to set working directory: chdir /x: no such file",
            UsageError,
            "workdir-not-found",
            "/x",
        ),
        (
            "FATAL:   mount hook function failure: mount source /nosuch doesn't exist",
            UsageError,
            "mount-failed",
            "/nosuch",
        ),
        ("FATAL:   stat /bin/sh: no such file or directory", ToolError, "image-has-no-shell", "/bin/sh"),
        (
            "\x1b[31mFATAL:  \x1b[0m container creation failed: odd",
            ToolError,
            "command-not-started",
            "container creation failed: odd",
        ),
        ("", ToolError, "command-not-started", "255"),
    ],
)
def test_why_it_was_never_started(said: str, kind: type[ImagefactoryError], code: str, named: str) -> None:
    error = explain(said, 255, RunSpec(argv=("true",), workdir="/x"))
    assert (type(error), error.code) == (kind, code)
    assert named in error.message
    assert error.hint


PARTITION, LABELS = 0x4004, 0x4006
FIRST = 4096 + 48 * 585
ROW = "<i?III7q128s384s"


def made(*parts: tuple[int, bytes, bytes], moment: int = 1234) -> bytes:
    """A .sif with these parts (kind, name, content) one after the other, as apptainer writes it."""
    rows, contents, at = b"", b"", FIRST
    for number, (kind, name, content) in enumerate(parts, 1):
        padding = -at % 4096 if kind == PARTITION else 0
        extra = struct.pack("<ii3s", 1, 2, b"02\0") if kind == PARTITION else b""
        place = (at + padding, len(content), padding + len(content), moment, moment, 501, 20)
        rows += struct.pack(ROW, kind, True, number, 1 << 31, 0, *place, name, extra)
        contents += bytes(padding) + content
        at += padding + len(content)
    head = b"#!/usr/bin/env run-singularity\n\0" + MAGIC + b"01\x0002\0" + bytes(range(16))
    free = 48 - len(parts)
    head += struct.pack("<8q", moment, moment, free, 48, 4096, 48 * 585, FIRST, len(contents))
    return head.ljust(4096, b"\0") + rows.ljust(48 * 585, b"\0") + contents


def test_another_partition_and_other_texts(tmp_path: Path) -> None:
    theirs = made((LABELS, b"a.json", b"built today"), (LABELS, b"b", b"kept"), (PARTITION, b"", b"theirs"))
    size = 3 << 20
    head = around(theirs, lambda text: text.replace(b"today", b"at a moment"), size, 77)
    wanted = made(
        (LABELS, b"a.json", b"built at a moment"), (LABELS, b"b", b"kept"), (PARTITION, b"", bytes(size))
    )
    offset = len(head)
    assert offset % 4096 == 0
    assert head[4096:] == wanted[4096:offset].replace(
        struct.pack("<4q", 1234, 1234, 501, 20), struct.pack("<4q", 77, 77, 0, 0)
    )
    assert head[:48] == wanted[:48]
    assert head[48:64] == bytes(16)
    assert head[64:80] == struct.pack("<2q", 77, 77)
    assert head[80:4096] == wanted[80:4096]
    path = tmp_path / "a.sif"
    path.write_bytes(head + bytes(size))
    found = read_partition(path)
    assert (found.offset, found.size) == (offset, size)


def test_the_processor_stands_in_the_head_and_with_the_system(tmp_path: Path) -> None:
    theirs = made((LABELS, b"a.json", b"kept 02"), (PARTITION, b"", b"theirs"))
    head = around(theirs, bytes, 4096, 77)
    assert for_processor(head, "amd64") == head
    assert for_processor(head, "riscv64") == head
    arm = for_processor(head, "arm64")
    changed = [at for at, (one, other) in enumerate(zip(head, arm, strict=True)) if one != other]
    assert [(head[at : at + 1], arm[at : at + 1]) for at in changed] == [(b"2", b"4")] * 2
    assert changed[0] == 46
    path = tmp_path / "a.sif"
    path.write_bytes(arm + bytes(4096))
    assert read_partition(path).offset == len(head)


@pytest.mark.parametrize("parts", [(), ((LABELS, b"", b"x"),), ((PARTITION, b"", b"x"), (LABELS, b"", b"x"))])
def test_another_layout_is_refused(parts: tuple[tuple[int, bytes, bytes], ...]) -> None:
    with pytest.raises(ValueError, match="partition"):
        around(made(*parts), bytes, 4096, 0)
