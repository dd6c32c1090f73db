"""The command line: results on stdout, the rest on stderr, and the exit codes of the design."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imagefactory import cli, errors
from imagefactory.errors import ImagefactoryError, UsageError
from imagefactory.oci.layout import Layout
from imagefactory.recipes.values import SMOKE_CHECKS
from imagefactory.suite.table import CHECKS
from tests.made.command import Call, json_of
from tests.made.layout import add_image

ROOT = Path(__file__).parents[3]


def test_list_shows_every_target_and_its_lock(call: Call) -> None:
    said = call("list")
    assert said.code == 0
    assert said.err.startswith("next: imagefactory ")
    rows = [line.split() for line in said.out.splitlines()]
    head = ["TARGET", "FRAMEWORK", "CUDA", "PYTHON", "BASE", "LOCK", "BUILT", "PUSHED", "STATUS"]
    assert rows[0] == head
    assert ["pytorch-2.3-cu121", "torch", "2.3", "12.1", "3.11", "debian-12", "ok", "-", "-", "-"] in rows
    cpu = next(row for row in rows if row[0] == "jax-0.10.2-cpu")
    assert cpu[1:4] + cpu[-3:] == ["jax", "0.10.2", "none", "no", "GPU", "needed"]
    assert {row[6] for row in rows[1:]} == {"ok"}


def test_it_does_not_run_beside_the_other_package_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As pip leaves the two: the other's module lies among ours, and either's script comes here."""
    (tmp_path / "imagefactory.py").touch()
    (tmp_path / "cli").mkdir()
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "cli/__init__.py"))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == errors.EXIT_TOOL
    said = capsys.readouterr()
    assert said.out == ""
    assert str(tmp_path) in said.err
    assert " -m pip uninstall imagefactory && " in said.err
    assert said.err.endswith(" -m pip install --force-reinstall --no-deps gpu-imagefactory\n")


def test_json_carries_a_format_version(call: Call) -> None:
    listed = call("list", "--json", "pytorch-*").json()
    assert listed["format"] == "imagefactory.list/1"
    shown = call("show", "--json", "pytorch-2.3-cu121").json()
    assert shown["format"] == "imagefactory.show/1"
    packages = shown["packages"]
    assert isinstance(packages, list)
    assert {package["version"] for package in packages if package["name"] == "torch"} == {"2.3.1"}
    stored = call("image", "list", "--json").json()
    assert (stored["format"], stored["images"]) == ("imagefactory.image-list/1", [])


def test_show_tells_what_cuda_came(call: Call) -> None:
    said = call("show", "pytorch-2.3-cu121")
    assert "nvidia-cuda-runtime-cu12 12.1.105" in said.out
    assert "not in the store: imagefactory build pytorch-2.3-cu121" in said.out


def test_nothing_selected_names_the_nearest(call: Call) -> None:
    said = call("list", "pytorch-2.3-cu12")
    assert said.code == errors.EXIT_NOTHING_SELECTED
    assert said.out == ""
    assert "pytorch-2.3-cu121" in said.err


def test_a_recipe_fault_is_told_with_its_place(call: Call, root: Path) -> None:
    path = root / "recipes" / "pytorch.yaml"
    text = path.read_text()
    path.write_text(text.replace("framework: torch", "framwork: torch", 1))
    said = call("list", root=root)
    assert said.code == errors.EXIT_USAGE
    assert "recipes/pytorch.yaml:" in said.err
    assert "framework" in said.err


