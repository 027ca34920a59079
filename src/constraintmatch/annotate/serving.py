"""The server: a port that is ours, the browser opened, and an end without noise."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn

from constraintmatch.errors import InputError

__all__ = ["address", "listen", "serve"]


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port in use, forbidden or of another machine is an InputError with the mend."""
    if not 0 <= port <= 65_535:
        raise InputError(f"--port {port}: ports go from 1 to 65,535 (0: any free one)")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise InputError(f"--host {host}: no such host; use 127.0.0.1 (this machine) or 0.0.0.0 (all)") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise InputError(_why_not(host, port, error)) from None
    return sock


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; stop what uses it or choose another, for example --port {_free_port(host)}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} needs more rights than you have; choose one above 1,023, for example --port 8765"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine; use 127.0.0.1 or 0.0.0.0"
    return f"--host {host} --port {port}: cannot listen there ({error.strerror})"


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def address(sock: socket.socket, host: str, token: str | None = None) -> str:
    """What a person opens in the browser; for a server on all addresses, this machine's name."""
    port = sock.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "")


class _Server(uvicorn.Server):
    """Stops on SIGINT and SIGTERM and returns; uvicorn's own would raise the signal again."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_start()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(_number: int, _frame: FrameType | None) -> None:
            if self.should_exit:  # a second Ctrl-C does not wait, and wants to hear nothing of what it cut short
                self.force_exit = True
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.should_exit = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(app: Any, sock: socket.socket, *, browse: str | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM; `browse` is the address to open in the browser once the server answers."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        lifespan="on",
        ws="none",
    )
    server = _Server(config, lambda: _open_browser(browse))
    server.run(sockets=[sock])


def _open_browser(place: str | None) -> None:
    if place is not None:  # some browsers block the call that opens them
        threading.Thread(target=webbrowser.open, args=(place,), daemon=True).start()
