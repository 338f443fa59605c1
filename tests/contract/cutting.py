"""A way to a service that breaks: what comes through it is cut off after so many bytes."""

import socket
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PIECE_BYTES = 65536
# Closing sends a reset, so that the other side sees that it broke.
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Way:
    """Where it is; `asked` has the head of each request. `cut` is called after each cut."""

    url: str
    asked: list[bytes] = field(default_factory=list[bytes])
    cut: Callable[[], None] = lambda: None

    def ranges(self) -> list[str]:
        """Return the Range of each request that had one."""
        lines = [line for head in self.asked for line in head.decode().lower().split("\r\n")]
        return [line.removeprefix("range: ") for line in lines if line.startswith("range: ")]


@contextmanager
def cutting(url: str, sizes: Sequence[int]) -> Generator[Way]:
    """Lead to the server at `url`: of the first connections so many bytes come back, of later ones all."""
    parts = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))
    way = Way(f"http://127.0.0.1:{listener.getsockname()[1]}")
    budgets = iter(sizes)

    def serve() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((parts.hostname or "", parts.port or 0))
                threading.Thread(target=_up, args=(near, far, way), daemon=True).start()
                threading.Thread(target=_down, args=(far, near, next(budgets, None), way), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield way
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def _up(near: socket.socket, far: socket.socket, way: Way) -> None:
    with suppress(OSError):
        while piece := near.recv(_PIECE_BYTES):
            way.asked.append(piece)
            far.sendall(piece)
        far.shutdown(socket.SHUT_WR)


def _down(far: socket.socket, near: socket.socket, budget: int | None, way: Way) -> None:
    with suppress(OSError), far, near:
        while piece := far.recv(_PIECE_BYTES):
            if budget is not None:
                piece = piece[:budget]
                budget -= len(piece)
            near.sendall(piece)
            if budget == 0:
                way.cut()
                # What was sent is to arrive before the reset.
                near.shutdown(socket.SHUT_WR)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
