"""`make dist`: what the wheel and the sdist hold, and that the wheel works without a checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("learner", "rollout_server", "shared_contracts")
BESIDE_THE_PACKAGES = {
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml"),
    *("requirements/cpu.txt", "requirements/gpu.txt", "configs/schema.json"),
}
PROFILES = ("configs/stage2_rollout_aligned", "configs/stage2_two_channel")
OF_SETUPTOOLS = {
    *("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"),
}
UV = Path(sys.executable).parent / "uv"


def version() -> str:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert isinstance(found, str)
    return found


def tracked(*folders: str) -> set[str]:
    done = subprocess.run(
        ["git", "ls-files", "-z", *folders], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return set(done.stdout.split("\0")) - {""}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([ROOT / "scripts" / "dist", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"rollmatch-{version()}-py3-none-any.whl"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, and with what this one has beside it."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    # Of the folder named here Python reads no .pth, which would lead to the checkout.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    offline = ("--offline", "--no-deps", "--quiet")
    subprocess.run(
        [UV, "pip", "install", *offline, "--python", venv / "bin/python", wheel], check=True
    )
    return venv / "bin"


def said(folder: Path, *words: str | Path) -> str:
    """What a command prints that runs in `folder` and knows nothing of the checkout."""
    unset = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    about = f"rollmatch-{version()}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read(f"{about}licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert names == tracked(*PACKAGES) | {about + name for name in OF_SETUPTOOLS}
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_sdist_has_the_packages_the_locked_requirements_and_the_profiles(dist: Path) -> None:
    root = f"rollmatch-{version()}/"
    with tarfile.open(dist / f"rollmatch-{version()}.tar.gz") as archive:
        names = {file.name.removeprefix(root) for file in archive if file.isfile()}
    written = {"PKG-INFO", "setup.cfg"} | {n for n in names if n.startswith("rollmatch.egg-info/")}
    assert names - written == tracked(*PACKAGES, *PROFILES) | BESIDE_THE_PACKAGES


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        about = Parser().parsestr(
            archive.read(f"rollmatch-{version()}.dist-info/METADATA").decode()
        )
    assert (about["Name"], about["Version"]) == ("rollmatch", version())
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload() == (ROOT / "README.md").read_text()
    assert set(about.get_all("Provides-Extra", [])) == {"cpu", "dev", "gpu"}


def test_both_programs_of_the_wheel_say_the_version_of_pyproject(
    installed: Path, tmp_path: Path
) -> None:
    for program in ("learner", "rollout-server"):
        assert said(tmp_path, installed / program, "--version") == f"rollmatch {version()}\n"


def test_the_wheel_is_imported_and_not_the_checkout(installed: Path, tmp_path: Path) -> None:
    files = f"import {', '.join(PACKAGES)}\nfor p in ({', '.join(PACKAGES)}): print(p.__file__)"
    found = said(tmp_path, installed / "python", "-c", files).split()
    assert len(found) == len(PACKAGES)
    assert all(Path(file).is_relative_to(installed.parent) for file in found)


def test_the_programs_of_the_wheel_work_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert "--gpus" in said(tmp_path, installed / "rollout-server", "serve", "--help")
    toy = ("toy", "make-data", "--out", "data", "--train", "4", "--val", "2")
    said(tmp_path, installed / "learner", *toy)
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 4


def test_the_configs_of_the_demo_load_where_the_wheel_has_them(
    installed: Path, tmp_path: Path
) -> None:
    (folder,) = installed.parent.glob("lib/python*/site-packages/learner/operate/demo_configs")
    shipped = sorted(file.name for file in (ROOT / "configs" / "demo").iterdir())
    assert sorted(file.name for file in folder.iterdir()) == shipped
    # It extends the other one.
    file = folder / "two_channel.yaml"
    said(tmp_path, installed / "learner", "config", "check", "--keys-only", file)


@pytest.mark.req("INIT-01")
def test_the_template_of_init_is_in_the_wheel(installed: Path) -> None:
    name = "learner/operate/templates/init.yaml.jinja"
    (shipped,) = installed.parent.glob(f"lib/python*/site-packages/{name}")
    assert shipped.read_bytes() == (ROOT / name).read_bytes()
