"""Rendered files: definitions/ is what the recipes give, and each file means what its Definition says."""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from imagefactory.build import steps
from imagefactory.build.definition import define, pyvenv_cfg, venv_links
from imagefactory.build.folders import check_definitions, copied_files, render, write_definitions
from imagefactory.build.render import _environment, render_apptainer, render_dockerfile
from imagefactory.errors import LockError, RecipeError, UsageError
from imagefactory.gpu.drivers import driver_floor
from imagefactory.lock.files import read_lock
from imagefactory.lock.pypi.requirements import parse_lock
from imagefactory.model import BaseSpec, BuildSpec, ContainerStart, Lock, OwnFile, Target
from imagefactory.recipes.expand import expand_lenient
from imagefactory.recipes.read import read_bases, read_recipes
from imagefactory.recipes.values import named_packages
from imagefactory.suite import table
from tests.made.errors import fails
from tests.made.rendered import SECTIONS, body, instructions, parsed, sections
from tests.made.values import make_base, make_lock, make_target
from tests.services.tier import many

ROOT = Path(__file__).parents[3]


@pytest.fixture
def definition() -> BuildSpec:
    return define(make_target(), make_base(), make_lock())


def test_both_texts_say_which_indexes_pip_must_know() -> None:
    lock = make_lock(origins=(("idna", "lab"), ("torch", "cu121")))
    for text in (
        render_dockerfile(define(make_target(), make_base(), lock)),
        render_apptainer(define(make_target(), make_base(), lock)),
    ):
        assert (
            "# Some wheels are of the package indexes that the factory calls cu121 and lab: pip.conf" in text
        )
    assert "extra-index-url" not in render_dockerfile(define(make_target(), make_base(), make_lock()))


# --- the committed files ---------------------------------------------------------------------------


def committed() -> dict[str, BuildSpec]:
    bases, targets, _ = expand_lenient(read_recipes(ROOT / "recipes"), read_bases(ROOT / "recipes"), {})
    by_name = {base.name: base for base in bases}
    made: dict[str, BuildSpec] = {}
    for target in sorted(targets, key=lambda target: target.on != ""):
        lock = read_lock(ROOT / "lockfiles", target)
        assert lock, target.name
        below = [made[target.on]] if target.on else []
        made[target.name] = replace(
            define(target, by_name[target.base], lock, tuple(one.lock for one in below)),
            named_below=tuple(named_packages(one.target) for one in below),
        )
    return made


def test_definitions_are_what_the_recipes_give() -> None:
    """`imagefactory render --check` for every target; on a fault: `imagefactory render`, and look."""
    files = {
        f"{name}/{file}": text for name, made in committed().items() for file, text in render(made).items()
    }
    assert len(files) >= 3 * 10
    assert check_definitions(ROOT / "definitions", files) == ()


def test_hadolint_finds_nothing(tmp_path: Path, definition: BuildSpec) -> None:
    own = OwnFile(
        path="/app/train.py", source=tmp_path / "train.py", sha256="0" * 64, size=1, executable=False
    )
    start = ContainerStart(entrypoint=("python", "$x"), command=("it's",), workdir="/app", user="1000:1000")
    pulled = make_base(
        suite="", packages=(), image=f"x.org/y:1@sha256:{'0' * 64}", interpreter="/opt/a b/python"
    )
    made = (
        replace(definition, files=(own,), start=start, environment=(("A", "$B 'c' \"d\""),)),
        define(make_target(), pulled, make_lock()),
    )
    for number, one in enumerate(made):
        (tmp_path / f"{number}.Dockerfile").write_text(render_dockerfile(one))
    # By day the first and the last of those with the same instructions in the same order.
    shapes: dict[tuple[str, ...], list[Path]] = {}
    for path in sorted(ROOT.glob("definitions/*/Dockerfile")):
        shapes.setdefault(tuple(re.findall(r"^[A-Z]+ ", path.read_text(), re.MULTILINE)), []).append(path)
    assert len(shapes) >= 3
    committed = [path for same in shapes.values() for path in many((same[0], same[-1]), same)]
    paths = [*tmp_path.glob("*.Dockerfile"), *committed]
    command = [Path(sys.executable).with_name("hadolint"), "--no-color", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("framework", list(table.FRAMEWORKS))
def test_definition_imports_the_module_that_the_suite_imports(framework: str) -> None:
    name = f"imagefactory.suite.frameworks.{table.FRAMEWORKS[framework]}"
    assert dict(importlib.import_module(name).MODULES)[framework] == table.module_of(framework)


# --- define ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "floor"),
    [
        ("12.1", "12.0"),
        ("12.8", "12.0"),
        ("12", "12.0"),
        ("11.7", "11.0"),
        ("13.2", "13.0"),
        ("10.2", "10.2"),
    ],
)
def test_driver_floor_is_the_major_version(cuda: str, floor: str) -> None:
    assert driver_floor(cuda) == floor