def test_an_invalid_recipe_stops_only_commands_about_it(call: Call, root: Path) -> None:
    (root / "recipes" / "broken.yaml").write_text("family: broken\n")
    for words in (("list",), ("lock", "--check"), ("render", "--check"), ("plan",), ("show", "broken-1.0")):
        said = call(*words, root=root)
        assert (said.code, said.error_codes[0]) == (errors.EXIT_USAGE, "recipe-invalid"), words
        assert "other recipe" not in said.err
    for words in (("list",), ("show",), ("lock", "--check"), ("plan",)):
        said = call(*words, "pytorch-2.3-cu121", root=root)
        assert (said.code, said.error_codes) == (0, ()), words
        assert said.err.count("1 other recipe is invalid (broken)") == 1
    said = call("run", "pytorch-2.3-cu121", "--", "true", root=root)
    assert said.error_codes == ("image-not-built",)
    said = call("recipe", "new", "mylab", "--extends", "pytorch-2.3-cu121", root=root)
    assert (said.code, said.error_codes) == (0, ())
    assert call("image", "prune", "--cache", "--dry-run", root=root).code == 0
    (root / "imagefactory.toml").touch()
    assert call("key", "create", "lab", root=root).code == 0
    assert call("key", "trust", "lab", root=root).code == 0
    assert call("key", "rotate", root=root).code == 0
    assert call("key", "retire", "lab-2", root=root).code == 0


def test_packages_of_an_invalid_recipe_stay_in_the_cache(call: Call, root: Path, tmp_path: Path) -> None:
    paths = {}
    for name in ("pytorch-2.3-cu121", "pytorch-conda-2.1-cu121"):
        packages = json.loads(call("show", "--json", name).out)["packages"]
        package = next(package for package in packages if package["name"] in ("torch", "pytorch"))
        paths[name] = (
            tmp_path / "cache" / "wheels" / package["sha256"][:2] / package["sha256"] / package["file"]
        )
        paths[name].parent.mkdir(parents=True)
        paths[name].write_bytes(b"x")
    for family in ("pytorch", "pytorch-conda"):
        (root / "recipes" / f"{family}.yaml").write_text(f"family: {family}\n")
    assert call("image", "prune", "--cache", "--json", root=root).json()["cache_bytes"] == 0
    for path in paths.values():
        assert path.exists()
    for path in (root / "lockfiles").glob("pytorch*"):
        path.unlink()
    assert call("image", "prune", "--cache", "--json", root=root).json()["cache_bytes"] == 2


def test_wrong_arguments_are_exit_code_2(call: Call) -> None:
    assert call("build").code == errors.EXIT_USAGE
    assert call("no-such-command").code == errors.EXIT_USAGE
    assert call("lock", "--check", "--upgrade-package", "idna").code == errors.EXIT_USAGE
    assert call("lock", "base:debian-11").code == errors.EXIT_USAGE


def test_checks_are_quiet_about_current_files_and_exit_4_on_stale_ones(call: Call, root: Path) -> None:
    assert call("lock", "--check").code == 0
    assert call("render", "--check").code == 0
    path = root / "recipes" / "jax.yaml"
    path.write_text(path.read_text().replace("constraints:", "packages: [six]\n    constraints:", 1))
    said = call("lock", "--check", root=root)
    assert said.code == errors.EXIT_STALE
    assert said.error_codes == ("lock-outdated",)
    assert "imagefactory lock jax-" in said.err
    stale = call("render", "--check", "pytorch-2.3-cu121", root=root)
    assert stale.code == errors.EXIT_STALE
    assert stale.error_codes == ("definition-outdated",)
    assert "imagefactory render pytorch-2.3-cu121" in stale.err
    assert call("render", "pytorch-2.3-cu121", root=root).code == 0
    assert call("render", "--check", "pytorch-2.3-cu121", root=root).code == 0
    assert call("build", "jax-0.4.30-cu12", root=root).code in (errors.EXIT_STALE, errors.EXIT_TOOL)


def test_a_check_with_faults_is_one_document(call: Call, root: Path) -> None:
    path = root / "recipes" / "jax.yaml"
    path.write_text(path.read_text().replace("constraints:", "packages: [six]\n    constraints:", 1))
    (root / "lockfiles" / "gone-1.0-cu12.unsolvable.txt").write_text("x")
    said = call("lock", "--check", "--json", root=root)
    assert said.code == errors.EXIT_STALE
    value = said.json()
    assert value["format"] == "imagefactory.lock-check/1"
    orphaned, outdated = value["errors"]  # type: ignore[misc]
    assert (orphaned["code"], outdated["code"]) == ("lock-orphaned", "lock-outdated")
    assert "lockfiles/gone-1.0-cu12.unsolvable.txt" in orphaned["message"]
    assert "jax-" in outdated["message"]
    assert "rm -r lockfiles/gone-1.0-cu12.unsolvable.txt" in said.err
    rendered = call("render", "--check", "--json", root=root)
    assert rendered.code == errors.EXIT_STALE
    assert "lock-orphaned" in rendered.error_codes


