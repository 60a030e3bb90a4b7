"""A TCP proxy in the test process: cut the line between two parts, and mend it."""

import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards `port` to a target until it is cut; then connections break and new ones are refused."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._cut = False
        self._thread = threading.Thread(target=self._accept, daemon=True)

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
        self._thread.join()
        self._break()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        self._cut = True
        self._break()

    def mend(self) -> None:
        """Let new connections through."""
        self._cut = False

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
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while content := source.recv(65536):
                sink.sendall(content)
        except OSError:
            pass
        finally:
            _shut(source)
            _shut(sink)
            with self._lock:
                self._open -= {source, sink}


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        end.close()
