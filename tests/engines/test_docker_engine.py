"""The docker engine and runner on a real dockerd: what is built, kept, run, pushed, refused and left behind.

Needs root, dockerd with buildx, docker-registry and podman (tests/services), mmdebstrap with a mirror.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from imagefactory.build.base.image import BuiltBase, write_index
from imagefactory.build.docker import DockerEngine
from imagefactory.build.secrets import BuildSecrets, find_secrets
from imagefactory.errors import BuildError, ImagefactoryError, ToolError
from imagefactory.model import BuildSpec, CommandResult, Mount, RunSpec
from imagefactory.oci.layers import codec
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import CONFIG_TYPE, Image, canonical_json, format_descriptor
from imagefactory.progress import LineProgress, QuietProgress
from imagefactory.runtime.docker import OWNER, DockerRunner
from imagefactory.runtime.docker_daemon import DockerDaemon
from imagefactory.runtime.protocol import OUTPUT_LIMIT
from imagefactory.runtime.unshare import UnshareRunner
from imagefactory.verify.report import SmokeTest
from imagefactory.verify.smoke import smoke
from tests.engines.docker_target import EPOCH, Index, index_server, make_build_spec, store_base
from tests.made.errors import fails
from tests.made.supplies import supplies
from tests.services import docker_daemon
from tests.services.children import LIMIT, child, wait_for
from tests.services.docker import write_config
from tests.services.gpu_host import library_of_the_future

CANARY = "canary-Xq7pW3vT9z"
CANARY_PEM = b"# a canary called Zk4mB8rL2n\n"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One store with a base, a target, the index of its wheels, and a daemon."""

    layout: Layout
    base: BuiltBase
    definition: BuildSpec
    index: Index
    daemon: DockerDaemon

    @property
    def secrets(self) -> BuildSecrets:
        return find_secrets(self.index.found(), {})

    def engine(self, secrets: BuildSecrets | None = None) -> DockerEngine:
        return DockerEngine(self.layout, self.daemon, codec="zstd", secrets=lambda _: secrets or self.secrets)

    def build(self, definition: BuildSpec | None = None) -> Image:
        return self.engine().build(definition or self.definition, supplies(self.base), QuietProgress())

    def changed(self, words: str) -> BuildSpec:
        """The target with another label: another image, of packages that are still the same."""
        return replace(self.definition, labels=(*self.definition.labels, ("words", words)))

    @property
    def tags(self) -> set[str]:
        return {tag for image in self.daemon.client.images.list() for tag in image.tags}

    @property
    def containers(self) -> list[str]:
        return [each.id for each in self.daemon.client.containers.list(all=True)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, debian_tar: Path, dockerd: str) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("docker")
    definition = make_build_spec(folder / "index")
    layout = Layout(folder / "store")
    with index_server(folder / "index", user="ada", password=CANARY) as index, layout.in_use(QuietProgress()):
        base = store_base(layout, debian_tar)
        daemon = DockerDaemon({**os.environ, "DOCKER_HOST": dockerd})
        yield Bench(layout=layout, base=base, definition=definition, index=index, daemon=daemon)


@pytest.fixture(scope="module")
def image(bench: Bench) -> Image:
    return bench.build()


@pytest.fixture
def runner(bench: Bench) -> DockerRunner:
    return DockerRunner(bench.layout, bench.daemon)


def sh(script: str, **fields: object) -> RunSpec:
    return RunSpec(argv=("sh", "-c", script), **fields)  # type: ignore[arg-type]


def stored(layout: Layout) -> set[str]:
    """What names an image in a store."""
    return {*layout.tags(), *(path.name for path in (layout.path / "images").glob("*"))}


# --- building --------------------------------------------------------------------------------------


def test_engine_says_what_it_is(bench: Bench) -> None:
    assert bench.engine().require().startswith("docker ")
    assert ", buildx 0." in bench.engine().require()


