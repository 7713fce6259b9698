"""What an attacker without means does to a server, over and over, until told to stop.

Each attack is a process of its own; all of it goes to one address on loopback.
"""

import base64
import contextlib
import http.client
import io
import itertools
import json
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

from PIL import Image

Address = tuple[str, int]
# Sends one blow and says what became of it; the seconds are those it may take.
Blow = Callable[[Address], str]

JSON = {"Content-Type": "application/json"}
PATIENCE_S = 20.0


def main() -> None:
    """python -m benchmarks.reliability.attacks NAME HOST PORT: until SIGTERM; prints its counts."""
    name, host, port = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    counts: Counter[str] = Counter()
    try:
        for told in ATTACKS[name]((host, int(port))):
            counts[told] += 1
    finally:
        print(json.dumps(counts), flush=True)


def again(blow: Blow) -> Callable[[Address], Iterator[str]]:
    def blows(address: Address) -> Iterator[str]:
        while True:
            try:
                yield blow(address)
            except (OSError, http.client.HTTPException) as error:
                yield type(error).__name__
                time.sleep(0.01)

    return blows


def posted(body: bytes, path: str = "/infer/", headers: dict[str, str] | None = None) -> Blow:
    def post(address: Address) -> str:
        connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", path, body, headers or JSON)
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)

    return post


def infer(*contents: str, images: tuple[str, ...] = (), tokens: int = 4) -> bytes:
    requests = [
        {"messages": [{"role": "user", "content": text}], "images": images} for text in contents
    ]
    config = {"max_tokens": tokens, "temperature": 0.0}
    return json.dumps({"infer_requests": requests, "request_config": config}).encode()


def endless_header(address: Address) -> str:
    with socket.create_connection(address, PATIENCE_S) as peer:
        peer.sendall(b"GET /live/ HTTP/1.1\r\nx: ")
        for _ in range(2**14):
            peer.sendall(b"a" * 2**14)
    return "all of it taken"


def crowd(opening: bytes, size: int) -> Callable[[Address], Iterator[str]]:
    """`size` connections at once that begin so and then say nothing."""

    def blows(address: Address) -> Iterator[str]:
        peers: list[socket.socket] = []
        while True:
            try:
                peer = socket.create_connection(address, PATIENCE_S)
                peer.sendall(opening)
                peers.append(peer)
                yield "opened"
            except OSError as error:
                yield type(error).__name__
            if len(peers) >= size:
                peers.pop(0).close()
                time.sleep(0.005)

    return blows


def unknown_keys() -> bytes:
    keys = json.dumps({f"k{i}": 0 for i in range(60)})
    return f'{{"infer_requests": [{",".join([keys] * 2**16)}]}}'.encode()


def webp_of_a_large_canvas() -> bytes:
    """Two frames of 3 x 2 pixels on a canvas of 13000 x 13000 (RFC 9649, section 2.7)."""
    frames, file = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue")], io.BytesIO()
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:])
    content = file.getvalue()
    return content[:24] + struct.pack("<I", 12999)[:3] * 2 + content[30:]


def data_url(content: bytes) -> str:
    return f"data:image/x;base64,{base64.b64encode(content).decode()}"


def large_image() -> str:
    file = io.BytesIO()
    Image.new("L", (7900, 8000)).save(file, "PNG")
    return data_url(file.getvalue())


def silent_learner() -> Blow:
    """Asks for a weight group at a port where nobody is, for a day."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    group = {"host": "127.0.0.1", "port": port, "world_size": 3, "attempt": "a"}
    return posted(json.dumps(group | {"timeout_s": 86400.0}).encode(), "/init_communicator/")


def page_of_another_site(address: Address) -> Iterator[str]:
    """What a browser would send for it: each route that would stop the answers of the server."""
    headers = JSON | {"Origin": "http://evil.example"}
    routes = ("/close_communicator/", "/sleep/", "/wake_up/")
    pages = [again(posted(b"{}", route, headers))(address) for route in routes]
    for page in itertools.cycle(pages):
        yield next(page)


ATTACKS: dict[str, Callable[[Address], Iterator[str]]] = {
    "a header without end": again(endless_header),
    "600 silent connections": crowd(b"", 600),
    "600 half bodies": crowd(
        b"POST /infer/ HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{",
        600,
    ),
    "65,536 bad requests in a body": lambda address: again(posted(unknown_keys()))(address),
    "a canvas of 169 megapixels": lambda address: again(
        posted(infer("<image>", images=(data_url(webp_of_a_large_canvas()),)))
    )(address),
    "16 times an image of 63 megapixels": lambda address: again(
        posted(infer("<image>" * 16, images=(large_image(),) * 16))
    )(address),
    "20 MB of text": lambda address: again(posted(infer("word " * 4_000_000)))(address),
    "4,096 requests in a call": lambda address: again(posted(infer(*["a word"] * 4096)))(address),
    "a learner that never comes": lambda address: again(silent_learner())(address),
    "a page of another site": page_of_another_site,
}

if __name__ == "__main__":
    main()
