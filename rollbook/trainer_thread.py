"""The built-in trainer in a thread of the calling process, handing over step after step.

The trainer waits after each step until the caller asks for the next one, so that a caller who stops
at a step stops the run there. Rollouts go on meanwhile.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Callable

from domain.data import TaskStream
from domain.services import Services
from trainer.session import Trained

_LOOK_S = 0.05


class TrainerThread:
    """One use: `start`, `next` until None, `stop`."""

    def __init__(
        self,
        run: str,
        services: Services,
        stream: TaskStream,
        *,
        watch: Callable[[], None],
        force: bool = False,
    ) -> None:
        """Nothing runs yet.

        Args:
            run: in the ledger already.
            services: Postgres and the object store.
            stream: the run's data.
            watch: called at every poll; raises if what samples for the run has broken.
            force: take the run from a holder that is alive.
        """
        self._run_name, self._services, self._stream = run, services, stream
        self._watch, self._force = watch, force
        self._asked, self._stopped = threading.Event(), threading.Event()
        self._handed: asyncio.Queue[Trained | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"trainer-{run}", daemon=True)
        self.state: str | None = None
        """Of the run, once the trainer has ended: finished, closed or failed."""

    def start(self) -> None:
        """Begin; called in the event loop that will ask for steps."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def next(self) -> Trained | None:
        """The next step that was applied; None when the trainer has ended.

        Raises:
            Exception: what ended the trainer, if it could not end the run.
        """
        self._asked.set()
        step = await self._handed.get()
        if step is None and self._error is not None:
            raise self._error
        return step

    async def stop(self) -> None:
        """End with a checkpoint, and wait for that."""
        self._stopped.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        from trainer import loop  # here: torch takes its time

        try:
            self.state = loop.run(
                self._run_name,
                self._services,
                holder=f"{socket.gethostname()}:{os.getpid()}",
                force=self._force,
                stop=self._asks_to_stop,
                stream=self._stream,
                watcher=self._hand_over,
            )
        except BaseException as error:  # noqa: BLE001 - raised by `next`, in the caller's loop
            self._error = error
        finally:
            self._post(None)

    def _asks_to_stop(self) -> bool:
        self._watch()
        return self._stopped.is_set()

    def _hand_over(self, step: Trained) -> None:
        self._asked.clear()
        self._post(step)
        while not self._asked.wait(_LOOK_S) and not self._stopped.is_set():
            pass

    def _post(self, step: Trained | None) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._handed.put_nowait, step)
