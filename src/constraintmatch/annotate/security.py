"""Who may talk to the server: only a browser that somebody pointed at it, with small requests and the token.

The server listens on a machine where every site that the browser visits can try to reach it. So a request must name a
host that is ours (else a foreign name could be bound to our address), must not come from a foreign page, must be small,
and must bring the token if the server can be reached from other machines. Starlette limits the size. Its check of hosts
knows names only; a server also has addresses, and those of a router or a container it does not know itself.
"""

import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.body_limit import RequestBodyLimitMiddleware

__all__ = ["MAX_BODY", "Rules", "is_loopback", "protect", "rules_for"]

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
        if rules.token is not None and request.scope["path"] == "/" and _is_token(_query_token(request), rules.token):
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
    return any(_is_token(offer, token) for offer in (request.cookies.get(cookie, ""), _query_token(request), bearer))


def _query_token(request: Request) -> str:
    return request.query_params.get("token", "")


def _is_token(offer: str, token: str) -> bool:
    return bool(token) and secrets.compare_digest(offer.encode(), token.encode())
