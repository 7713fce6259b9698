"""`make dist`: the wheel has every file of the packages, and works without a checkout."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("learner", "rollout_server", "shared_contracts")
UV = Path(sys.executable).parent / "uv"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([ROOT / "scripts" / "dist", out], check=True)
    return next(out.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.req("INIT-01")
def test_the_wheel_holds_the_packages_with_their_data_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    command = ["git", "ls-files", *PACKAGES]
    tracked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert names == set(tracked.split())
    assert "learner/operate/templates/init.yaml.jinja" in names
    assert "learner/data/templates/look.html.jinja" in names


@pytest.mark.slow
@pytest.mark.req("MET-03")
def test_both_programs_of_the_wheel_run_outside_of_a_checkout(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    # Python reads no .pth below this path, so the checkout of this environment stays unknown.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = f"{UV} pip install --offline --no-deps --quiet --python {venv}/bin/python {wheel}"
    subprocess.run(install.split(), check=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def output(program: str, *words: str | Path) -> str:
        return subprocess.run(
            [venv / "bin" / program, *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            check=True,
        ).stdout

    # A run does not take the commit of a checkout that its environment happens to be in.
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    script = """
import learner, rollout_server, shared_contracts
from learner.training.run_log import software
print(learner.__file__, rollout_server.__file__, shared_contracts.__file__, software()["commit"])
"""
    *files, commit = output("python", "-c", script).split()
    assert (commit, [each for each in files if not Path(each).is_relative_to(venv)]) == ("None", [])
    for program in ("learner", "rollout-server"):
        assert output(program, "--version") == f"rollmatch {wheel.name.split('-')[1]}\n"
    config = site / "learner/operate/demo_configs/two_channel.yaml"
    output("learner", "config", "check", "--keys-only", config)
