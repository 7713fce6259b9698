"""A launch whose servers and learner are other programs; a test starts it.

    python -m tests.unit.launched FOLDER '{"key": value}'

They write files to FOLDER; torchrun, signals and processes are the real ones.

lives: starts after which a server ends at once with `code`, after a message.
ready: whether servers report READY. stubborn: they ignore SIGTERM.
learner: exit codes of its processes, by rank; -1: it waits.
"""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from learner.operate.launch import launch, start_learner
from learner.operate.torchrun import die_with_parent
from learner.rollout.server_process import ServerProcess, free_ports
from shared_contracts.cli import run_cli

SERVER = """
import http.server, json, os, pathlib, signal, sys, threading
folder, index, port = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
settings = json.loads(sys.argv[4])
with (folder / f"starts-{index}").open("a") as starts:
    starts.write("x")
if (folder / f"starts-{index}").stat().st_size > settings["lives"]:
    print("no more of this", flush=True)
    sys.exit(settings["code"])

def running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False

def stop(*_):
    learners = [int(file.read_text()) for file in folder.glob("learner-*")]
    (folder / f"stopped-{index}").write_text(json.dumps([*map(running, learners)]))
    if not settings["stubborn"]:
        os._exit(0)

signal.signal(signal.SIGTERM, stop)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status":"ok","state":"READY","weights_version":0,"server_epoch":"e-0",'
        body += b'"replicas":[]}'
        self.send_response(200 if settings["ready"] else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.HTTPServer(("127.0.0.1", port), Handler)
threading.Thread(target=server.serve_forever).start()
(folder / f"serving-{index}").write_text(str(os.getpid()))
threading.Event().wait()
"""

LEARNER = """
import json, os, pathlib, sys, threading
rank, codes = int(os.environ["RANK"]), json.loads(sys.argv[2])
(pathlib.Path(sys.argv[1]) / f"learner-{rank}").write_text(str(os.getpid()))
if codes[rank] < 0:
    threading.Event().wait()
sys.exit(codes[rank])
"""


class StandIn(ServerProcess):
    def __init__(self, folder: Path, index: int, port: int, settings: dict[str, Any]) -> None:
        self.base_url = f"http://127.0.0.1:{port}"
        self.log = folder / f"server-{index}.log"
        program = [sys.executable, "-c", SERVER, str(folder), str(index), str(port)]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                die_with_parent(os.getpid(), [*program, json.dumps(settings)]),
                stdout=output,
                stderr=output,
            )


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the tests' own process may ignore it
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    ports = free_ports(settings["servers"])
    servers = [partial(StandIn, folder, i, port, settings) for i, port in enumerate(ports)]
    codes = settings["learner"]
    program = [sys.executable, "-c", LEARNER, str(folder), json.dumps(codes)]
    learner = partial(start_learner, program, len(codes), dict(os.environ))
    run_cli(lambda: sys.exit(launch(servers, learner, print, settings["pauses_s"])))


if __name__ == "__main__":
    main()
