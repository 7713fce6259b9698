"""The shell commands of the documents, one by one, and how each is proved.

A command is run unless `NOT_RUN` gives the reason why it cannot be here; then its options are
checked (`tests.docs.options`). A program that is not in `PROGRAMS` is a fault of the document,
or is missing there.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tests.docs.documents import Block, documents

PROGRAMS = {
    ".venv/bin/python",
    "curl",
    "deploy/train_stage2.sh",
    "docker",
    "export",
    "kill",
    "learner",
    "make",
    "nvidia-smi",
    "ray",
    "rollout-server",
    "sbatch",
    "swift",
    "systemctl",
    "torchrun",
    "uv",
    "vllm",
}
# Of the system, in every shell.
PLAIN = {"cat", "chmod", "cp", "echo", "install", "mkdir", "openssl", "source", "umask", "useradd"}

# Documents whose commands are for another machine.
ELSEWHERE = {"docs/gpu-checklist.md": "needs GPUs"}
# What is not run, and why: the first pattern that the command has decides.
NOT_RUN = (
    (r"^make ", "installs 7 GB or runs what runs this test; CI runs `make`"),
    (r"^docker ", "needs a docker engine"),
    (r"^uv ", "installs 7 GB; tests/unit/test_dist.py installs the wheel"),
    (r"^(cp|install|useradd|systemctl|umask) ", "needs root"),
    (r"^sbatch ", "needs Slurm"),
    (r"^deploy/train_stage2.sh .*-gpus", "needs GPUs"),
    (r"^learner demo", "takes minutes; tests/integration/test_demo.py runs it"),
    (r"^learner launch", "starts engines of its own, as its own tests do"),
    (r"^learner init", "needs a published checkpoint; tests/unit/test_init.py runs it"),
    (r"^learner (doctor|train) my_run/", "needs what `learner init` writes"),
    (r"^learner compare", "needs two evaluations; tests/unit/test_comparison.py has them"),
    (r"^learner eval", "loads the model once more; its own tests run it"),
    (r"^learner \w+ --config configs/", "needs the checkpoint named there"),
    (r"^ray ", "needs Ray and several nodes"),
    (r"^swift ", "takes most of a minute; tests/integration/test_ms_swift.py runs it"),
    (r"^vllm ", "vLLM's own command does not start in its CPU build"),
    (r"^export ROLLOUT_SERVER_TOKEN=\.\.\.$", "for hosts that are not here"),
    (r"^torchrun --nnodes", "needs two nodes"),
    (r"^rollout-server .*--gpus", "needs GPUs"),
    (r"^rollout-server .*--distributed-executor-backend ray", "needs GPUs of several nodes"),
    (r"^rollout-server .*--replicas 2", "one engine is enough here; tests/contract has two"),
    (r"^rollout-server .*--config", "one engine is enough here; its files are loaded"),
)


@dataclass(frozen=True)
class Command:
    """text: as written, on one line. words: of the program and after it. line: in the document.

    block: the place of the fenced block it is in.
    """

    document: str
    line: int
    text: str
    words: list[str] = field(repr=False)
    environment: dict[str, str] = field(repr=False)
    block: str = ""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text[:70]}"

    @property
    def program(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def simple(self) -> "list[Command]":
        """The commands that it is made of by `&&`, `;`, `|` and parentheses."""
        plain = self.text.partition("<<")[0]
        lexer = shlex.shlex(plain, posix=True, punctuation_chars="();|&<>")
        lexer.whitespace_split = True
        parts: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("();|&"):
                parts.append([])
            else:
                parts[-1].append(word)
        if sum(map(bool, parts)) < 2:
            return [self]
        return [replace(self, words=_unassigned(part)[0]) for part in parts if part]

    @property
    def not_run(self) -> str | None:
        """Why it is not run."""
        if self.document in ELSEWHERE:
            return ELSEWHERE[self.document]
        plain = shlex.join(self.simple[0].words) if self.program != "export" else self.text
        return next((why for pattern, why in NOT_RUN if re.search(pattern, plain)), None)


def command(document: str, line: int, text: str, block: str = "") -> Command:
    words, environment = _unassigned(shlex.split(text.partition("<<")[0], comments=True))
    return Command(document, line, text, words, environment, block)


def _unassigned(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The words after the assignments that a command begins with, and these."""
    environment = {}
    while words and (assigned := re.fullmatch(r"([A-Z0-9_]+)=(.*)", words[0], re.DOTALL)):
        environment[assigned[1]] = assigned[2]
        words = words[1:]
    return words, environment


def commands_of(block: Block) -> Iterator[Command]:
    """Its commands: a line each, but for open quotes, here-documents and a final backslash."""
    pending, first = "", 0
    for number, raw in enumerate(block.text.splitlines(), block.line + 1):
        first = first if pending else number
        pending += raw
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
        elif _is_open(pending):
            pending += "\n"
        else:
            if shlex.split(pending, comments=True):
                yield command(block.document, first, pending, str(block))
            pending = ""
    assert not pending, f"{block}: a quote or a line stays open"


def synopsis_of(block: Block) -> list[Command]:
    """Commands with their explanations, two blanks or more apart."""
    return [
        command(block.document, number, re.split(r"\s{2,}", line)[0], str(block))
        for number, line in enumerate(block.text.splitlines(), block.line + 1)
    ]


def is_synopsis(block: Block) -> bool:
    lines = block.text.splitlines()
    return block.language == "" and all(line.split()[:1][0] in PROGRAMS for line in lines if line)


def all_commands() -> list[Command]:
    """Of every block of shell and every synopsis, in the order of the documents."""
    found: list[Command] = []
    for document in documents():
        for block in document.blocks:
            if block.language in SHELLS:
                found += commands_of(block)
            elif is_synopsis(block):
                found += synopsis_of(block)
    return found


SHELLS = ("sh", "bash", "shell", "console")


def _is_open(text: str) -> bool:
    if here := re.search(r"<<-?'?(\w+)'?", text):
        return text.splitlines()[-1] != here[1]
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False
