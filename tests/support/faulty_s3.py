"""An HTTP proxy in front of an S3 server that spoils a share of the requests: errors, resets, silence, slow and truncated bodies."""

from __future__ import annotations

import http.client
import http.server
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

FAULTS = ("slow_down", "server_error", "reset_before", "reset_after", "silent", "slow", "truncated")
_ERRORS = {"slow_down": (503, "SlowDown"), "server_error": (500, "InternalError"), "expired": (400, "ExpiredToken")}
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"}


class FaultyProxy:
    """Passes requests on and spoils some, by a seeded choice.

    Args:
        upstream: the real server's address.
        share: share of the requests that are spoilt.
        silent_s: how long a silent request stays unanswered.
        faults: the kinds to choose from; `expired` (credentials) is one more.

    Attributes:
        seen: requests that came.
        injected: how often each fault was used.
    """

    def __init__(self, upstream: str, *, share: float, seed: int, silent_s: float = 4.0, faults: tuple[str, ...] = FAULTS) -> None:
        self.upstream, self.share, self.silent_s, self.faults = urlsplit(upstream), share, silent_s, faults
        self.seen = 0
        self.injected: Counter[str] = Counter()
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def fault(self) -> str:
        """What to do with the next request; "" lets it pass."""
        with self._lock:
            self.seen += 1
            if self._random.random() >= self.share:
                return ""
            chosen = self._random.choice(self.faults)
            self.injected[chosen] += 1
            return chosen

    @contextmanager
    def running(self) -> Iterator[FaultyProxy]:
        """Serve during the block."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def _handler(proxy: FaultyProxy) -> type[http.server.BaseHTTPRequestHandler]:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def relay(self) -> None:
                fault = proxy.fault()
                if fault == "reset_before":
                    return self.reset()
                body = self.received()
                if fault == "silent":
                    time.sleep(proxy.silent_s)
                    return self.reset()
                if fault in _ERRORS:
                    status, code = _ERRORS[fault]
                    return self.reply(status, [("Content-Type", "application/xml")], _ERROR.format(code=code).encode())
                status, headers, answer = self.ask(body)
                if fault == "reset_after":
                    return self.reset()
                self.reply(status, headers, answer, fault)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = relay

            def received(self) -> bytes:
                if self.headers.get("Expect", "").lower() == "100-continue":
                    pass  # the base class has answered it
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    pieces = []
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        pieces.append(self.rfile.read(size))
                        self.rfile.readline()
                    while self.rfile.readline().strip():
                        pass
                    return b"".join(pieces)
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))

            def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                upstream = http.client.HTTPConnection(proxy.upstream.hostname or "", proxy.upstream.port, timeout=60)
                headers = {k: v for k, v in self.headers.items() if k.lower() not in {*_HOP, "expect"}}
                headers["Content-Length"] = str(len(body))
                upstream.request(self.command, self.path, body, headers)
                response = upstream.getresponse()
                content = response.read()
                found = [(k, v) for k, v in response.getheaders() if k.lower() not in _HOP]
                if self.command == "HEAD":
                    found.append(("Content-Length", response.getheader("Content-Length") or "0"))
                upstream.close()
                return response.status, found, content

            def reply(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: str = "") -> None:
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                if self.command != "HEAD":
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD" or not body:
                    return
                if fault == "truncated":
                    self.wfile.write(body[: len(body) // 2])
                    return self.reset()
                if fault == "slow":
                    for start in range(0, len(body), max(1, len(body) // 8)):
                        self.wfile.write(body[start : start + max(1, len(body) // 8)])
                        self.wfile.flush()
                        time.sleep(0.1)
                    return
                self.wfile.write(body)

            def reset(self) -> None:
                self.close_connection = True
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

            def handle(self) -> None:
                try:
                    super().handle()
                except (OSError, ValueError):
                    self.close_connection = True

            def finish(self) -> None:
                try:
                    super().finish()
                except (OSError, ValueError):
                    self.close_connection = True

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler
