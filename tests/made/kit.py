"""A kit for an image that is none, and programs that stand where docker and apptainer would, for unit tests.

The programs speak as much of the command lines as a kit uses and note every call. Inside of "the image" they
write the report that a test has laid out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagefactory.oci.manifests import Descriptor, Image, OciLayer
from imagefactory.runtime.hardware import Places
from imagefactory.suite.gpu import table
from imagefactory.verify.kit.program import main
from imagefactory.verify.kits import KitRequest, make_kit
from imagefactory.verify.nonces import IssuedNonce, NonceStore, format_nonce
from imagefactory.verify.report import VerifiedImage
from tests.services.gpu_host import UUID, Told, make_host

NONCE = format_nonce(bytes(range(16)))
INDEX, MANIFEST, CONFIG, DIFF_ID = (f"sha256:{letter * 64}" for letter in "abcd")
REFERENCE = f"127.0.0.1:5000/tiny@{INDEX}"
SUBJECT = VerifiedImage(target="tiny-12.1-cu121", index=INDEX, manifest=MANIFEST, config=CONFIG)
LAYER = OciLayer(
    descriptor=Descriptor(media_type="application/vnd.oci.image.layer.v1.tar+gzip", digest=CONFIG, size=1),
    diff_id=DIFF_ID,
    title="all",
)
IMAGE = Image(
    name="tiny:12.1-cu121",
    digest=INDEX,
    manifest=MANIFEST,
    config=CONFIG,
    size=1,
    layers=(LAYER,),
    environment=(),
)
ASKED: dict[str, Any] = {
    "format": table.FORMAT,
    "nonce": NONCE,
    "target": "tiny-12.1-cu121",
    "framework": "tiny",
    "version": "12.1",
    "cuda": "12.1",
    "python": "3.11",
    "packages": {},
    "conda": {},
    "level": "quick",
    "capability": "",
    "driver": "12.0",
    "predicted": {},
    "rehearsal": False,
}
ORDER = KitRequest(
    subject=SUBJECT,
    made=IMAGE,
    asked=ASKED,
    argv=("/opt/env/bin/python", "-I", "-B", "/imagefactory/suite/verify.py", "expect", "report"),
    waive=(),
    timeout=30.0,
    reference=REFERENCE,
    plain_http=True,
)

# It answers as docker or apptainer would by what lies beside it: answers.json.
PROGRAM = """#!{python} -IS
import json, os, pathlib, re, sys, time
here = pathlib.Path(__file__).resolve().parent
name, argv = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
answers = json.loads((here / "answers.json").read_text())
with (here / "calls.jsonl").open("a") as file:
    file.write(json.dumps({{"argv": [name, *argv], "environ": dict(os.environ)}}) + "\\n")
key = next((key for key in answers if re.fullmatch(key, " ".join([name, *argv]), re.DOTALL)), None)
if key is None:
    sys.exit(f"no answer for {{name}} {{argv}}")
answer = answers[key]
if isinstance(answer, list):  # one a call, the last for all further ones
    calls = [json.loads(line)["argv"] for line in (here / "calls.jsonl").read_text().splitlines()]
    before = sum(bool(re.fullmatch(key, " ".join(call), re.DOTALL)) for call in calls)
    answer = answer[min(before, len(answer)) - 1]
inside = dict(
    (pair["destination" if "destination" in pair else "dst"], pair["source" if "source" in pair else "src"])
    for pair in (dict(part.split("=") for part in value.split(",") if "=" in part)
                 for option, value in zip(argv, argv[1:]) if option == "--mount")
)
for word in argv:
    if word.startswith("--container-mounts="):
        pairs = (mount.split(":")[:2] for mount in word.partition("=")[2].split(","))
        inside = {{place: source for source, place in pairs}}
if "report" in answer:
    asked = json.loads(pathlib.Path(inside["/imagefactory/expect"], "expectations.json").read_text())
    text = json.dumps(answer["report"]).replace("NONCE", asked["nonce"])
    pathlib.Path(inside["/imagefactory/report"], "report.json").write_text(text)
for line in answer.get("says", ()):
    print(line, flush=True)
for line in answer.get("complains", ()):
    print(line, file=sys.stderr, flush=True)
if "writes" in answer:
    pathlib.Path(argv[-2]).write_text(answer["writes"])
if "caches" in answer:
    pathlib.Path(os.environ["ENROOT_CACHE_PATH"], answer["caches"]).write_text("")
