"""The server: its port, what the requests of the page hold, and which of them are refused.

The server listens on a machine where every site that the browser visits can try to reach it. So a request must name a
host that is ours (else a foreign name could be bound to our address), must not come from a foreign page, must be small,
and must bring the token if the server can be reached from other machines. Starlette limits the size. Its check of hosts
knows names only; a server also has addresses, and those of a router or a container it does not know itself.
"""

import errno
import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, Field
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

from constraintmatch._internal.errors import InputError
from constraintmatch.questions.answers import MAX_SHOWN, NONE, UNSURE

MAX_BODY = 16_384  # bytes; the largest honest request, the name of a cluster, needs a few hundred
OPEN_PATHS = frozenset({"/", "/style.css", "/script.js", "/icon.svg"})  # nothing secret: the page asks for the rest
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
A_MONTH = 2_592_000  # seconds that the cookie lasts


# What the page sends


def _whole(value: object) -> object:
    """7.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole)
Annotator = Annotated[str, Field(min_length=1, max_length=40, pattern=r"\S", description="Who answers.")]
Number = Annotated[int, Field(ge=1, le=2**53), Whole]
Row = Annotated[int, Field(ge=0, le=2**31 - 1, description="The row of the image in the set."), Whole]
Hold = Annotated[int, Field(ge=0, le=50, description="How many questions the page wants to hold."), Whole]
_CHOICES = f"The place of the chosen image (of a pair: 0, same), {NONE} none (different), {UNSURE} unsure."
Choice = Annotated[int, Field(ge=UNSURE, lt=MAX_SHOWN, description=_CHOICES), Whole]


class UndoRequest(BaseModel, extra="forbid", strict=True):
    """Whose last answer to undo, and how many questions to hold."""

    annotator: Annotator
    hold: Hold = 0


class AnswerRequest(UndoRequest):
    """An answer; sent again, it is stored once."""

    question: Number
    choice: Choice
    milliseconds: Annotated[int, Field(ge=0, le=86_400_000), Whole]


class ClaimRequest(UndoRequest):
    """Who wants questions, and how many to hold."""

    hold: Hold = 1


class AskRequest(ClaimRequest):
    """An image to ask about."""

    image: Row


class SettleRequest(BaseModel, extra="forbid", strict=True):
    """An answer to withdraw (no choice) or to change."""

    answer: Number
    choice: Choice | None = None
    annotator: Annotator


class NameRequest(BaseModel, extra="forbid", strict=True):
    """The name of a cluster; an empty one takes the name away."""

    name: Annotated[str, Field(max_length=80)]


# Who is refused


@dataclass(frozen=True)
class Rules:
    """Host names that are ours (IP addresses always are: no foreign name stands for them), and the token, if any."""

    hosts: frozenset[str]
    token: str | None = None
    cookie: str = "constraintmatch"  # browsers share cookies between ports, so the name has the port


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def rules_for(host: str, port: int, token: str | None = None) -> Rules:
    """The rules of a server that listens on `host`; if other machines can reach it, it always has a token."""
    own = {"localhost", host.lower()}
    if not is_loopback(host):
        own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        token = token or secrets.token_urlsafe(16)  # 128 bits that can stand in an address
    return Rules(frozenset(own), token, f"constraintmatch-{port}")


def protect(app: FastAPI, rules: Rules) -> None:
    """Put the checks before every route, and the security headers on every response."""
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MAX_BODY)

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refusal(request, rules)
        if refusal is None:
            response = await call_next(request)
        else:
            response = JSONResponse({"detail": refusal[1]}, refusal[0])
        response.headers.update(HEADERS)
        response.headers.setdefault("cache-control", "no-store")
        offer = request.query_params.get("token", "")
        if rules.token is not None and request.scope["path"] == "/" and _is_token(offer, rules.token):
            response.set_cookie(rules.cookie, rules.token, A_MONTH, httponly=True, samesite="strict")
        return response


def _refusal(request: Request, rules: Rules) -> tuple[int, str] | None:
    """Status and reason why a request is refused; None for one that may pass."""
    hosts, path = request.headers.getlist("host"), request.scope["path"]
    host = hosts[0] if len(hosts) == 1 else ""
    if not _is_own(host, rules.hosts):
        return 421, f"this server is not {host[:100]!r}; open the address that it printed"
    if _is_foreign(request, host):
        return 403, "requests from other sites are refused; open the page itself"
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY:  # as JSON; Starlette counts what comes without a length
        return 413, f"the request is larger than {MAX_BODY:,} bytes"
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method not in ("GET", "HEAD") and kind != "application/json":
        return 415, "send application/json"  # the form of a foreign page cannot
    if rules.token is not None and path not in OPEN_PATHS and not _has_token(request, rules.token, rules.cookie):
        return 401, "the token is missing or wrong; open the address with ?token= that the server printed"
    return None


def _is_own(host: str, own: frozenset[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in own or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_foreign(request: Request, host: str) -> bool:
    """Whether the page of another site sent the request. Links to our page may stand anywhere."""
    if any(origin not in (f"http://{host}", f"https://{host}") for origin in request.headers.getlist("origin")):
        return True
    if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    link = request.method == "GET" and request.headers.get("sec-fetch-mode") == "navigate"
    return not (link and request.scope["path"] == "/")


def _has_token(request: Request, token: str, cookie: str) -> bool:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    bearer = given.strip() if kind.lower() == "bearer" else ""
    offers = (request.cookies.get(cookie, ""), request.query_params.get("token", ""), bearer)
    return any(_is_token(offer, token) for offer in offers)


def _is_token(offer: str, token: str) -> bool:
    return bool(token) and secrets.compare_digest(offer.encode(), token.encode())


# The port


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port in use, forbidden or of another machine is an InputError with the fix."""
    if not 0 <= port <= 65_535:
        raise InputError(f"--port {port}: ports go from 1 to 65,535 (0: any free one)")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise InputError(f"--host {host}: no such host; use 127.0.0.1 (this machine) or 0.0.0.0 (all)") from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: takes IPv4 too
    try:
        return socket.create_server(place, family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise InputError(_why_not(host, port, error)) from None


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        with listen(host, 0) as probe:
            free = probe.getsockname()[1]
        return f"port {port} is in use; stop what uses it or choose another, for example --port {free}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port {port} needs more rights than you have; choose one above 1,023, for example --port 8765"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine; use 127.0.0.1 or 0.0.0.0"
    return f"--host {host} --port {port}: cannot listen there ({os.strerror(error.errno or 0)}); choose another"


def address(sock: socket.socket, host: str, token: str | None = None) -> str:
    """The address to open in the browser; for a server on all addresses, with the name of this machine."""
    port = sock.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "")


def run_app(app: FastAPI, sock: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM, and return."""
    quiet: dict[str, Any] = {"log_level": "error", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=3, lifespan="on", ws="none", **quiet))

    def stop(_number: int, _frame: Any) -> None:
        server.force_exit = server.should_exit  # the second Ctrl-C does not wait
        server.should_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # requests that are cut short need no message

    server.handle_exit = stop  # type: ignore[method-assign,assignment]  # uvicorn's own raises it again at the end
    server.run(sockets=[sock])
