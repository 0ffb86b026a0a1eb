"""The other end of a raw loopback transfer: a process that sends or receives as many bytes as it is told, nothing else.

Owns the protocol of that baseline. Does not know the store. Sockets have the options that the store's have, its
congestion control included, so that a ratio to it is a ratio to the same transport.

    command    op (``G``: send me so many, ``F``: the same by ``sendfile``, ``P``: take so many and answer one byte),
               count as u64 little-endian
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore.framing import tune
from ops.bench.child import read_line, stop

COMMAND = struct.Struct("<cQ")
START_S = 30.0
BUFFERS_PER_SEND = 512


class Echo:
    """A raw transfer's near end, and the process at its far end."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._sock = sock

    @classmethod
    def start(cls, bytes_max: int) -> Echo:
        """``bytes_max``: bytes of the largest transfer; the far end sends from memory of that size, touched before."""
        process = subprocess.Popen(
            [sys.executable, "-m", "ops.bench.echo", str(bytes_max)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            port = int(read_line(process, START_S))
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            tune(sock, loopback=True)
            sock.settimeout(START_S)
            sock.connect(("127.0.0.1", port))
            sock.settimeout(None)
        except BaseException:
            stop(process)
            raise
        return cls(process, sock)

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    @property
    def congestion(self) -> str:
        """The congestion control in use."""
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()

    def get(self, views: Sequence[memoryview], op: bytes = b"G") -> None:
        """Fill the views from the far end."""
        self._sock.sendall(COMMAND.pack(op, sum(map(len, views))))
        for view in views:
            receive_into(self._sock, view)

    def put(self, views: Sequence[memoryview]) -> None:
        """Send the views and wait for the answer."""
        self._sock.sendall(COMMAND.pack(b"P", sum(map(len, views))))
        for begin in range(0, len(views), BUFFERS_PER_SEND):
            _send_all(self._sock, list(views[begin : begin + BUFFERS_PER_SEND]))
        receive_into(self._sock, memoryview(bytearray(1)))

    def close(self) -> None:
        self._sock.close()
        stop(self._process)


class FilePair:
    """Two far ends that send by ``sendfile``, each half of the views, read side by side: what a store could give that
    verified nothing.
    """

    def __init__(self, ends: tuple[Echo, Echo]) -> None:
        self._ends = ends
        self._helper = ThreadPoolExecutor(1, "echo")

    @classmethod
    def start(cls, bytes_max: int) -> FilePair:
        first = Echo.start(bytes_max)
        try:
            return cls((first, Echo.start(bytes_max)))
        except BaseException:
            first.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return (*self._ends[0].pids, *self._ends[1].pids)

    def get(self, views: Sequence[memoryview]) -> None:
        """Fill the views; a single one comes over one connection."""
        half = len(views) // 2
        other = self._helper.submit(self._ends[1].get, views[:half], b"F") if half else None
        self._ends[0].get(views[half:], b"F")
        if other is not None:
            other.result()

    def close(self) -> None:
        self._helper.shutdown()
        for end in self._ends:
            end.close()


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill the view. Raises EOFError if the peer closes."""
    at = 0
    while at < len(view):
        got = sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError("the far end of the raw transfer closed")
        at += got


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def serve(bytes_max: int) -> None:
    """Answer one connection until it closes."""
    fd = os.memfd_create("echo", os.MFD_CLOEXEC)
    os.ftruncate(fd, bytes_max)
    memory = mmap.mmap(fd, bytes_max)
    view = memoryview(memory)
    for at in range(0, bytes_max, mmap.PAGESIZE):
        memory[at] = at % 251
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        tune(listener, loopback=True)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        listener.settimeout(START_S)
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    with sock:
        sock.settimeout(None)
        tune(sock, loopback=True)
        command = bytearray(COMMAND.size)
        while True:
            try:
                receive_into(sock, memoryview(command))
            except (EOFError, OSError):
                return
            op, count = COMMAND.unpack(command)
            if op == b"G":
                sock.sendall(view[:count])
            elif op == b"F":
                at = 0
                while at < count:
                    at += os.sendfile(sock.fileno(), fd, at, count - at)
            else:
                receive_into(sock, view[:count])
                sock.sendall(b"k")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