def test_a_folder_without_recipes_is_no_factory(call: Call, tmp_path: Path) -> None:
    for words in (("list",), ("recipe", "new", "lab")):
        said = call(*words, root=tmp_path)
        assert said.code == errors.EXIT_USAGE
        assert said.error_codes == ("project-not-found",)


def test_a_malformed_lock_is_named_by_line(call: Call, root: Path) -> None:
    path = root / "lockfiles" / "pytorch-2.3-cu121.requirements.txt"
    good = path.read_text()
    for bad in (good.replace("sha256:", "sha257:", 2), "<<<<<<< ours\n" + good):
        path.write_text(bad)
        said = call("show", "pytorch-2.3-cu121", root=root)
        assert said.code == errors.EXIT_LOCK
        assert "pytorch-2.3-cu121.requirements.txt:" in said.err
        assert "imagefactory lock pytorch-2.3-cu121" in said.err


def test_run_and_export_need_a_built_image(call: Call) -> None:
    for arguments in (("run", "pytorch-2.3-cu121", "--", "python"), ("image", "export", "pytorch-2.3-cu121")):
        said = call(*arguments)
        assert said.code == errors.EXIT_BUILD
        assert "imagefactory build pytorch-2.3-cu121" in said.err


@pytest.mark.parametrize(
    ("mount", "code"),
    [
        ("/tmp", "option-invalid"),
        ("/tmp:x", "option-invalid"),
        ("/tmp:/a/../b", "option-invalid"),
        ("/tmp:/x:rx", "option-invalid"),
        ("/no/such/folder:/x", "mount-source-missing"),
    ],
)
def test_a_wrong_mount_is_refused(mount: str, code: str) -> None:
    with pytest.raises(UsageError, match=f"--mount '{mount}'") as caught:
        cli.run._mount(mount)
    assert caught.value.code == code


def test_new_knows_the_frameworks_of_bundled_recipes(call: Call, root: Path) -> None:
    for words in (("cupy",), ("lab", "--framework", "cupy"), ("numba",), ("tvm",)):
        value = json_of(call("recipe", "new", *words, "--dry-run", "--json", root=root), "recipe")
        assert f"family: {words[0]}\n" in value["recipe"]
    assert call("recipe", "new", "foo", "--dry-run", root=root).error_codes == ("framework-not-known",)


def test_import_of_a_missing_file_reports_that_and_no_other_recipe(call: Call, root: Path) -> None:
    (root / "recipes" / "bad.yaml").write_text("family: bad\nfoo: [\n")
    said = call("recipe", "import", "nofile.txt", "--family", "lab", root=root)
    assert (said.code, said.error_codes) == (errors.EXIT_USAGE, ("cannot-read-file",))
    assert not (root / "recipes" / "lab.yaml").exists()


def test_new_writes_a_recipe_that_reads(call: Call, root: Path) -> None:
    said = call("recipe", "new", "mylab-torch", "--framework", "torch", root=root)
    assert said.code == 0
    assert "mylab-torch" in call("list", root=root).out
    again = call("recipe", "new", "mylab-torch", root=root)
    assert (again.code, again.error_codes) == (errors.EXIT_USAGE, ("recipe-exists",))
    assert "mylab-torch.yaml" in again.err
    assert call("recipe", "new", "../escape", root=root).code == errors.EXIT_USAGE
    assert not (root / "escape.yaml").exists()


