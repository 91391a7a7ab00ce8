"""HTTP server of the page: read-only, without cookies, and without requests to other hosts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from thinwire.node.cli.page.prometheus_metrics import exposition
from thinwire.node.cli.page.run_view import RunView

POLL_SECONDS = 1.0
"""Pause between two looks at the files of the daemon."""

STREAMS = 32
"""Event streams at a time; each polls the files."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

PAGE = Path(__file__).with_name("page.html")


def application(make_view: Callable[[], RunView], *, public: bool = False) -> Starlette:
    """Return the ASGI application for a view of a run. public: answer requests to any host name."""
    view, page = make_view(), PAGE.read_text(encoding="utf-8")
    open_streams = 0

    def answer(value: object, code: int = 200) -> Response:
        return Response(msgspec.json.encode(value), code, {**HEADERS, "Content-Type": "application/json"})

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers=HEADERS)

    async def state(request: Request) -> Response:
        return answer(view.state())

    async def events(request: Request) -> Response:
        if open_streams >= STREAMS:
            return PlainTextResponse("too many streams are open\n", 503, HEADERS)
        return StreamingResponse(stream(request), media_type="text/event-stream", headers=HEADERS)

    async def stream(request: Request) -> AsyncIterator[bytes]:
        """Yield the news of the event log, and the state without its history whenever the status has changed."""
        nonlocal open_streams
        open_streams += 1
        own, shown = make_view(), 0.0
        own.news()
        try:
            while not await request.is_disconnected():
                news = own.news()
                if news["offset"] != news["before"]:
                    yield b"event: news\ndata: " + msgspec.json.encode(news) + b"\n\n"
                status = own.status()
                if status is not None and status.wall != shown:
                    shown = status.wall
                    yield b"event: status\ndata: " + msgspec.json.encode(own.present()) + b"\n\n"
                await asyncio.sleep(POLL_SECONDS)
        finally:
            open_streams -= 1

    async def metrics(request: Request) -> Response:
        status = view.status()
        text = exposition(status, status is not None and view.running(status))
        return Response(text, headers=HEADERS, media_type="text/plain; version=0.0.4")

    async def health(request: Request) -> Response:
        good = view.healthy()
        return PlainTextResponse(
            "ok\n" if good else "the daemon does not run, or is stuck\n", 200 if good else 503, HEADERS
        )

    hosts = ["*"] if public else ["localhost", "127.0.0.1", "[::1]"]  # against DNS rebinding by a page of a stranger
    paths = {"/": show, "/api/v1/state": state, "/api/v1/events": events, "/metrics": metrics, "/healthz": health}
    return Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in paths.items()],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


def serve(make_view: Callable[[], RunView], host: str, port: int, *, public: bool) -> None:
    """Serve until a signal, see `application`. Raises OSError if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(64)
        bound = listening.getsockname()[1]
        print(f"http://{f'[{host}]' if ':' in host else host}:{bound}/", flush=True)
        config = uvicorn.Config(
            application(make_view, public=public), log_level="warning", access_log=False, server_header=False,
            limit_concurrency=256, timeout_graceful_shutdown=1,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listening])
