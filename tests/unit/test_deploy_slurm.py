"""deploy/slurm: a job's options, and the job itself with Slurm's commands played (DEP-01).

`srun` here runs its command once on this machine and notes what it was told; the servers, the
learner and the health check are stand-ins of a few lines. What the job starts is then parsed by
the programs themselves.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from learner.config import load_config
from tests.unit.deployment import DEPLOY, ROOT, command_fault, commands_in, parsed

SBATCH = DEPLOY / "slurm" / "train.sbatch"
PROD = ROOT / "configs/stage2_two_channel/prod/default.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.req("DEP-01")]

# --- Options ------------------------------------------------------------------------------

# Each option of sbatch that is known here, with the form of its value.
OPTIONS = {
    "job-name": r"[\w-]+",
    "nodes": r"[1-9]\d*",
    "ntasks-per-node": r"[1-9]\d*",
    "gpus-per-node": r"(\w+:)?\d+",
    "exclusive": "",
    "time": r"(\d+-)?\d{1,2}:[0-5]\d:[0-5]\d",
    "signal": r"(R?B?:)?[A-Z]+\d?@\d+",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"\S*%j\S*",
}


def option_faults(script: str) -> list[str]:
    faults = []
    head, _, body = script.partition("\nset -euo pipefail\n")
    for line in re.findall(r"^#SBATCH(.*)$", head, re.MULTILINE):
        match = re.fullmatch(r" --([\w-]+)(?:=(\S+))?", line)
        if match is None or match[1] not in OPTIONS:
            faults.append(f"unknown: {line}")
        elif not re.fullmatch(OPTIONS[match[1]], match[2] or ""):
            faults.append(f"form of {match[1]}: {match[2]}")
    if "#SBATCH" in body:
        faults.append("sbatch does not read options after the first command")
    return faults


def test_sbatch_knows_every_option() -> None:
    script = SBATCH.read_text(encoding="utf-8")
    assert option_faults(script) == []
    assert "--requeue" in script
    assert re.search(r"--signal=B:USR1@\d{3}$", script, re.MULTILINE)
    assert "trap 'requeue=1' USR1" in script


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("--ntasks-per-node=1", "--tasks-per-nod=1", "unknown"),
        ("--time=24:00:00", "--time=24h", "form of time"),
        ("--nodes=2", "--nodes=two", "form of nodes"),
        ("--signal=B:USR1@300", "--signal=USR1", "form of signal"),
        ("#SBATCH --requeue", "#SBATCH requeue", "unknown"),
        ("HTTP_PORT=8000\n", "HTTP_PORT=8000\n#SBATCH --requeue\n", "after the first command"),
    ],
)
def test_a_wrong_option_is_caught(old: str, new: str, found: str) -> None:
    script = SBATCH.read_text(encoding="utf-8")
    assert old in script
    assert any(found in fault for fault in option_faults(script.replace(old, new)))


# --- A job --------------------------------------------------------------------------------

STAND_INS = {
    # Notes its command, and runs it in place of a node.
    "srun": """
echo "srun $*" >>"$JOB_LOG"
echo $$ >>"$JOB_TASKS"
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 exec "$@"
""",
    # To the tasks of all steps, of which some have ended.
    "scancel": """
echo "scancel $*" >>"$JOB_LOG"
for task in $(<"$JOB_TASKS"); do kill -TERM "$task" 2>/dev/null; done
""",
    "scontrol": """
if [[ $1 == show ]]; then printf 'node%s\\n' 1 2 3; else echo "scontrol $*" >>"$JOB_LOG"; fi
""",
    "rollout-server": """
echo "rollout-server $*" >>"$JOB_LOG"
trap 'echo "server stopped" >>"$JOB_LOG"; exit 0' TERM
[[ ${SERVER_FAILS-} ]] && exit 1
touch "$JOB_HEALTHY"
while true; do sleep 0.1; [[ -e ${SERVER_DIES:-/nowhere} ]] && exit 1; done
""",
    "python3": f"""
[[ $1 == -m ]] || exec {sys.executable} "$@"
[[ "$2 $3" == "learner.operate.torchrun -" ]] || exit 9
shift 3
"""
    + """
