"""The engine in a thread of its own, and requests to it from a server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import AsyncIterator

from course_lib.serving.engine import Engine, Event
from course_lib.serving.requests import Request


class Pump:
    """Steps an engine as long as it is busy, and hands each event to the coroutine that waits for it.

    Everything that touches the engine holds its lock, so requests come in between two steps.

    Args:
        engine: nobody else uses it meanwhile.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._lock, self._work = threading.Lock(), threading.Event()
        self._queues: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event]]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def events(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request as they come, the last of which says how it ended.

        Who stops asking gives the request up. Raises what `Engine.submit` raises.
        """
        queue: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        with self._lock:
            number = self.engine.submit(request)
            self._queues[number] = loop, queue
        self._work.set()
        try:
            while True:
                event = await queue.get()
                yield event
                if event.ended is not None:
                    return
        finally:
            with self._lock:
                if self._queues.pop(number, None) is not None:
                    self.engine.cancel(number)
            self._work.set()

    def close(self) -> None:
        """End the thread, after the step that is under way."""
        self._closed = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._work.wait()
            self._work.clear()
            while self._step():
                pass

    def _step(self) -> bool:
        """Run a step and hand its events out; False when there is nothing left to do."""
        with self._lock:
            if self._closed or not self.engine.busy:
                return False
            try:
                events = self.engine.step()
            except Exception as error:  # a fault of the engine itself: it ends those who wait, and not the server
                traceback.print_exc()
                told = f"the engine failed: {type(error).__name__}: {error}"
                events = [Event(number, ended="error", error=told) for number in self._queues]
                for number in self._queues:
                    self.engine.cancel(number)
            for event in events:
                waiting = self._queues.get(event.number)
                if waiting is None:
                    continue  # nobody listens any more
                if event.ended is not None:
                    del self._queues[event.number]
                loop, queue = waiting
                with contextlib.suppress(RuntimeError):  # the server's loop has ended
                    loop.call_soon_threadsafe(queue.put_nowait, event)
        return True
