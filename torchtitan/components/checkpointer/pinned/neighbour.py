"""Notice that the writer process of the next rank has ended, and tell all writers that wait for it.

A trainer tells of the death of its writer (``report_death``), but when it dies itself its writer goes
with it, and nobody is left to tell: at a store the others would wait until their timeout. Rank 0 needs
nobody who looks at it, because the store of the meeting ends with its trainer.

    writer of rank r + 1: listens ---- a silent connection ---- writer of rank r: reads, until it ends
"""

import contextlib
import socket
import threading
import time

import torch.distributed as dist

from torchtitan.components.checkpointer.pinned.meeting import (
    Meeting,
    OtherRankLostError,
    report_death,
)
from torchtitan.tools.logging import logger

_CONNECT_SECONDS = 10
# A host that lost its power closes no connection: the kernel asks after 30 s of silence, then gives it 30 s.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
# A trainer that has only lost its writer knows more of its end, and tells that at once.
_PRECEDENCE_SECONDS = 1.0


class Neighbour:
    """What this writer knows of the one of the next rank."""

    def __init__(self, meeting: Meeting, store: dist.Store) -> None:
        """Let the rank before look at this one, and look at the next. All ranks together."""
        self._meeting = meeting
        self._attempt = 0
        self._end: str | None = None
        self._lookers: list[socket.socket] = []
        rank = meeting.rank
        if rank > 0:
            store.set(_key(rank), self._listen())
        if rank + 1 < meeting.world_size:
            address = store.get(_key(rank + 1)).decode()
            try:
                connection = self._connect(address)
            except OSError as error:
                logger.warning(
                    f"The writer process of rank {rank} cannot look at that of rank {rank + 1} "
                    f"({address}: {error}); should rank {rank + 1} be killed in a save, the others "
                    "find out after --checkpoint.timeout_seconds."
                )
                return
            threading.Thread(target=self._look, args=(connection,), daemon=True).start()

    def begin(self, attempt: int) -> None:
        """Save ``attempt`` begins. Raises OtherRankLostError if the next rank is no more."""
        self._attempt = attempt  # before the look: from here on the thread tells of this one
        if self._end is not None:
            raise OtherRankLostError(self._end)

    def _listen(self) -> str:
        """The address at which the rank before this one can look."""
        # The side of this machine on which the store is, and with it the other ranks.
        host, port = self._meeting.host, self._meeting.port
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own_host = probe.getsockname()[0]
        server = socket.create_server((own_host, 0), family=family)
        threading.Thread(target=self._greet, args=(server,), daemon=True).start()
        return f"{own_host} {server.getsockname()[1]}"

    def _greet(self, server: socket.socket) -> None:
        while True:
            looker, _ = server.accept()
            with contextlib.suppress(OSError):  # whoever it was has gone again
                looker.sendall(self._greeting(self._meeting.rank))
            self._lookers.append(looker)  # open as long as this process lives

    def _greeting(self, rank: int) -> bytes:
        return b"%16d%16d" % (self._meeting.generation, rank)

    def _connect(self, address: str) -> socket.socket:
        host, port = address.split()
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
        expected = self._greeting(self._meeting.rank + 1)
        with connection.makefile("rb") as stream:
            greeting = stream.read(len(expected))
        if greeting != expected:
            connection.close()
            raise OSError("something else answers there")
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return connection

    def _look(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)  # nothing is ever sent
        end = f"the writer process of rank {self._meeting.rank + 1} has ended, killed or with its trainer"
        self._end = end
        time.sleep(_PRECEDENCE_SECONDS)
        # What is decided already stays as it is.
        report_death(self._meeting, end, self._attempt)


def _key(rank: int) -> str:
    return f"neighbour/{rank}"