echo "torchrun $*" >>"$JOB_LOG"
cp -p "$ROLLOUT_SERVER_TOKEN_FILE" "$JOB_TOKEN"; cp "${@: -1}" "$JOB_YAML"
echo "umask $(umask), folder $(stat -c %a "$(dirname "${@: -1}")")" >>"$JOB_LOG"
trap 'echo "learner stopped" >>"$JOB_LOG"; exit 143' TERM
while [[ ${LEARNER_STAYS-} ]]; do sleep 0.1; done
exit "${LEARNER_EXIT:-0}"
""",
}


@dataclass
class Job:
    """A submitted job of three nodes, in its own folder."""

    folder: Path
    process: "subprocess.Popen[str]"

    @property
    def log(self) -> str:
        log = self.folder / "log"
        return log.read_text(encoding="utf-8") if log.exists() else ""

    def ended(self) -> tuple[int, str]:
        _, told = self.process.communicate(timeout=60)
        return self.process.returncode, told

    def wait_for(self, line: str) -> None:
        deadline = time.monotonic() + 60
        while line not in self.log:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)


Submit = Callable[..., Job]


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Submit]:
    bin_folder = tmp_path / "checkout" / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, body in STAND_INS.items():
        (bin_folder / name).write_text(f"#!/usr/bin/env bash\n{body.lstrip()}")
        (bin_folder / name).chmod(0o755)
    (bin_folder / "learner").symlink_to(Path(sys.executable).parent / "learner")
    health = tmp_path / "checkout" / "deploy" / "server_healthy.py"
    health.parent.mkdir()
    health.write_text("import os, sys; sys.exit(not os.path.exists(os.environ['JOB_HEALTHY']))\n")
    jobs: list[Job] = []

    def start(*arguments: str, config: Path = PROD, umask: int = -1, **environment: str) -> Job:
        told = {
            "ROLLMATCH": str(tmp_path / "checkout"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_GPUS_ON_NODE": "8",
            "CHECKPOINT": "/data/model",
            "IMAGES": "/data/images",
            "JOB_LOG": str(tmp_path / "log"),
            "JOB_HEALTHY": str(tmp_path / "healthy"),
            "JOB_TASKS": str(tmp_path / "tasks"),
            "JOB_TOKEN": str(tmp_path / "token"),
            "JOB_YAML": str(tmp_path / "yaml"),
        }
        process = subprocess.Popen(
            ["bash", SBATCH, *(arguments or [str(config)])],
            env={**os.environ, **told, **environment},
            cwd=tmp_path,
            umask=umask,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(Job(tmp_path, process))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.process.wait(timeout=60)


def left_over(folder: Path) -> list[Path]:
    return list(folder.glob(".rollmatch-*"))


def test_when_the_learner_has_finished_the_servers_stop_and_the_job_ends_well(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit(SERVER_NODES="2")
    assert job.ended() == (0, "")
    assert "scancel --quiet --signal=TERM 7\nserver stopped" in job.log
    assert left_over(tmp_path) == []
    assert len((tmp_path / "token").read_text()) == 64
    serve, learn = (line for line in job.log.splitlines() if line.startswith("srun"))
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 --nodelist=node1,node2" in serve
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=node3" in learn
    assert "--nnodes 1 --nproc-per-node 8 --master-addr node3 --master-port 29500" in learn
    assert (tmp_path / "token").read_text() not in job.log


def test_the_programs_take_the_commands_of_a_job(submit: Submit) -> None:
    job = submit()
    assert job.ended() == (0, "")
    (serve,) = (line for line in job.log.splitlines() if line.startswith("rollout-server"))
    (learn,) = (line for line in job.log.splitlines() if line.startswith("torchrun"))
    commands = [words for line in (serve, learn) for words in commands_in(line)]
    assert [Path(words[0]).name for words in commands] == ["rollout-server", "learner"]
    assert [command_fault(words) for words in commands] == [None, None]
    options = parsed(commands[0])
    assert (options["gpus"], options["host"]) == ("0,1,2,3,4,5,6,7", "0.0.0.0")
    assert options["run_config"] == parsed(commands[1])["config"]
    assert learn.startswith("torchrun --node-rank 0 ")


def test_the_yaml_of_a_job_names_its_nodes_and_goes_on_when_it_is_queued_again(
    submit: Submit, tmp_path: Path
) -> None:
    assert submit(SERVER_NODES="2").ended() == (0, "")
    config, given = load_config(tmp_path / "yaml"), load_config(PROD)
    assert config.rollout_matching.vllm.server is not None
    servers = config.rollout_matching.vllm.server.servers
    assert [(server.base_url, server.group_port) for server in servers] == [
        ("http://node1:8000", 51216),
        ("http://node2:8000", 51216),
    ]
    assert config.training.resume == "auto"
    assert config.stage2_ab == given.stage2_ab
    assert config.training.learning_rate == given.training.learning_rate


def test_the_token_is_the_users_alone_and_the_umask_of_the_run_is_its_own(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit(umask=0o022)
    assert job.ended() == (0, "")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert "umask 0022, folder 700\n" in job.log


def test_on_cpus_there_are_no_gpus_to_name(submit: Submit) -> None:
    job = submit(SLURM_GPUS_ON_NODE="")
    assert job.ended() == (0, "")
    assert "--device cpu" in job.log
    assert "--gpus" not in job.log
    assert "--nproc-per-node 1 " in job.log


def test_a_learner_that_fails_ends_the_job_with_its_code(submit: Submit, tmp_path: Path) -> None:
    job = submit(LEARNER_EXIT="3")
    assert job.ended()[0] == 3
    assert "server stopped" in job.log
    assert left_over(tmp_path) == []


def test_servers_that_end_end_the_learner(submit: Submit, tmp_path: Path) -> None:
    job = submit(LEARNER_STAYS="1", SERVER_DIES=str(tmp_path / "die"))
    job.wait_for("\ntorchrun")
    (tmp_path / "die").touch()
    code, told = job.ended()
    assert (code, "servers ended before the learner" in told) == (1, True)
    assert "learner stopped" in job.log
    assert left_over(tmp_path) == []


def test_servers_that_do_not_start_end_the_job(submit: Submit) -> None:
    job = submit(SERVER_FAILS="1")
    code, told = job.ended()
    assert (code, "the servers did not start" in told) == (1, True)
    assert "torchrun" not in job.log


def test_before_its_time_is_up_a_job_stops_both_and_queues_itself_again(
    submit: Submit, tmp_path: Path
) -> None:
    job = submit(LEARNER_STAYS="1")
    job.wait_for("\ntorchrun")
    job.process.send_signal(signal.SIGUSR1)
    code, told = job.ended()
    assert (code, "queued again" in told) == (0, True)
    assert {"learner stopped", "server stopped", "scontrol requeue 7"} <= set(job.log.splitlines())
    assert job.log.splitlines()[-1] == "scontrol requeue 7"
    assert left_over(tmp_path) == []


def test_a_job_that_is_cancelled_leaves_nothing(submit: Submit, tmp_path: Path) -> None:
    job = submit(LEARNER_STAYS="1")
    job.wait_for("\ntorchrun")
    job.process.terminate()
    assert job.ended()[0] == 143
    assert {"learner stopped", "server stopped"} <= set(job.log.splitlines())
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "environment", "found"),
    [
        ((), {"SERVER_NODES": "3"}, "SERVER_NODES is 3 of 3 nodes"),
        ((), {"SERVER_NODES": "0"}, "SERVER_NODES is 0 of 3 nodes"),
        ((), {"CHECKPOINT": ""}, "CHECKPOINT"),
        (("a.yaml", "b.yaml"), {}, "usage"),
        (("gone.yaml",), {}, "the YAML has faults"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_started(
    submit: Submit,
    tmp_path: Path,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    found: str,
) -> None:
    job = submit(*arguments, **environment)
    code, told = job.ended()
    assert code in (1, 2)
    assert found in told
    assert "srun" not in job.log
    assert left_over(tmp_path) == []