def test_updating_a_package_that_no_lock_holds_selects_nothing(call: Call) -> None:
    said = call("lock", "--upgrade-package", "no-such-package")
    assert said.code == errors.EXIT_NOTHING_SELECTED


def test_an_image_is_removed_by_name_and_the_cache_by_need(call: Call, tmp_path: Path) -> None:
    add_image(Layout(tmp_path / "store"), "demo:1.0-cu12", [b"one"])
    needed = json.loads(call("show", "--json", "pytorch-2.3-cu121").out)["packages"][0]
    kept = tmp_path / "cache" / "wheels" / needed["sha256"][:2] / needed["sha256"] / needed["file"]
    other = tmp_path / "cache" / "wheels" / "00" / ("0" * 64) / "old-1-py3-none-any.whl"
    archive = tmp_path / "cache" / "conda" / "00" / ("0" * 64) / "old-1-0.conda"
    unpacked = tmp_path / "cache" / "conda-pkgs" / "old-1-0" / "lib" / "old.so"
    for path in (kept, other, archive, unpacked):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 10)
    wrong = call("image", "remove", "demo-1.0-cu12")
    assert (wrong.code, wrong.error_codes) == (errors.EXIT_NOTHING_SELECTED, ("image-not-found",))
    assert "demo:1.0-cu12" in wrong.err  # the nearest name
    assert call("image", "remove", "demo:1.0-cu12").code == 0
    planned = call("image", "prune", "--cache", "--dry-run", "--json").json()
    assert (planned["blobs"], planned["cache_bytes"]) == (4, 30)
    assert other.exists()
    assert archive.exists()
    assert unpacked.exists()
    assert call("image", "prune", "--cache").code == 0
    assert call("image", "prune", "--cache", "--json").json()["bytes"] == 0
    assert kept.exists()
    assert not other.exists()
    assert not archive.exists()
    assert not list((tmp_path / "cache" / "conda-pkgs").iterdir())


def test_a_folder_that_is_no_store_is_never_collected(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tmp/thesis.tex", "blobs/sha256/mine", "layers/photo.json", "unpacked/stuff/x"):
        path = tmp_path / "home" / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    before = sorted((tmp_path / "home").rglob("*"))
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / "home"))
    said = call("image", "prune")
    assert said.code == errors.EXIT_BUILD
    assert said.error_codes == ("store-invalid",)
    assert sorted((tmp_path / "home").rglob("*")) == before


@pytest.mark.parametrize("command", ["show", "run", "image export"])
def test_a_pattern_that_fits_several_is_refused_where_one_is_meant(call: Call, command: str) -> None:
    said = call(*command.split(), "pytorch-[12]*")
    assert said.code == errors.EXIT_USAGE
    assert "matches 10 targets" in said.err
    assert call("show", "pytorch-2.3*").code == 0


def test_options_after_the_target_of_run_are_not_taken_for_a_command(call: Call, tmp_path: Path) -> None:
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    said = call("run", "pytorch-2.3-cu121", "--network", "--", "true")
    assert (said.code, said.error_codes) == (errors.EXIT_USAGE, ("option-misplaced",))
    assert "imagefactory run --network pytorch-2.3-cu121 -- COMMAND" in said.err


def test_a_folder_that_is_no_factory_is_said(call: Call, tmp_path: Path) -> None:
    said = call("list", root=tmp_path)
    assert said.code == errors.EXIT_USAGE
    assert said.error_codes == ("project-not-found",)


def test_the_factory_is_found_from_a_folder_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs")
    with pytest.raises(SystemExit) as ended:
        cli.main(["list"])
    assert ended.value.code == 0


def test_an_error_is_json_where_json_was_asked_for(call: Call) -> None:
    said = call("build", "nope", "--json")
    assert said.code == errors.EXIT_NOTHING_SELECTED
    (error,) = said.json()["errors"]  # type: ignore[misc]
    assert error["exit_code"] == said.code


