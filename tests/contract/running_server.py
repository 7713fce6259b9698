"""A real rollout server under test, with short calls."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageDraw
from prometheus_client.parser import text_string_to_metric_families

from learner.rollout.client import RolloutClient
from learner.rollout.server_process import ServerProcess, free_ports
from learner.rollout.sync.push import WeightPusher
from learner.rollout.sync.weights import SyncMode
from shared_contracts.weights import SyncReport, Transport
from tests.contract.toy_checkpoints import read_weights
from tests.contract.weight_sender import push, weight_group
from tests.unit.fleets import wait_until

PROMPT = "Detect every object."
START_TIMEOUT_S = 840.0


@dataclass(frozen=True)
class RunningServer:
    """http: base URL set, no redirects followed. media: a directory it may read."""

    process: ServerProcess
    http: httpx.Client
    checkpoint: Path
    media: Path

    def infer(self, requests: list[dict[str, Any]], **config: Any) -> list[dict[str, Any]]:
        """Envelopes of a call that must succeed; greedy and with details by default."""
        answer = self.post_infer(requests, **config)
        assert answer.status_code == 200, answer.text
        envelopes: list[dict[str, Any]] = answer.json()
        return envelopes

    def post_infer(self, requests: list[dict[str, Any]], **config: Any) -> httpx.Response:
        body = {
            "infer_requests": requests,
            "request_config": {"max_tokens": 16, "return_details": True} | config,
        }
        return self.http.post("/infer/", json=body)

    def begin_infer(
        self, requests: list[dict[str, Any]], config: dict[str, Any], **body: Any
    ) -> HTTPConnection:
        """Send a call and do not wait; its answer can be read, or the connection closed."""
        url = self.http.base_url
        connection = HTTPConnection(url.host, url.port, timeout=120)
        call = {"infer_requests": requests, "request_config": config} | body
        headers = {"content-type": "application/json"}
        connection.request("POST", "/infer/", json.dumps(call), headers)
        return connection

    def running_sequences(self) -> list[float]:
        """Sequences that each replica decodes now, by its metrics."""
        found = self.metrics()
        return [found[name] for name in found if name.startswith("rollout_running_sequences{")]

    def metrics(self) -> dict[str, float]:
        return samples(self.http.get("/metrics/").text)

    def wait_for_sequences(self, holds: Callable[[float], bool]) -> None:
        wait_until(lambda: all(map(holds, self.running_sequences())))

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = self.http.get("/info/").json()
        return info

    @property
    def version(self) -> int:
        """The version of the weights."""
        return int(self.info()["weights_version"])

    def replicas(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = self.info()["replicas"]
        return replicas

    def push(self, checkpoint: Path, world_size: int = 2) -> None:
        """Push the weights of a checkpoint as the next version, over a group of their own."""
        with weight_group(self.http, world_size) as sender:
            push(self.http, sender, read_weights(checkpoint), self.version + 1)

    def wait_for_replicas(self, holds: Callable[[list[dict[str, Any]]], bool]) -> None:
        """Wait as long as a start may take."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not holds(self.replicas()):
            assert time.monotonic() < deadline, self.replicas()
            time.sleep(0.1)

    def pusher(
        self, mode: SyncMode, transport: Transport = "gloo", port: int | None = None
    ) -> closing[WeightPusher]:
        """Make the pusher of a learner. Its first push forms the group, at `port`."""
        client = RolloutClient(self.process.base_url, START_TIMEOUT_S)
        return closing(WeightPusher(client, port or free_ports(1)[0], mode, transport, 2**18))

    def push_by_learner(
        self, mode: SyncMode, transport: Transport = "gloo", port: int | None = None
    ) -> SyncReport:
        with self.pusher(mode, transport, port) as pusher:
            return pusher.push(self.version + 1)

    def rebuild(self) -> None:
        """Kill every engine; return when all are built again, with the checkpoint's weights."""
        before = [replica["restarts"] for replica in self.replicas()]
        for name, pid in self.processes().items():
            if name != "server":
                os.kill(pid, signal.SIGKILL)
        self.wait_for_replicas(
            lambda replicas: all(
                replica["restarts"] > restarts and replica["state"] in ("serving", "needs-push")
                for replica, restarts in zip(replicas, before, strict=True)
            )
        )

    def processes(self) -> dict[str, int]:
        """Pid of the server and of each engine process below it, by role."""
        engines = [pid for pid in children(self.process.pid) if is_engine(pid)]
        named = {f"engine {i}": pid for i, pid in enumerate(sorted(engines))}
        return {"server": self.process.pid} | named


CPU = ("--device", "cpu", "--kv-cache-gib", "0.125")


def server_options(
    checkpoint: Path, media: Path, *options: str, device: Sequence[str] = CPU
) -> list[str]:
    model = ("--model", str(checkpoint), "--max-model-len", "512")
    return [*model, *device, "--allowed-media-dir", str(media), *options]


def start_server(
    checkpoint: Path, folder: Path, *options: str, device: Sequence[str] = CPU
) -> RunningServer:
    """Start a server that may read images below `folder`; not yet healthy."""
    media = folder / "media"
    media.mkdir(parents=True)
    argv = server_options(checkpoint, media, *options, device=device)
    # On a CPU nothing is compiled while it runs: images have no compiler.
    environment = os.environ | ({"CXX": "absent"} if device == CPU else {})
    process = ServerProcess(argv, folder / "server.log", environment=environment)
    http = httpx.Client(base_url=process.base_url, timeout=120, trust_env=False)
    return RunningServer(process, http, checkpoint, media)


@contextmanager
def running_server(
    checkpoint: Path, folder: Path, *options: str, device: Sequence[str] = CPU
) -> Iterator[RunningServer]:
    """A healthy server of its own for a test; it may be dead by the end."""
    server = start_server(checkpoint, folder, *options, device=device)
    try:
        server.process.wait_until_healthy(START_TIMEOUT_S)
        yield server
    finally:
        stop_server(server)


def stop_server(server: RunningServer) -> None:
    server.http.close()
    server.process.stop()


def samples(exposition: str) -> dict[str, float]:
    """Values by names such as `rollout_calls_total{outcome=gone}`."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            values[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return values


def by_servers(*base_urls: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """The section `rollout_matching.vllm` of a run that uses these servers."""
    ports = free_ports(len(base_urls))
    servers = [
        {"base_url": url, "group_port": port} for url, port in zip(base_urls, ports, strict=True)
    ]
    return {"server": {"servers": servers, "timeout_s": timeout_s}}


def text_request(text: str = PROMPT) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def image_request(image: str, text: str = PROMPT) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"<image>{text}"}], "images": [image]}


def draw_scene(path: Path, number: int = 0) -> Path:
    """A 64x64 image of two rectangles that depend on `number`."""
    image = Image.new("RGB", (64, 64), (10 * number % 256, 30, 60))
    pen = ImageDraw.Draw(image)
    pen.rectangle((4 + number, 8, 30 + number, 40), fill=(200, 40, 40))
    pen.rectangle((36, 20 + number, 60, 56), fill=(40, 200, 90))
    image.save(path)
    return path


def response_ids(envelope: dict[str, Any]) -> list[int]:
    ids: list[int] = envelope["response"]["choices"][0]["token_ids"]
    return ids


def children(pid: int) -> list[int]:
    """Pids of the living processes below `pid`, to any depth."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return [child for child in found if is_alive(child)]


def environment_of(pid: int) -> dict[str, str]:
    """Variables with which a process was started."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Pids that are still alive after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(map(is_alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


def is_engine(pid: int) -> bool:
    return b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