time.sleep(answer.get("sleeps", 0))
sys.exit(answer.get("code", 0))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A nonce store, a kit in `kit`, a machine with a GPU, and the folder of the programs."""

    nonces: NonceStore
    issued: IssuedNonce
    kit: Path
    places: Places
    programs: Path

    def environ(self, **more: str) -> dict[str, str]:
        return {"PATH": str(self.programs), "HOME": "/nowhere", "SECRET": "canary", **more}

    def run(self, *argv: str, places: Places | None = None, **more: str) -> int:
        """What `python3 run.py ARGV` does."""
        return main(argv, self.environ(**more), self.kit, places or self.places)

    def calls(self) -> list[list[str]]:
        return [call["argv"] for call in self._calls()]

    def environs(self) -> list[dict[str, str]]:
        return [call["environ"] for call in self._calls()]

    def _calls(self) -> list[dict[str, Any]]:
        path = self.programs / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def result(self, name: str) -> Any:
        return json.loads((self.kit / "result" / name).read_bytes())


def make_bench(folder: Path, order: KitRequest = ORDER, told: Told | None = None) -> Bench:
    """A kit of `order`, made now; its programs answer nothing yet."""
    nonces = NonceStore(folder / "nonces")
    issued = make_kit(folder / "kit", order, nonces, datetime.now(UTC))
    places = make_host(folder / "host", told)
    programs = folder / "bin"
    programs.mkdir()
    return Bench(nonces=nonces, issued=issued, kit=folder / "kit", places=places, programs=programs)


def answer(bench: Bench, name: str, answers: dict[str, Any]) -> None:
    """Puts the program `name` there.

    `answers` maps a pattern of the whole command line to what it does, or to a list of that, one a call.
    """
    known = bench.programs / "answers.json"
    old = json.loads(known.read_text()) if known.exists() else {}
    known.write_text(json.dumps({**old, **answers}))
    path = bench.programs / name
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)


def inspected(**changes: Any) -> dict[str, Any]:
    """What `docker image inspect` says of the kit's image."""
    return {"Id": CONFIG, "RepoDigests": [REFERENCE], "RootFS": {"Layers": [DIFF_ID]}, **changes}


def docker(bench: Bench, run: dict[str, Any], **changes: Any) -> None:
    """A docker that has the image and does `run` for `docker run`."""
    answer(
        bench,
        "docker",
        {
            "docker --version": {"says": ["Docker version 26.1.5, build a72d7cd"]},
            "docker version .*": {"says": ["26.1.5"]},
            "docker info .*json .*": {"says": ["{}"]},
            "docker image inspect .*": {"says": [json.dumps(inspected(**changes))]},
            "docker rm .*": {},
            "docker run .*": run,
        },
    )


def apptainer(bench: Bench, run: dict[str, Any], look: Sequence[str] = ()) -> None:
    """An apptainer that does `run`. `look` are the lines of a look at the image's libcuda."""
    answer(
        bench,
        "apptainer",
        {
            "apptainer .*exec .* -c cd .*": {"says": look},
            "apptainer --version": {"says": ["apptainer version 1.4.5"]},
            "apptainer (pull|build) .*": {"writes": "a .sif"},
            "apptainer .*exec .*": run,
        },
    )


def pyxis(bench: Bench, run: dict[str, Any], config: str = CONFIG, version: str = "4.1.2") -> None:
    answer(bench, "srun", {"srun --help": {"says": ["--container-image=IMAGE"]}, "srun --ntasks=1 .*": run})
    imported = {"writes": "a .sqsh", "caches": config.partition(":")[2]}
    answer(bench, "enroot", {"enroot version": {"says": [version]}, "enroot import .*": imported})


def suite_report(level: str = "quick", **changes: Any) -> dict[str, Any]:
    """Return the report of a suite whose checks all pass."""
    rows = [
        {
            "name": name,
            "state": table.PASSED,
            "detail": "as it should be",
            "outcome": "",
            "seconds": 0.1,
            "numbers": {"elements": 1024.0},
        }
        for name in table.checks_of(level)
    ]
    return {
        "format": table.FORMAT,
        "nonce": "NONCE",
        "target": ASKED["target"],
        "python": "3.11.2",
        "level": level,
        "rehearsal": False,
        "cuda": "12.4",
        "libcuda": "",
        "device": {"name": "Test GPU", "capability": "8.0", "uuid": UUID, "memory": 16 << 30},
        "running": "",
        "checks": rows,
        **changes,
    }


def open_files() -> int:
    """How many descriptors this process holds."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def asked(**changes: Any) -> KitRequest:
    return replace(ORDER, asked={**ASKED, **changes})
