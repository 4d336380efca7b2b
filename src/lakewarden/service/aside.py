"""Work that waits for others: it has threads of its own, few of them, and nobody else waits for it.

A store or a database that stays silent would otherwise take one after another of the threads that
answer requests, until nobody is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from threading import BoundedSemaphore, Thread
from typing import TypeVar

Answer = TypeVar("Answer")


class Full(Exception):  # noqa: N818  # no error: it is what is to be said
    """As much is waited for as may be."""


class Aside:
    """Does so many things at a time, and waits so long for each.

    What takes longer goes on, and keeps its place until it ends: a thread cannot be stopped, and
    there are never more of them than places.  None of them keeps the process from ending.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self.seconds = seconds
        self._free = BoundedSemaphore(most)

    async def run(self, work: Callable[[], Answer]) -> Answer:
        """Return what `work` returns; raise Full, or TimeoutError if it takes too long."""
        if not self._free.acquire(blocking=False):
            raise Full
        future: Future[Answer] = Future()
        future.add_done_callback(lambda _: self._free.release())
        arguments = (copy_context(), work, future)
        try:
            Thread(target=_do, args=arguments, name="lakewarden-aside", daemon=True).start()
        except BaseException as error:
            future.set_exception(error)
            raise
        async with asyncio.timeout(self.seconds):
            return await asyncio.wrap_future(future)


class OneForAll:
    """Asks once for all who want to know the same at the same time."""

    def __init__(self, aside: Aside, work: Callable[[], None]) -> None:
        self.seconds = aside.seconds
        self._aside = aside
        self._work = work
        self._under_way: asyncio.Task[None] | None = None

    async def ask(self) -> None:
        """Return if `work` returns; raise what it raises, and what `Aside.run` does."""
        loop, task = asyncio.get_running_loop(), self._under_way
        if task is None or task.done() or task.get_loop() is not loop:
            task = self._under_way = loop.create_task(self._aside.run(self._work))
        # Whoever gives up leaves it to the others.
        await asyncio.shield(task)


def _do(context: Context, work: Callable[[], Answer], future: Future[Answer]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(context.run(work))
    except BaseException as error:  # noqa: BLE001  # told to whoever waits
        future.set_exception(error)
