"""A proxy before a server that speaks S3, which slows, breaks and falsifies what goes through it.

with FaultyProxy(server) as proxy:
    proxy.endpoint                              # in place of the server's
    proxy.faults.append(Fault("PUT", status=503, times=2))
    proxy.requests                              # method and path of every request so far
"""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from tests.store.objects.servers import S3Server

ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>as the test wants it</Message></Error>"


@dataclass
class Fault:
    """What happens to the next `times` requests with this method and this text in their path.

    delay_s: wait before they are sent on. mute: send them on, and close the connection without an answer. status, code:
    answer this without asking the server. cut: send so many bytes of the body, then close the connection. lie: change
    the body's bytes. stale: give the answer that the same request got before.
    """

    method: str
    path: str = ""
    times: int = 1_000_000
    delay_s: float = 0.0
    status: int | None = None
    code: str = "InternalError"
    cut: int | None = None
    mute: bool = False
    lie: bool = False
    stale: bool = False


class FaultyProxy:
    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.answers: dict[tuple[str, str], tuple[int, list[tuple[str, str]], bytes]] = {}
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                proxy.handle(self)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        key = (request.command, request.path)
        self.requests.append(key)
        fault = self._fault(*key)
        time.sleep(fault.delay_s)
        if fault.mute:
            self._ask(request, body)
            request.close_connection = True
        elif fault.status is not None:
            xml = ERROR.format(code=fault.code).encode()
            self._answer(request, fault.status, [("Content-Type", "application/xml")], xml, fault)
        elif fault.stale and key in self.answers:
            self._answer(request, *self.answers[key], fault)
        else:
            self.answers[key] = self._ask(request, body)
            self._answer(request, *self.answers[key], fault)

    def _fault(self, method: str, path: str) -> Fault:
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and fault.path in path:
                fault.times -= 1
                return fault
        return Fault(method)

    def _ask(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        server = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            server.request(request.command, request.path, body, dict(request.headers.items()))
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            server.close()

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], body: bytes, fault: Fault
    ) -> None:
        if fault.lie:
            body = bytes(byte ^ 1 for byte in body)
        request.send_response_only(status)
        by_name = {name.lower(): value for name, value in headers}
        for name, value in by_name.items():
            if name not in ("connection", "transfer-encoding", "content-length"):
                request.send_header(name, value)
        length = by_name.get("content-length", "0") if request.command == "HEAD" else str(len(body))
        request.send_header("content-length", length)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body if fault.cut is None else body[: fault.cut])
        if fault.cut is not None:
            request.close_connection = True
