"""A TCP proxy in the test process: cut the line between two parts, bend what passes, and mend it."""

import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards `port` to a target, faultlessly until told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._cut = False
        self._response: bytes | None = None
        self._change: Callable[[bytes], bytes] = bytes
        self._allowance: int | None = None
        self._rate: float | None = None
        self._flows = {True: threading.Event(), False: threading.Event()}  # by: towards the caller
        self.mend()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.mend()
        self._thread.join()
        self._break()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._cut = True
        self._break()

    def answer(self, response: bytes) -> None:
        """Break every connection, and answer each new one with these bytes."""
        self._response = response
        self._break()

    def alter(self, change: Callable[[bytes], bytes]) -> None:
        """Pass what the target answers through a function, chunk by chunk."""
        self._change = change

    def reset_after(self, count: int) -> None:
        """Break each connection once so many bytes have passed in one direction."""
        self._allowance = count

    def throttle(self, bytes_per_s: float) -> None:
        """Let through no more than so many bytes a second, per connection and direction."""
        self._rate = bytes_per_s

    def hold(self, *, answers: bool) -> None:
        """Cut one way: hold back the target's answers, or what is sent to it, until mended.

        Connections stay open, and what was held back arrives then, as TCP would send it again.
        """
        self._flows[answers].clear()

    def mend(self) -> None:
        """Forward faultlessly from now on."""
        for flow in self._flows.values():
            flow.set()
        self._cut, self._response, self._change = False, None, bytes
        self._allowance = self._rate = None

    def _break(self) -> None:
        with self._lock:
            for end in self._open:
                end.close() if end.fileno() < 0 else _shut(end)
            self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                near.close()
                continue
            if self._response is not None:
                threading.Thread(target=_respond, args=(near, self._response), daemon=True).start()
                continue
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            for a, b, answer in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pump, args=(a, b, answer), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answer: bool) -> None:
        passed = 0
        try:
            while content := source.recv(65536):
                passed += len(content)
                if self._allowance is not None and passed > self._allowance:
                    break
                if self._rate is not None:
                    time.sleep(len(content) / self._rate)
                self._flows[answer].wait()
                sink.sendall(self._change(content) if answer else content)
        except OSError:
            pass
        finally:
            _shut(source)
            _shut(sink)
            with self._lock:
                self._open -= {source, sink}


def _respond(near: socket.socket, response: bytes) -> None:
    """Hear some of the request and answer it."""
    try:
        near.recv(65536)
        near.sendall(response)
    except OSError:
        pass
    finally:
        _shut(near)


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        end.close()
