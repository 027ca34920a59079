"""Who may talk to the page's server: only a browser that a person pointed at it, with small requests, and the token.

The server listens on the person's own machine, where every site the browser visits could try to reach it. So a request
must name a host that is ours (else a foreign name could be bound to our address), must not come from a foreign page,
must be small, and, where the server can be reached from other machines, must bring the token.
"""

import ipaddress
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["MAX_BODY", "Guard", "Rules", "is_loopback", "new_token", "rules_for"]

MAX_BODY = 16_384  # bytes; the largest honest request, a cluster's name, needs a few hundred
OPEN_PATHS = frozenset({"/", "/style.css", "/script.js", "/icon.svg"})  # nothing secret in them: the page asks the rest
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

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Rules:
    """Host names that are ours (IP addresses always are: no foreign name stands for them), and the token, if any."""

    hosts: frozenset[str]
    token: str | None = None
    cookie: str = "constraintmatch"  # browsers do not part cookies by port, so its name has it


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """A token of 128 bits that can stand in an address."""
    return secrets.token_urlsafe(16)


def rules_for(host: str, port: int, token: str | None = None) -> Rules:
    """The rules of a server that listens on `host`; off this machine it gets a token of its own if none is given."""
    own = {"localhost", host.lower()}
    if not is_loopback(host):
        own |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        token = token or new_token()
    return Rules(frozenset(own), token, f"constraintmatch-{port}")


@dataclass(frozen=True)
class _Refusal:
    status: int
    reason: str


class Guard:
    """The app behind its door: refuses what `Rules` forbid, and puts the security headers on every response."""

    def __init__(self, app: Application, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = _headers(scope)
        outgoing = _with_headers(send, _cookie(scope, self.rules))
        if refusal := _refusal(scope, headers, self.rules):
            await _refuse(refusal, outgoing)
            return
        body = await _body(receive)
        if body is None:
            await _refuse(_TOO_LARGE, outgoing)
            return
        await self.app(scope, _replayed(body, receive), outgoing)


_TOO_LARGE = _Refusal(413, f"the request is larger than {MAX_BODY:,} bytes")


def _refusal(scope: MutableMapping[str, Any], headers: dict[str, str], rules: Rules) -> _Refusal | None:
    """Why a request is refused; None for one that may pass."""
    host = headers.get("host", "")
    if not _own_host(host, rules.hosts):
        return _Refusal(421, f"this server is not {host[:100]!r}; open the address that it printed")
    if _foreign(scope, headers, host):
        return _Refusal(403, "requests from other sites are refused; open the page itself")
    if scope["method"] not in ("GET", "HEAD") and (refusal := _bad_body(headers)) is not None:
        return refusal
    if rules.token is not None and scope["path"] not in OPEN_PATHS and not _has_token(scope, headers, rules):
        return _Refusal(401, "the token is missing or wrong; open the address with ?token= that the server printed")
    return None


def _bad_body(headers: dict[str, str]) -> _Refusal | None:
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        return _Refusal(400, "the content length is no number")
    if int(length) > MAX_BODY:
        return _TOO_LARGE
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return _Refusal(415, "send application/json")  # a foreign form cannot
    return None


def _own_host(host: str, own: frozenset[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in own:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _foreign(scope: MutableMapping[str, Any], headers: dict[str, str], host: str) -> bool:
    """Whether another site's page sent the request. A link to the page itself may stand anywhere."""
    if (origin := headers.get("origin")) is not None and origin not in (f"http://{host}", f"https://{host}"):
        return True
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    return not (scope["path"] == "/" and scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate")


def _has_token(scope: MutableMapping[str, Any], headers: dict[str, str], rules: Rules) -> bool:
    kind, _, given = headers.get("authorization", "").partition(" ")
    offers = [_cookies(headers).get(rules.cookie, ""), *_query_tokens(scope)]
    if kind.lower() == "bearer":
        offers.append(given.strip())
    return any(_same(offer, rules.token or "") for offer in offers)


def _same(offer: str, token: str) -> bool:
    return bool(token) and secrets.compare_digest(offer.encode(), token.encode())


def _query_tokens(scope: MutableMapping[str, Any]) -> list[str]:
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [])


def _cookies(headers: dict[str, str]) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(headers.get("cookie", "")).items()}
    except CookieError:
        return {}


def _cookie(scope: MutableMapping[str, Any], rules: Rules) -> str | None:
    """The cookie that lets the page in: set when the page is opened with the right token."""
    if rules.token is None or scope["path"] != "/" or not any(_same(t, rules.token) for t in _query_tokens(scope)):
        return None
    return f"{rules.cookie}={rules.token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000"


def _headers(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """The request's headers by lower-case name; of repeated ones the last, but two hosts are none."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    headers = dict(pairs)
    if sum(name == "host" for name, _ in pairs) != 1:
        headers["host"] = ""
    return headers


def _with_headers(send: Send, cookie: str | None) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            more = dict(HEADERS)
            if b"cache-control" not in present:
                more["cache-control"] = "no-store"
            if cookie is not None:
                more["set-cookie"] = cookie
            added = [(name.encode(), value.encode()) for name, value in more.items()]
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return sending


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None where it is too large (a chunked one names no length, so it has to be counted)."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)  # a client that has gone sends no more
        if len(body) > MAX_BODY:
            return None
    return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    given = False

    async def receiving() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receiving


async def _refuse(refusal: _Refusal, send: Send) -> None:
    body = json.dumps({"detail": refusal.reason}, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