def test_environment_and_labels(definition: BuildSpec) -> None:
    assert definition.environment == (
        (
            "PATH",
            "/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin",
        ),
        ("VIRTUAL_ENV", "/opt/env"),
        ("HOME", "/home/user"),
        ("LANG", "C.UTF-8"),
        ("NVIDIA_VISIBLE_DEVICES", "all"),
        ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility"),
        ("NVIDIA_REQUIRE_CUDA", "cuda>=12.0"),
        ("PYTHONUNBUFFERED", "1"),
        ("TORCH_CUDA_ARCH_LIST", "8.0"),
        ("OMP_PLACES", "cores"),
        ("LD_LIBRARY_PATH", "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"),
    )
    labels = dict(definition.labels)
    assert labels["org.opencontainers.image.version"] == "2.3.1"
    assert labels["imagefactory.target"] == "pytorch-2.3-cu121"
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", labels["imagefactory.lock"])


def test_lock_label_follows_the_wheels() -> None:
    lock = make_lock()
    other = replace(lock, wheels=(replace(lock.wheels[0], sha256="3" * 64), lock.wheels[1]))
    one, two = (define(make_target(), make_base(), each) for each in (lock, other))
    assert dict(one.labels)["imagefactory.lock"] != dict(two.labels)["imagefactory.lock"]


def test_venv_files(definition: BuildSpec) -> None:
    assert "home = /usr/bin\ninclude-system-site-packages = false\n" in pyvenv_cfg(definition)
    assert dict(venv_links(definition)) == {
        "/opt/env/bin/python": "/usr/bin/python3.11",
        "/opt/env/bin/python3": "python",
        "/opt/env/bin/python3.11": "python",
        "/opt/env/lib64": "lib",
    }


@pytest.mark.parametrize(
    ("target", "base", "lock", "code"),
    [
        (make_target(), make_base(), make_lock(target="pytorch-2.5-cu124"), "lock-mismatch"),
        (make_target(), make_base(), make_lock(python="3.13"), "lock-mismatch"),
        (make_target(), make_base(), make_lock(platform="manylinux_2_36_aarch64"), "lock-mismatch"),
        (make_target(), make_base(), make_lock(wheels=()), "lock-mismatch"),
        (make_target(base="debian-13"), make_base(), make_lock(), "python-mismatch"),
        (make_target(), make_base(python="3.13"), make_lock(), "python-mismatch"),
        (make_target(platform="windows/amd64"), make_base(), make_lock(), "platform-unknown"),
        (make_target(environment=(("PATH", "/bin"),)), make_base(), make_lock(), "name-reserved"),
        (make_target(cuda="12.x"), make_base(), make_lock(), "value-invalid"),
    ],
)
def test_what_does_not_fit_is_refused(target: Target, base: BaseSpec, lock: Lock, code: str) -> None:
    with pytest.raises((LockError, RecipeError)) as caught:
        define(target, base, lock)
    error = caught.value
    assert (error.diagnostics[0].code if isinstance(error, RecipeError) else error.code) == code


# --- the files -------------------------------------------------------------------------------------


def test_definition_file_has_these_sections_alone(definition: BuildSpec) -> None:
    text = render_apptainer(definition)
    header, found = sections(text)
    assert header == {"bootstrap": "docker", "from": "docker.io/library/debian:12-slim"}
    assert [f"%{name}" for name, _ in found] == SECTIONS
    labels = [tuple(line.strip().split(" ", 1)) for line in body(text, "labels").split("\n") if line]
    assert tuple(labels) == definition.labels


def test_nothing_is_left_for_apptainer_to_fill_in(definition: BuildSpec) -> None:
    assert "{{" not in render_apptainer(definition)


def test_an_engines_own_base_stands_in_the_header(definition: BuildSpec) -> None:
    header, _ = sections(render_apptainer(definition, bootstrap="oci", image_path="base:latest"))
    assert header == {"bootstrap": "oci", "from": "base:latest"}