def test_what_no_recipe_makes_is_stale(call: Call, root: Path) -> None:
    shutil.copytree(ROOT / "definitions", root / "definitions", dirs_exist_ok=True)
    assert call("lock", "--check", root=root).code == 0
    (root / "lockfiles" / "ghost-1.0-cu12.requirements.txt").write_text("")
    (root / "definitions" / "ghost-1.0-cu12").mkdir()
    for command in ("lock", "render"):
        said = call(command, "--check", root=root)
        assert said.code == errors.EXIT_STALE
        assert "lock-orphaned" in said.error_codes
        assert "definitions/ghost-1.0-cu12" in said.err


@pytest.mark.parametrize("content", ["[]", "", '{"manifests": [{}]}', '{"manifests": 3}'])
def test_a_damaged_index_is_said_with_what_mends_it(call: Call, tmp_path: Path, content: str) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "index.json").write_text(content)
    said = call("image", "list")
    assert said.code == errors.EXIT_BUILD
    assert f"rm {tmp_path}/store/index.json" in said.err


def test_a_store_that_is_a_file_is_said(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IMAGEFACTORY_STORE", str(tmp_path / "file"))
    said = call("image", "list")
    assert said.code == errors.EXIT_BUILD
    assert "set `store`" in said.err


def test_a_reader_that_leaves_does_not_change_the_exit_code() -> None:
    for command, code in (("list", 0), ("list nope", 3)):
        done = subprocess.run(
            ["bash", "-c", f'"{sys.executable}" -m imagefactory {command} | true; exit ${{PIPESTATUS[0]}}'],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


def test_interrupted_is_the_last_word_whatever_threads_still_tell() -> None:
    program = """
import os, sys, threading, time
from imagefactory import cli, progress
end = os._exit
os._exit = lambda code: time.sleep(0.1) or end(code)  # threads get their turn
spoken = set()
def talk():
    while True:
        progress.LineProgress(sys.stderr).note("  one: 6 blobs")
        spoken.add(threading.get_ident())
@cli.cli.command("stop")  # click makes an Abort of what it raises
def stop():
    for _ in range(4):
        threading.Thread(target=talk).start()  # as in a request that takes minutes: none is waited for
    while len(spoken) < 4:
        time.sleep(0.01)
    raise KeyboardInterrupt
cli.main(["stop"])
"""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert done.returncode == errors.EXIT_INTERRUPTED
        assert done.stderr.splitlines()[-1] == "interrupted: run the same command again to continue"


def test_a_signal_that_another_thread_receives_ends_a_wait_for_a_lock() -> None:
    program = """
import signal, threading, time
from imagefactory import cli
lock = threading.Lock()
def receive():
    asleep = 0
    while asleep < 20:  # it sleeps for a moment too where it waits for its turn
        time.sleep(0.005)
        with open("/proc/self/stat") as file:  # of the main thread
            asleep = asleep + 1 if file.read().rpartition(")")[2].split()[0] == "S" else 0
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait()
@cli.cli.command("stop")
def stop():
    lock.acquire()
    threading.Thread(target=receive, daemon=True).start()
    lock.acquire()
cli.main(["stop"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == errors.EXIT_INTERRUPTED, done.stderr
    assert done.stderr.split("\n")[1:] == ["interrupted: run the same command again to continue", ""]


def test_interrupted_twice_is_told_once() -> None:
    program = """
import os, signal
from imagefactory import cli
write = cli.write_terminal
cli.write_terminal = lambda *told: os.kill(os.getpid(), signal.SIGINT) or write(*told)
@cli.cli.command("stop")
def stop():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
cli.main(["stop"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == errors.EXIT_INTERRUPTED, done.stderr
    assert done.stderr.split("\n")[1:] == ["interrupted: run the same command again to continue", ""]


def test_an_archive_never_takes_the_place_of_a_device(call: Call, tmp_path: Path) -> None:
    add_image(Layout(tmp_path / "store"), "pytorch:2.3-cu121", [b"one"])
    said = call("image", "export", "pytorch-2.3-cu121", "-o", "/dev/null")
    assert said.code == errors.EXIT_USAGE
    assert said.error_codes == ("output-not-file",)
    assert Path("/dev/null").is_char_device()


def test_every_command_has_help_and_every_option_says_what_it_does() -> None:
    def walk(command: object, path: str) -> None:
        import click

        assert isinstance(command, click.Command)
        assert command.help, path
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{path} {parameter.name}"
        if isinstance(command, click.Group):
            for name, below in command.commands.items():
                walk(below, f"{path} {name}")

    walk(cli.cli, "imagefactory")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(call: Call, shell: str) -> None:
    assert "_IMAGEFACTORY_COMPLETE" in call("completion", shell).out


def test_the_shell_completes_targets() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "imagefactory"],
        env={
            "_IMAGEFACTORY_COMPLETE": "bash_complete",
            "COMP_WORDS": "imagefactory build pytorch-2.3",
            "COMP_CWORD": "2",
        },
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert "pytorch-2.3-cu121" in done.stdout


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.recipes, "print_result", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["-C", str(ROOT), "list"])


def test_every_error_has_an_exit_code_of_its_kind() -> None:
    def kinds(kind: type[ImagefactoryError]) -> list[type[ImagefactoryError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in kinds(child))]

    for kind in kinds(ImagefactoryError)[1:]:
        assert kind.exit_code not in (errors.EXIT_OK, errors.EXIT_BUG), kind


def test_the_suite_has_a_function_for_each_check_of_recipes() -> None:
    assert tuple(CHECKS) == SMOKE_CHECKS


def test_light_commands_import_nothing_heavy() -> None:
    code = (
        "import sys; from imagefactory import cli\n"
        "try: cli.main(['-C', sys.argv[1], 'list'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'requests', 'rich', 'jinja2', 'uv', 'tenacity', 'zstandard', 'isal', 'installer'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (("compat", "jax-0.10.2-cpu"), "target-without-gpu", "jax-0.10.2-cpu"),
        (("recipe", "import", "y.yml", "--family", "x", "--cuda", "none"), "option-invalid", "--cuda none"),
    ],
)
def test_what_asks_for_gpus_says_what_is_for_cpus(
    call: Call, words: tuple[str, ...], code: str, named: str
) -> None:
    told = call(*words)
    assert (told.code, told.error_codes) == (2, (code,))
    assert named in told.err


def test_verify_says_what_is_for_cpus(call: Call) -> None:
    told = call("verify", "jax-0.10.2-cpu")
    assert told.code == 2
    assert "jax-0.10.2-cpu" in told.err
    assert "the GPU suite" in told.err


def test_tables_plans_and_compat_have_no_cell_for_cpus(call: Call, tmp_path: Path) -> None:
    said = call("report", "numba", "--output", str(tmp_path / "tables.json"), "--format", "json")
    assert "only for CPUs, so not a combination: numba-0.68-cpu" in said.out
    assert (
        "only for CPUs, so not a combination: numba-0.68-cpu"
        in call("report", "numba", "--format", "csv").err
    )
    assert "numba-0.68-cpu" not in (tmp_path / "tables.json").read_text().partition('"notes"')[0]
    assert "1 target: 1 to build; 0 cells" in call("plan", "numba-0.68-cpu").out
    assert "numba-0.68-cpu" not in call("compat", "numba").out


@pytest.mark.parametrize("thread", [False, True])
def test_the_traceback_of_a_bug_steers_no_terminal(thread: bool) -> None:
    """It quotes what it was about, which a stranger may have written. The exit code stays a bug's."""
    fail = "raise ValueError('\\x1b]0;owned\\x07 \\u202e')"
    if thread:
        fail = f"t = threading.Thread(target=exec, args=({fail!r},)); t.start(); t.join()"
    program = (
        "import threading\nfrom imagefactory import cli\n"
        f"def go(**_):\n    {fail}\ncli.cli.main = go\ncli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if thread else 1)
    assert "ValueError: ?]0;owned? ?" in done.stderr
    assert done.stderr.replace("\n", "").isprintable()
