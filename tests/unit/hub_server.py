"""A Hub on loopback: the calls of huggingface_hub that create a repository and commit files.

Weights go by git-LFS, all else within the commit, as on the real one.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WRITER, READER, USER, TEAM = "hf_writer", "hf_reader", "ada", "lab"


@dataclass
class Hub:
    """url: of its API. private: of each repository. files: of each repository, by path.

    full: refuse commits, as over a quota.
    """

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    full: bool = False


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        role = {WRITER: "write", READER: "read"}.get(self._token())
        if self.path != "/api/whoami-v2":
            self._send(404, {"error": "not here"})
        elif role is None:
            self._send(401, {"error": "Invalid credentials"})
        else:
            auth = {"accessToken": {"displayName": "test", "role": role}}
            self._send(200, {"name": USER, "orgs": [{"name": TEAM}], "auth": auth})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        if self._token() != WRITER:
            self._send(401, {"error": "Invalid credentials"})
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            known = name in self.hub.files
            if not known:
                self.hub.files[name] = {}
                self.hub.private[name] = asked["visibility"] == "private"
            self._send(409 if known else 200, {"url": f"{self.hub.url}/{name}"})
        elif path.endswith("/preupload/main"):
            self._send(200, {"files": [_upload(each) for each in json.loads(body)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [self._lfs(each) for each in json.loads(body)["objects"]]
            self._send(200, {"transfer": "basic", "objects": objects})
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        else:
            self._send(404, {"error": "not here"})

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        self.hub.blobs[self.path.rpartition("/")[2]] = self.rfile.read(size)
        self._send(200, {})

    def _lfs(self, asked: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.hub.url}/lfs/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": href, "header": {}}}}

    def _commit(self, name: str, body: bytes) -> None:
        if self.hub.full:
            self._send(403, {"error": "Storage quota exceeded"})
            return
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                self.hub.files[name][value["path"]] = self.hub.blobs[value["oid"]]
            else:
                self.hub.files[name][value["path"]] = base64.b64decode(value["content"])
        url = f"{self.hub.url}/{name}/commit/{'0' * 40}"
        self._send(200, {"commitUrl": url, "commitOid": "0" * 40})

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if "error" in answer:
            self.send_header("X-Error-Message", answer["error"])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _upload(asked: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if asked["path"].endswith(".safetensors") else "regular"
    return {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
