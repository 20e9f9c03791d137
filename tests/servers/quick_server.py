"""A server of uvicorn that ends when it is told to, not at its next look a tenth of a second later."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import uvicorn


class QuickServer(uvicorn.Server):
    """Serves an application on `listener`, in a thread of its own."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._over: Future[None] = Future()
        self._thread = threading.Thread(target=self.run, kwargs={"sockets": [listener]})
        self._thread.start()

    def end(self, *, at_once: bool = False) -> None:
        """Answer what was asked, unless it is to end at once, and end."""
        self.should_exit, self.force_exit = True, at_once
        self._over.set_result(None)
        self._thread.join()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await asyncio.wrap_future(self._over)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what listens, and wait for what is asked."""
        for one in (*self.servers, *(sockets or [])):
            one.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while (self.server_state.connections or self.server_state.tasks) and not self.force_exit:
            await asyncio.sleep(0.002)


@contextmanager
def served(app: Any, *, at_once: bool = False) -> Iterator[str]:
    """Serve an application at a port of its own, and give its URL. `at_once`: leave unanswered what is asked then."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = QuickServer(app, listener)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end(at_once=at_once)