def test_environment_section_means_the_environment(definition: BuildSpec) -> None:
    hostile = 'it\'s $HOME `id` "x" \\t #no % [[ 7*7 ]]'
    changed = replace(definition, environment=(*definition.environment, ("ODD", hostile)))
    script = body(render_apptainer(changed), "environment") + "\nexec env -0"
    out = subprocess.run(["sh", "-c", script], capture_output=True, env={}, check=True).stdout.decode()
    seen = dict(entry.split("=", 1) for entry in out.split("\0") if entry)
    # Everybody's home is apptainer's own affair.
    expected = {name: value for name, value in changed.environment if name != "HOME"}
    assert {name: seen[name] for name in expected} == expected
    assert "HOME" not in seen


def test_shell_parts_are_shell(definition: BuildSpec) -> None:
    text = render_apptainer(definition)
    scripts = [body(text, name) for name in ("post", "environment", "runscript")]
    scripts += [each.value for each in instructions(definition) if each.keyword == "RUN"]
    assert len(scripts) == 3 + 5
    for script in scripts:
        done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_settings_of_the_machine_come_as_secrets_to_pip_alone(definition: BuildSpec) -> None:
    """No ARG but the base: what an ARG holds stays in the history and in the cache."""
    found = instructions(definition)
    assert [each.value for each in found if each.keyword == "ARG"] == [f"BASE={definition.base.public}"]
    (pip,) = [each for each in found if "/opt/pip/bin/pip" in each.value]
    assert pip.flags == (
        "--mount=type=secret,id=pip.conf,target=/mnt/pip.conf",
        "--mount=type=secret,id=ca.pem,target=/mnt/ca.pem",
    )
    assert "if test -e /mnt/pip.conf; then export PIP_CONFIG_FILE=/mnt/pip.conf; fi" in pip.value
    assert "if test -e /mnt/ca.pem; then export PIP_CERT=/mnt/ca.pem; fi" in pip.value
    assert not [each for each in found if each is not pip and ("PIP_" in each.value or "secret" in str(each))]


def test_both_files_run_the_same_commands(definition: BuildSpec) -> None:
    post = " ".join(body(render_apptainer(definition), "post").replace("\\\n", " ").split())
    for each in instructions(definition):
        if each.keyword == "RUN":
            for command in each.value.removeprefix("set -eu; ").split("; "):
                assert command in post


def test_dockerfile_begins_with_a_comment_that_is_no_directive(definition: BuildSpec) -> None:
    tricky = replace(definition, target=replace(definition.target, description="escape=`"))
    first = render_dockerfile(tricky).splitlines()[0]
    assert not re.match(r"#\s*[A-Za-z][A-Za-z0-9]*\s*=", first)


def test_folder_holds_the_lock_it_installs(definition: BuildSpec) -> None:
    files = render(definition)
    assert list(files) == ["Dockerfile", "apptainer.def", "requirements.txt"]
    assert parse_lock(files["requirements.txt"], "requirements.txt") == definition.lock


