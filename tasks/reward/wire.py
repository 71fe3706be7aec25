"""Exchanges of HTTP that can be given up at any moment, from any thread.

A thread that waits on a socket cannot be woken by closing it; a coroutine that waits can be
cancelled. So the exchanges live on an event loop of their own.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Mapping

import httpx

Exchanged = tuple[int, httpx.Headers, bytes]
"""Status, headers and content."""


class Wire:
    """HTTP to one service. Its thread is a daemon: it holds up no process that wants to end.

    Args:
        url: of the service.
        headers: sent with every request.
        max_connections: exchanges at once.
        max_bytes: of an answer.
        trust_env: whether proxies of the environment are used.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        max_connections: int,
        max_bytes: int,
        trust_env: bool,
    ) -> None:
        self._max_bytes = max_bytes
        self._turns = asyncio.Semaphore(max_connections)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=dict(headers),
            timeout=None,
            limits=httpx.Limits(max_connections=max_connections),
            trust_env=trust_env,
        )
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="reward-wire", daemon=True)
        self._thread.start()

    def exchange(
        self, method: str, path: str, payload: bytes | None, *, timeout_s: float
    ) -> Exchanged:
        """Returns the service's answer; `timeout_s` counts once there is a connection for it.

        Raises:
            httpx.RequestError: none came, or it took too long or was too large.
            ConnectionAbortedError: `close` was called.
        """
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("closed")
            answer = asyncio.run_coroutine_threadsafe(
                self._exchange(method, path, payload, timeout_s), self._loop
            )
        try:
            return answer.result()
        except concurrent.futures.CancelledError as error:
            raise ConnectionAbortedError("closed") from error

    def close(self) -> None:
        """Gives up every exchange that is under way. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # What was handed in before the stop has become a task by now, or does in this turn.
        self._loop.run_until_complete(self._give_up())
        self._loop.close()

    async def _give_up(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._http.aclose()

    async def _exchange(
        self, method: str, path: str, payload: bytes | None, timeout_s: float
    ) -> Exchanged:
        # Waiting for a turn costs no time of the exchange: others of ours are under way.
        async with self._turns:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._answer(method, path, payload)
            except TimeoutError as error:
                raise httpx.ReadTimeout(f"no whole answer within {timeout_s:g} s") from error

    async def _answer(self, method: str, path: str, payload: bytes | None) -> Exchanged:
        content = bytearray()
        async with self._http.stream(method, path, content=payload) as answer:
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > self._max_bytes:
                    raise httpx.DecodingError(f"more than {self._max_bytes} bytes of answer")
            return answer.status_code, answer.headers, bytes(content)