def test_image_is_in_the_store_and_in_the_daemon(bench: Bench, image: Image) -> None:
    assert bench.layout.image("tiny:1.0-cu121") == image
    assert bench.daemon.client.images.get("tiny:1.0-cu121").id == image.config
    assert image.layers[0].descriptor == replace(
        bench.base.image.layers[0].descriptor, annotations=image.layers[0].descriptor.annotations
    )
    for layer in image.layers:
        path = bench.layout.blob_path(layer.descriptor.digest)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        plain = hashlib.sha256(b"".join(codec("zstd").decompress(path))).hexdigest()
        assert f"sha256:{plain}" == layer.diff_id
    assert dict(image.environment)["TINY_WORDS"] == 'it\'s $HOME, "really" \\ so'
    config = json.loads(bench.layout.blob_path(image.config).read_bytes())
    assert config["created"] == "2023-11-14T22:13:20Z"
    assert EPOCH == 1_700_000_000
    assert config["config"]["Labels"] == dict(bench.definition.labels)
    assert config["config"]["Cmd"] == ["python"]
    manifest = json.loads(bench.layout.blob_path(image.manifest).read_bytes())
    assert manifest["annotations"]["org.opencontainers.image.base.digest"] == bench.base.image.manifest


def test_no_name_of_the_build_itself_stays(bench: Bench, image: Image) -> None:
    base = f"imagefactory/base:{bench.base.image.config[7:19]}"
    assert {tag for tag in bench.tags if tag.startswith("imagefactory/")} <= {base}
    assert [path.name for path in bench.layout.tmp.iterdir()] == []
    assert bench.containers == []


def test_nothing_changed_asks_nobody(bench: Bench, image: Image) -> None:
    asked = len(bench.index.asked)
    assert bench.engine().find(bench.definition, bench.base) == image
    assert bench.build() == image
    assert len(bench.index.asked) == asked


def test_image_runs_by_docker_and_by_unshare_alike(bench: Bench, image: Image, runner: DockerRunner) -> None:
    spec = sh('tiny; printf %s "$TINY_WORDS"')
    for each in (runner, UnshareRunner(bench.layout)):
        done = each.run(image, spec)
        assert (done.returncode, done.stdout) == (0, 'tiny runs 7\nit\'s $HOME, "really" \\ so'), done
    command = [
        "docker",
        "--host",
        bench.daemon.environ["DOCKER_HOST"],
        "run",
        "--rm",
        "tiny:1.0-cu121",
        "tiny",
    ]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "tiny runs 7\n"


def test_smoke_test_in_docker(bench: Bench, image: Image, runner: DockerRunner, tmp_path: Path) -> None:
    trial = SmokeTest(image=image, definition=bench.definition, nonce="5eed")
    report = smoke(trial, runner, QuietProgress(), records=tmp_path / "checks", scratch=tmp_path)
    assert report.passed, report.checks
    assert {check.name: check.state for check in report.checks} == {
        "packages": "passed",
        "libraries": "passed",
    }


def test_one_label_changed_makes_no_layer_anew(bench: Bench, image: Image) -> None:
    other = bench.build(bench.changed("two"))
    assert other.config != image.config
    assert {layer.descriptor.digest for layer in other.layers} == {
        layer.descriptor.digest for layer in image.layers
    }
    bench.engine().tag(bench.definition, image)
    assert bench.layout.image("tiny:1.0-cu121") == image
    assert bench.daemon.client.images.get("tiny:1.0-cu121").id == image.config