HOSTILE = [
    "a\nRUN id",
    "a\rb",
    "a\u2028b",
    "a\u0085b",
    "a\0b",
    "a\u202eb",
    "a\tb",
    "a\\",
    "{{ BASE }}",
    "\x1b[1m",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("render_one", [render_dockerfile, render_apptainer])
@pytest.mark.parametrize("field", ["environment", "labels", "description"])
def test_hostile_values_raise(text: str, render_one, field: str, definition: BuildSpec) -> None:
    if field == "description":
        changed = replace(definition, target=replace(definition.target, description=text))
    else:
        changed = replace(definition, **{field: (*getattr(definition, field), ("odd", text))})
    with fails("value-not-quotable"):
        render_one(changed)


@pytest.mark.parametrize("name", ["A B", "A=B", "1A", "A\n", "", "A-B", "Ä"])
def test_hostile_names_raise(name: str, definition: BuildSpec) -> None:
    changed = replace(definition, environment=((name, "x"),))
    for render_one in (render_dockerfile, render_apptainer):
        with fails("value-not-quotable"):
            render_one(changed)


def test_label_without_quotes_keeps_its_blanks_or_is_refused(definition: BuildSpec) -> None:
    with fails("value-not-quotable"):
        render_apptainer(replace(definition, labels=(("key", " x"),)))


@pytest.mark.parametrize("public", ["debian:12 AS x", "debian:12\nRUN id", "$(id)", "", "-x"])
def test_hostile_base_raises(public: str, definition: BuildSpec) -> None:
    changed = replace(definition, base=replace(definition.base, public=public))
    for render_one in (render_dockerfile, render_apptainer):
        with fails("value-not-quotable"):
            render_one(changed)


def test_templates_print_nothing_without_a_filter() -> None:
    template = _environment().from_string("[[ value ]]")
    with pytest.raises(TypeError, match="without a filter"):
        template.render(value="x")
    assert _environment().from_string("[[ value | line ]]").render(value="{% x %}") == "{% x %}"


def test_array_is_json() -> None:
    assert steps.array(("python", 'a "b" $c')) == '["python", "a \\"b\\" $c"]'


# --- folders ---------------------------------------------------------------------------------------

FILES = {"one/Dockerfile": "FROM x\n", "one/requirements.txt": "a\nb\n", "two/Dockerfile": "FROM y\n"}


def test_written_files_are_right_and_stay_untouched(tmp_path: Path) -> None:
    write_definitions(tmp_path, FILES)
    assert check_definitions(tmp_path, FILES) == ()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    write_definitions(tmp_path, FILES)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_folders_above_are_made_too(tmp_path: Path) -> None:
    folder = tmp_path / "not/there/yet"
    write_definitions(folder, FILES)
    assert check_definitions(folder, FILES) == ()


def test_check_names_each_fault(tmp_path: Path) -> None:
    write_definitions(tmp_path, FILES)
    (tmp_path / "one/requirements.txt").write_text("a\nc\n")
    (tmp_path / "two/Dockerfile").unlink()
    (tmp_path / "three").mkdir()
    (tmp_path / "three/Dockerfile").write_text("FROM z\n")
    stale, missing, extra = check_definitions(tmp_path, FILES)
    assert "one/requirements.txt: stale" in stale
    assert "-c" in stale
    assert "+b" in stale
    assert "two/Dockerfile: missing" in missing
    assert "three/Dockerfile: no recipe makes it" in extra


def test_check_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert len(check_definitions(tmp_path / "definitions", FILES)) == len(FILES)


def test_line_ends_count(tmp_path: Path) -> None:
    write_definitions(tmp_path, FILES)
    (tmp_path / "one/requirements.txt").write_bytes(b"a\r\nb\r\n")
    (fault,) = check_definitions(tmp_path, FILES)
    assert "only line ends differ" in fault


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    write_definitions(tmp_path, {"a": "".join(f"{n}\n" for n in range(100))})
    (fault,) = check_definitions(tmp_path, {"a": "".join(f"{n}x\n" for n in range(100))})
    assert len(fault.splitlines()) < 20
    assert "more lines" in fault


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a\nb"])
def test_files_cannot_leave_their_folder(name: str, tmp_path: Path) -> None:
    with fails("path-invalid"):
        write_definitions(tmp_path / "definitions", {name: "x"})
    assert not (tmp_path / "x").exists()


def test_links_cannot_lead_out(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions/one").symlink_to(tmp_path / "out")
    with fails("link-leaves-project", "definitions/one"):
        write_definitions(tmp_path / "definitions", FILES)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_link_in_place_of_a_file_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep me")
    (tmp_path / "definitions/one").mkdir(parents=True)
    (tmp_path / "definitions/one/Dockerfile").symlink_to(victim)
    write_definitions(tmp_path / "definitions", FILES)
    assert victim.read_text() == "keep me"
    assert (tmp_path / "definitions/one/Dockerfile").read_text() == "FROM x\n"


def test_unwritable_folder_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as caught:
        write_definitions(tmp_path / "file", FILES)
    assert caught.value.hint


# --- the factory's own wheels ------------------------------------------------------------------------


@pytest.fixture
def with_wheel(tmp_path: Path) -> BuildSpec:
    file = tmp_path / "idna-3.7-py3-none-any.whl"
    file.write_bytes(b"wheel")
    lock = make_lock(origins=(("idna", f"./wheels/{file.name}"),))
    local = OwnFile(path=file.name, source=file, sha256="2" * 64, size=66_836, executable=False)
    return replace(define(make_target(), make_base(), lock), local=(local,))


def test_a_wheel_of_the_factory_is_copied_and_installed(with_wheel: BuildSpec, tmp_path: Path) -> None:
    text, folder = render_dockerfile(with_wheel), tmp_path / "definitions"
    assert parsed(text) == instructions(with_wheel)
    assert "COPY requirements.txt wheels/idna-3.7-py3-none-any.whl /opt/install/\n" in text
    for made in (text, render_apptainer(with_wheel)):
        assert "--find-links /opt/install --requirement /opt/install/requirements.txt" in made
        assert "rm -r /opt/pip /opt/install" in made
        assert "wheels/idna-3.7-py3-none-any.whl /opt/install/" in made
        assert "mkdir -p wheels" not in made
    write_definitions(folder, {"Dockerfile": text}, copied_files(with_wheel))
    assert (folder / "wheels/idna-3.7-py3-none-any.whl").read_bytes() == b"wheel"
    assert check_definitions(folder, {"Dockerfile": text}, copied_files(with_wheel)) == ()
    write_definitions(folder, {"Dockerfile": text})
    assert not any((folder / "wheels").iterdir())


def test_a_wheel_that_is_too_large_to_be_copied_is_said(with_wheel: BuildSpec) -> None:
    wheels = (replace(with_wheel.lock.wheels[0], size=50_000_001), *with_wheel.lock.wheels[1:])
    large = replace(
        with_wheel,
        lock=replace(with_wheel.lock, wheels=wheels),
        local=(replace(with_wheel.local[0], size=50_000_001),),
    )
    for made in (render_dockerfile(large), render_apptainer(large)):
        assert "#     mkdir -p wheels && cp ../../wheels/idna-3.7-py3-none-any.whl wheels/\n" in made
    assert copied_files(large, largest=50_000_000) == {}
    assert len(copied_files(large)) == 1  # an engine builds with it all the same


# --- own files ---------------------------------------------------------------------------------------


@pytest.fixture
def with_own(tmp_path: Path) -> BuildSpec:
    files = []
    for path in ("/app/train.py", "/opt/mine/start.sh"):
        source = tmp_path / path.rpartition("/")[2]
        source.write_text(path)
        executable = path.endswith(".sh")
        files.append(OwnFile(path=path, source=source, sha256="1" * 64, size=1, executable=executable))
    start = ContainerStart(
        entrypoint=("/opt/mine/start.sh",), command=("python", "a b.py"), workdir="/app", user="7"
    )
    return define(make_target(start=start), make_base(), make_lock(), (), tuple(files))


def test_own_files_and_start_in_both_languages(with_own: BuildSpec) -> None:
    text = render_dockerfile(with_own)
    assert parsed(text) == instructions(with_own)
    assert text.endswith(
        "# The recipe's own files, at their paths inside.\nCOPY files/ /\n\nWORKDIR /app\n\nUSER 7\n\n"
        'ENTRYPOINT ["/opt/mine/start.sh"]\n\nCMD ["python", "a b.py"]\n'
    )
    definition = render_apptainer(with_own)
    assert "    files/app /app\n    files/opt/mine /opt/mine\n" in definition
    assert "    chmod -R u=rwX,go=rX /app /opt/mine\n" in definition
    assert "    test $# -gt 0 || set -- python 'a b.py'; exec /opt/mine/start.sh \"$@\"\n" in definition


def test_own_files_are_written_checked_and_cleared(with_own: BuildSpec, tmp_path: Path) -> None:
    folder, texts = tmp_path / "definitions", render(with_own)
    write_definitions(folder, texts, copied_files(with_own))
    assert check_definitions(folder, texts, copied_files(with_own)) == ()
    start = folder / "files/opt/mine/start.sh"
    assert start.stat().st_mode & 0o777 == 0o755
    start.chmod(0o644)
    (folder / "files/app/train.py").write_text("another")
    found = check_definitions(folder, texts, copied_files(with_own))
    assert [fault.partition(": ")[2].partition("\n")[0] for fault in found] == ["stale", "stale"]
    write_definitions(folder, texts, copied_files(with_own))
    assert check_definitions(folder, texts, copied_files(with_own)) == ()
    write_definitions(folder, texts, copied_files(replace(with_own, files=with_own.files[:1])))
    assert not start.exists()
    assert check_definitions(folder, texts, copied_files(replace(with_own, files=with_own.files[:1]))) == ()


# --- links in the folder ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["files", "files/sub", "wheels"])
def test_nothing_behind_a_link_is_removed(tmp_path: Path, name: str) -> None:
    folder, foreign = tmp_path / "definitions/x", tmp_path / "foreign"
    (foreign / "deep").mkdir(parents=True)
    for path in (foreign / "one", foreign / "deep/two"):
        path.write_text("mine")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(foreign)
    with contextlib.suppress(UsageError):
        write_definitions(folder, {"Dockerfile": "FROM x\n"})
    assert {path.name for path in foreign.rglob("*")} == {"one", "deep", "two"}


def test_a_link_is_stale_is_not_shown_and_is_replaced(tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "x"
    folder.mkdir()
    secret.write_text("a private key\n")
    (folder / "Dockerfile").symlink_to(secret)
    (fault,) = check_definitions(folder, {"Dockerfile": "FROM x\n"})
    assert "private" not in fault
    write_definitions(folder, {"Dockerfile": "FROM x\n"})
    assert secret.read_text() == "a private key\n"
    assert not (folder / "Dockerfile").is_symlink()
    assert check_definitions(folder, {"Dockerfile": "FROM x\n"}) == ()