def test_failed_build_shows_the_last_lines_and_leaves_nothing(bench: Bench) -> None:
    wheels = tuple(replace(wheel, sha256="0" * 64) for wheel in bench.definition.lock.wheels)
    wrong = replace(bench.definition, lock=replace(bench.definition.lock, wheels=wheels))
    names, tags = stored(bench.layout), bench.tags
    shown = io.StringIO()
    with pytest.raises(BuildError) as caught:
        bench.engine().build(wrong, supplies(bench.base), LineProgress(shown))
    assert "build 3/3: RUN" in caught.value.message
    assert "DO NOT MATCH THE HASHES" in caught.value.message
    assert "exit code 1" in caught.value.message
    assert len(caught.value.message.splitlines()) <= 42
    assert "docker build definitions/tiny-1.0-cu121" in caught.value.hint
    assert stored(bench.layout) == names
    assert bench.tags == tags
    assert list(bench.layout.tmp.iterdir()) == []
    assert "docker build" in shown.getvalue()


CHILD = """
import pickle, sys
from imagefactory.build.docker import DockerEngine
from imagefactory.runtime.docker_daemon import DockerDaemon
from imagefactory.oci.layout import Layout
from imagefactory.progress import QuietProgress
from tests.made.supplies import supplies
store, environ, definition, base, secrets = pickle.load(open(sys.argv[1], "rb"))
engine = DockerEngine(Layout(store), DockerDaemon(environ), codec="zstd", secrets=lambda _: secrets)
engine.build(definition, supplies(base), QuietProgress())
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_killed_build_leaves_no_image_and_can_be_run_again(
    bench: Bench, signal_number: int, tmp_path: Path
) -> None:
    words = f"killed by {signal_number}"
    wheels = tmp_path / "index"
    definition = make_build_spec(wheels, words)  # other packages, so that BuildKit's cache has no answer
    names, tags = stored(bench.layout), bench.tags
    with index_server(wheels, user="ada", password=CANARY) as index:
        secrets = find_secrets(index.found(), {})
        job = (bench.layout.path, bench.daemon.environ, definition, bench.base, secrets)
        (tmp_path / "job").write_bytes(pickle.dumps(job))
        index.hold.set()
        argv = [sys.executable, "-c", CHILD, str(tmp_path / "job")]
        with child(argv, stderr=subprocess.PIPE, text=True) as build:

            def asked() -> bool:
                assert build.poll() is None, build.stderr and build.stderr.read()
                return bool(index.asked)

            wait_for(asked, "the build asks for its packages")
            build.send_signal(signal_number)
            error = build.communicate(timeout=LIMIT)[1]
        assert build.returncode == -signal_number or (signal_number == signal.SIGINT and build.returncode)
        assert CANARY not in error
        assert stored(bench.layout) == names
        if signal_number == signal.SIGINT:
            assert not [tag for tag in bench.tags - tags if not tag.startswith("imagefactory/base")]
            assert list(bench.layout.tmp.iterdir()) == []
        index.hold.clear()
        index.release.set()
        built = DockerEngine(bench.layout, bench.daemon, codec="zstd", secrets=lambda _: secrets).build(
            definition, supplies(bench.base), QuietProgress()
        )
    assert DockerRunner(bench.layout, bench.daemon).run(built, sh("tiny")).stdout == f"{words} 7\n"
    assert not [tag for tag in bench.tags if tag.startswith("imagefactory/build")]
    bench.layout.untag("tiny:1.0-cu121")
    for left in bench.layout.tmp.iterdir():  # by the kill; `image prune` would take it
        shutil.rmtree(left)


# --- what must not be seen -------------------------------------------------------------------------


def test_canaries_are_in_no_layer_config_history_log_or_error(bench: Bench, tmp_path: Path) -> None:
    """A password of the index and a certificate reach pip, and nothing that stays."""
    wheels = tmp_path / "index"
    definition = make_build_spec(wheels, "canary test")
    (tmp_path / "ca.pem").write_bytes(CANARY_PEM)
    shown = io.StringIO()
    with index_server(wheels, user="ada", password=CANARY) as index:
        bundle = str(tmp_path / "ca.pem")
        without = find_secrets(replace(index.found(login=False), certificates=bundle), {})
        with pytest.raises(BuildError) as refused:
            bench.engine(without).build(definition, supplies(bench.base), LineProgress(shown))
        assert "401" in refused.value.message or "No matching distribution" in refused.value.message

        given = find_secrets(replace(index.found(), certificates=bundle), {})
        assert CANARY in given.pip_conf
        assert given.certificates == CANARY_PEM
        image = bench.engine(given).build(definition, supplies(bench.base), LineProgress(shown))
        assert index.asked

        # A failing build prints what it has: pip its index, our error the last lines.
        lock = replace(
            definition.lock, wheels=tuple(replace(w, sha256="0" * 64) for w in definition.lock.wheels)
        )
        with pytest.raises(BuildError) as failed:
            bench.engine(given).build(
                replace(definition, lock=lock), supplies(bench.base), LineProgress(shown)
            )

    told = shown.getvalue() + "".join(
        error.value.message + error.value.hint + repr(error.value.__cause__) for error in (refused, failed)
    )
    client = bench.daemon.client
    inspected = json.dumps([client.api.inspect_image(image.config), client.api.history(image.config)])
    canaries = (CANARY.encode(), base64.b64encode(f"ada:{CANARY}".encode()), CANARY_PEM.strip())
    for canary in canaries:
        assert canary not in told.encode()
        assert canary not in inspected.encode()
        for layer in image.layers:
            path = bench.layout.blob_path(layer.descriptor.digest)
            assert canary not in b"".join(codec("zstd").decompress(path))
        for digest in (image.digest, image.manifest, image.config):
            assert canary not in bench.layout.blob_path(digest).read_bytes()
        # Nor in anything else of the daemon's own records and of the store, compressed layers aside.
        for path in bench.layout.path.rglob("*"):
            if path.is_file() and path.parent.name != "sha256" and "unpacked" not in path.parts:
                assert canary not in path.read_bytes(), path
    bench.layout.untag("tiny:1.0-cu121")


def test_raw_output_of_buildkit_holds_no_canary(bench: Bench, tmp_path: Path) -> None:
    """What BuildKit itself prints, before we hide anything, with the cache off."""
    from imagefactory.build.docker import BuildxRequest, command
    from imagefactory.build.folders import render, write_definitions

    write_definitions(tmp_path / "context", render(bench.definition))
    (tmp_path / "ca.pem").write_bytes(CANARY_PEM)
    secrets = (("pip.conf", "env=CONF"), ("ca.pem", "src=ca.pem"))
    build = BuildxRequest(
        context="context", base=f"imagefactory/base:{bench.base.image.config[7:19]}", tag="raw:1",
        platform="linux/amd64", epoch=EPOCH, secrets=secrets, host_network=True,
    )  # fmt: skip
    bench.daemon.ensure(bench.layout, bench.base.image, build.base, QuietProgress())
    argv = [*command(build)[:3], "--no-cache", *command(build)[3:]]
    environ = {**bench.daemon.environ, "CONF": bench.secrets.pip_conf}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert CANARY not in " ".join(argv)
    bench.daemon.untag("raw:1")


# --- running ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("sh", "-c", "kill -TERM $$"), 143),
        (("no-such-command",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_exit_codes(argv: tuple[str, ...], code: int, image: Image, runner: DockerRunner) -> None:
    assert runner.run(image, RunSpec(argv=argv)).returncode == code


def test_arguments_arrive_as_they_are(image: Image, runner: DockerRunner) -> None:
    words = ("a b", "$HOME", '"', "'", "", "\\", "é\n")
    done = runner.run(image, RunSpec(argv=("python", "-c", "import sys; print(sys.argv[1:])", *words)))
    assert done.stdout == f"{list(words)!r}\n"


def test_inside_there_is_no_power_no_network_and_nothing_of_the_host(
    image: Image, runner: DockerRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "x")
    done = runner.run(image, sh("env; cat /proc/self/status; ls /sys/class/net; id -u"))
    assert "HOST_SECRET" not in done.stdout
    assert "CapBnd:\t0000000000000000" in done.stdout
    assert "CapEff:\t0000000000000000" in done.stdout
    assert "NoNewPrivs:\t1" in done.stdout
    assert "Seccomp:\t2" in done.stdout
    assert done.stdout.endswith("lo\n0\n")
    assert len(runner.run(image, sh("ls /sys/class/net", network=True)).stdout.split()) > 1


def test_user_folder_environment_and_mounts(image: Image, runner: DockerRunner, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/word").write_text("read me")
    (tmp_path / "out").mkdir(mode=0o777)
    (tmp_path / "out").chmod(0o777)
    tmp_path.chmod(0o755)
    spec = sh(
        'id -u; id -g; pwd; echo "$A"; cat /w/word; echo written > /w/out/file; touch /w/no || echo refused',
        uid=65534,
        workdir="/usr",
        environment=(("A", "b=c d"),),
        mounts=(
            Mount(source=tmp_path / "out", target="/w/out", writable=True),
            Mount(source=tmp_path / "in", target="/w"),
        ),
    )
    (tmp_path / "in/out").mkdir()
    done = runner.run(image, spec)
    assert done.stdout == "65534\n65534\n/usr\nb=c d\nread merefused\n", done
    assert (tmp_path / "out/file").read_text() == "written\n"
    missing = replace(spec, mounts=(Mount(source=tmp_path / "nothing", target="/w"),))
    with fails("mount-failed", "nothing"):
        runner.run(image, missing)


def test_read_only_leaves_scratch_alone(image: Image, runner: DockerRunner) -> None:
    script = "touch /x 2>&1 || echo no; for d in /tmp /dev/shm; do cp /bin/true $d/t && $d/t && echo $d; done"
    done = runner.run(image, sh(script, read_only=True, uid=65534))
    assert done.stdout.splitlines()[1:] == ["no", "/tmp", "/dev/shm"], done


def test_image_stays_untouched(bench: Bench, image: Image, runner: DockerRunner) -> None:
    runner.run(image, sh("echo changed > /opt/env/pyvenv.cfg; touch /new"))
    # By its exit code: docker may lose what a command prints that ends at once, on a machine that is full.
    done = runner.run(image, sh("grep -q 'home = /usr/bin' /opt/env/pyvenv.cfg && test ! -e /new && exit 7"))
    assert done.returncode == 7, done
    assert bench.containers == []


def test_time_out_ends_the_command(bench: Bench, image: Image, runner: DockerRunner) -> None:
    for limit in (6.0, 60.0):  # on a busy machine the container begins late
        done = runner.run(image, sh("echo begun; trap '' TERM INT; sleep 1000", timeout=limit))
        assert (done.returncode, done.timed_out) == (137, True)
        assert done.seconds >= limit
        if done.stdout:
            break
    assert done.stdout == "begun\n"
    assert bench.containers == []


def test_endless_output_is_cut(image: Image, runner: DockerRunner) -> None:
    done = runner.run(image, sh("yes | head -c 40000000; echo end >&2"))
    assert done.returncode == 0
    assert len(done.stdout) < OUTPUT_LIMIT + 100
    assert done.stdout.endswith(f"[cut after {OUTPUT_LIMIT} bytes]\n")
    assert done.stderr == "end\n"


def test_daemon_that_lost_the_image_gets_it_from_the_store(bench: Bench, image: Image) -> None:
    bench.daemon.client.images.remove(image.config, force=True)
    assert not bench.daemon.inspect(image.config)
    runner = DockerRunner(bench.layout, bench.daemon)
    assert runner.run(image, sh("tiny")).stdout == "tiny runs 7\n"
    assert bench.daemon.inspect(image.config)
    bench.engine().tag(bench.definition, image)
    bench.daemon.untag(f"imagefactory/run:{image.config[7:19]}")


def test_damaged_layer_never_becomes_an_image(bench: Bench, tmp_path: Path) -> None:
    """A cut blob is seen here; one of the right length with other bytes by the daemon."""
    layout = Layout(tmp_path / "store")
    packer, files = codec("gzip"), io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as tar:
        info = tarfile.TarInfo("etc/one")
        info.size = 100_000
        tar.addfile(info, io.BytesIO(os.urandom(100_000)))
    compressor = packer.compressor()
    layer = layout.add(compressor.compress(files.getvalue()) + compressor.flush(), packer.media_type)
    diff_ids = [f"sha256:{hashlib.sha256(files.getvalue()).hexdigest()}"]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    manifest = {
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer)],
    }
    image = layout.load("odd:1", write_index(layout, manifest, "linux/amd64"))
    blob = layout.blob_path(layer.digest)
    data = blob.read_bytes()
    for harmed in (data[:-1], data[:1000] + bytes(40) + data[1040:]):
        blob.write_bytes(harmed)
        with pytest.raises(ImagefactoryError):
            bench.daemon.ensure(layout, image, "odd:1", QuietProgress())
        assert bench.daemon.find(image, "odd:1") == ""
    blob.write_bytes(data)
    assert bench.daemon.ensure(layout, image, "odd:1", QuietProgress()) == image.config
    bench.daemon.untag("odd:1")


RUN_CHILD = """
import os, pickle, sys
from imagefactory.runtime.docker_daemon import DockerDaemon
from imagefactory.model import RunSpec
from imagefactory.oci.layout import Layout
from imagefactory.runtime.docker import DockerRunner
store, environ, image, spec = pickle.load(open(sys.argv[1], "rb"))
done = DockerRunner(Layout(store), DockerDaemon(environ)).run(image, spec)
sys.exit(done.returncode)
"""


def child_argv(bench: Bench, image: Image, spec: RunSpec, folder: Path) -> list[str]:
    job = (bench.layout.path, bench.daemon.environ, image, spec)
    (folder / "job").write_bytes(pickle.dumps(job))
    return [sys.executable, "-c", RUN_CHILD, str(folder / "job")]


def returned(argv: list[str]) -> int:
    return subprocess.run(argv, capture_output=True, timeout=LIMIT).returncode


def test_ctrl_c_removes_the_container(bench: Bench, image: Image, tmp_path: Path) -> None:
    argv = child_argv(bench, image, sh("sleep 1000"), tmp_path)
    with child(argv, stderr=subprocess.DEVNULL) as runs:
        wait_for(lambda: bench.daemon.client.containers.list(), "the container runs")
        runs.send_signal(signal.SIGINT)
        assert runs.wait(timeout=LIMIT) != 0
    assert bench.containers == []


def test_what_a_killed_runner_left_is_removed_by_the_next(
    bench: Bench, image: Image, runner: DockerRunner, tmp_path: Path
) -> None:
    running = bench.daemon.client.containers
    (tmp_path / "gate").mkdir()
    mounts = (Mount(source=tmp_path / "gate", target="/gate"),)
    waits = sh("until test -e /gate/open; do sleep 0.1; done; exit 5", mounts=mounts)
    with child(child_argv(bench, image, sh("sleep 1000"), tmp_path)) as one:
        wait_for(running.list, "the first container runs")
        with child(child_argv(bench, image, waits, tmp_path)) as other:
            wait_for(lambda: len(running.list(filters={"label": OWNER})) == 2, "both containers run")
            one.kill()
            one.wait(timeout=LIMIT)
            assert runner.run(image, sh("true")).returncode == 0
            assert len(bench.containers) == 1  # the other runner's still runs
            (tmp_path / "gate/open").touch()
            assert other.wait(timeout=LIMIT) == 5
    assert bench.containers == []


def test_not_captured_command_has_our_streams_and_its_own_code(
    bench: Bench, image: Image, tmp_path: Path
) -> None:
    spec = sh("cat; echo problem >&2; exit 3", capture=False)
    done = subprocess.run(
        child_argv(bench, image, spec, tmp_path), input="some input\n", capture_output=True, text=True,
        timeout=LIMIT,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, "some input\n", "problem\n")
    lost = RunSpec(argv=("no-such-command",), capture=False)
    assert returned(child_argv(bench, image, lost, tmp_path)) == 127
    late = sh("sleep 1000", capture=False, timeout=2.0)
    assert returned(child_argv(bench, image, late, tmp_path)) == 137
    assert bench.containers == []


def test_a_time_limit_holds_where_docker_starts_after_it(bench: Bench, image: Image, tmp_path: Path) -> None:
    slow, path = tmp_path / "bin/docker", bench.daemon.environ["PATH"]
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nsleep 3\nPATH={path}\nexec docker "$@"\n')
    slow.chmod(0o755)
    daemon = DockerDaemon({**bench.daemon.environ, "PATH": f"{slow.parent}:{path}"})
    spec = sh("sleep 1000", capture=False, timeout=0.5)
    assert returned(child_argv(replace(bench, daemon=daemon), image, spec, tmp_path)) == 137
    assert bench.containers == []


def test_on_a_terminal_the_command_has_one(bench: Bench, image: Image, tmp_path: Path) -> None:
    spec = sh('tty && echo "$TERM" && read word && echo got $word; exit 4', capture=False)
    argv = child_argv(bench, image, spec, tmp_path)
    master, slave = os.openpty()
    seen = b""
    sent = False
    with child(argv, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        try:
            while True:
                data = os.read(master, 4096)
                seen += data
                if not sent and b"xterm" in seen:
                    os.write(master, b"hello\n")
                    sent = True
        except OSError:  # the other end has gone
            pass
        os.close(master)
        assert process.wait(timeout=LIMIT) == 4
    assert b"/dev/pts/0" in seen
    assert b"got hello" in seen
    assert bench.containers == []


def test_gpus_without_nvidias_runtime_fail_loudly(bench: Bench, image: Image, runner: DockerRunner) -> None:
    with fails("docker-gpu-unavailable", hint="nvidia-ctk"):
        runner.run(image, sh("true", gpus=True))
    assert bench.containers == []


def test_gpus_come_by_cdi(bench: Bench, image: Image, tmp_path: Path) -> None:
    """Devices that are /dev/null: those of the request come in, and what does not exist is an error."""
    devices = [
        {"name": name, "containerEdits": {"deviceNodes": [{"path": f"/dev/gpu{n}", "hostPath": "/dev/null"}]}}
        for name, n in (("0", 0), ("1", 1), ("GPU-b", 1), ("all", 2))
    ]
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}
    script = "cd /dev && ls -d gpu*"
    with docker_daemon(tmp_path / "cdi-docker") as service:
        path = service.cdi / "gpus.json"
        path.write_text(json.dumps(spec))
        runner = DockerRunner(
            bench.layout, DockerDaemon({**bench.daemon.environ, "DOCKER_HOST": service.host})
        )
        for gpus, nodes in (
            ((), ["gpu2"]),
            (((0, "GPU-a", ""),), ["gpu0"]),
            (((7, "GPU-b", ""),), ["gpu1"]),  # by UUID, whatever the number
            (((1, "GPU-c", ""), (0, "GPU-a", "")), ["gpu0", "gpu1"]),
        ):
            assert runner.run(image, sh(script, gpus=True, selected_gpus=gpus)).stdout.split() == nodes
        assert runner.run(image, sh(script)).returncode != 0
        with fails("docker-cdi-unavailable", "MIG-a"):
            runner.run(image, sh("true", gpus=True, selected_gpus=((0, "MIG-a", ""),)))
        library = tmp_path / "libcuda.so.1"
        library.write_bytes(library_of_the_future())
        mount = {"hostPath": str(library), "containerPath": "/usr/lib/libcuda.so.1"}
        path.write_text(json.dumps({**spec, "containerEdits": {"mounts": [mount]}}))
        with fails("image-glibc-too-old", r"libcuda.so.1.* 2\.99 "):
            runner.run(image, sh("true", gpus=True))
        # After an update of the driver its libraries have other names.
        gone = {"hostPath": "/usr/lib/libcuda.so.525.60", "containerPath": "/usr/lib/libcuda.so.525.60"}
        path.write_text(json.dumps({**spec, "containerEdits": {"mounts": [gone]}}))
        with fails("docker-cdi-unavailable", "libcuda"):
            runner.run(image, sh("true", gpus=True))
        lost = {"path": "/dev/gpu9", "hostPath": "/dev/nvidia-is-not-here"}
        path.write_text(json.dumps({**spec, "containerEdits": {"deviceNodes": [lost]}}))
        with fails("docker-cdi-unavailable", "nvidia-is-not-here"):
            runner.run(image, sh("true", gpus=True))


# --- other daemons ---------------------------------------------------------------------------------


def test_podman_is_refused_for_builds_and_gpus_and_runs_the_rest(
    bench: Bench, image: Image, podman: str
) -> None:
    daemon = DockerDaemon({**bench.daemon.environ, "DOCKER_HOST": podman})
    with pytest.raises(ToolError, match="podman") as caught:
        DockerEngine(bench.layout, daemon, codec="zstd", secrets=lambda _: bench.secrets).require()
    assert "assemble" in caught.value.hint
    runner = DockerRunner(bench.layout, daemon)
    assert runner.require().startswith("podman ")
    with fails("podman-ignores-gpus"):
        runner.run(image, sh("true", gpus=True))
    done: CommandResult = runner.run(image, sh("tiny; id -u", uid=65534))
    assert (done.returncode, done.stdout) == (0, "tiny runs 7\n65534\n"), done


def test_daemon_that_keeps_images_in_containerd(bench: Bench, image: Image, tmp_path: Path) -> None:
    """It calls an image by another digest and saves layers compressed; the image is the same."""
    with docker_daemon(tmp_path / "containerd", containerd_snapshotter=True) as service:
        daemon = DockerDaemon({**bench.daemon.environ, "DOCKER_HOST": service.host})
        runner = DockerRunner(bench.layout, daemon)
        assert runner.run(image, sh("tiny")).stdout == "tiny runs 7\n"
        engine = DockerEngine(bench.layout, daemon, codec="zstd", secrets=lambda _: bench.secrets)
        assert "docker" in engine.require()
        built = engine.build(bench.changed("containerd"), supplies(bench.base), QuietProgress())
        assert runner.run(built, sh("tiny")).stdout == "tiny runs 7\n"
    assert built.layers[0].diff_id == image.layers[0].diff_id
    assert UnshareRunner(bench.layout).run(built, sh("tiny")).stdout == "tiny runs 7\n"
    bench.layout.untag("tiny:1.0-cu121")


def test_missing_plugin_and_command_are_told_with_what_mends_them(bench: Bench, tmp_path: Path) -> None:
    config = write_config(tmp_path / "config")
    (config / "config.json").write_text("{}")
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin/docker"
    fake.write_text("#!/bin/sh\necho \"docker: 'buildx' is not a docker command.\" >&2\nexit 1\n")
    fake.chmod(0o755)
    for path, match, hint in (
        (str(tmp_path / "bin"), "no buildx plugin", "docker-buildx"),
        (str(tmp_path), "not installed", "apt-get install"),
    ):
        daemon = DockerDaemon({**bench.daemon.environ, "PATH": path})
        with pytest.raises(ToolError, match=match) as caught:
            DockerEngine(bench.layout, daemon, codec="zstd", secrets=lambda _: bench.secrets).require()
        assert hint in caught.value.hint
