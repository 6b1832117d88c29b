"""The passive side of the tcp backend: threads that serve reads and writes of one arena to clients that know the secret. Blocking calls only.

Invariants: a request is checked whole against the arena before any byte of it moves; `close` returns when no thread is left.
"""

import logging
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from protocol.errors import TransferTimeout
from transport import wire
from transport.arena import Arena, no_arena

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 5.0


class ArenaServer:
    def __init__(self, host: str, secret: bytes, name: str, arena: Arena) -> None:
        """Listens on `host` at a port of the system's choice. Raises OSError for an address that is not this machine's."""
        self._secret = secret
        self._name = name
        self._arena = arena.data
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-tcp-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = list(self._connections.values())
            for connection in self._connections:
                _shut_down(connection)
        _shut_down(self._listener)
        self._acceptor.join()
        self._listener.close()
        for thread in threads:
            thread.join()
        self._arena = no_arena().data

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("%s: a connection could not be accepted: %s", self._name, error)
                time.sleep(0.1)  # out of file descriptors, most likely: not a reason to stop serving, nor to spin
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name=f"{self._name}-tcp", daemon=True)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            prepare(connection)
            if not wire.prove_as_server(connection, self._secret, self._name, time.monotonic() + _HANDSHAKE_TIMEOUT_S):
                logger.warning("%s: a client was refused: another secret, or looking for another endpoint", self._name)
                return
            while self._answer(connection):
                pass
        except (OSError, TransferTimeout) as error:
            logger.debug("%s: a connection ended: %s", self._name, error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Serve one request; False ends the connection."""
        header = wire.receive_header(connection)
        deadline = time.monotonic() + header.timeout_ms / 1000
        if header.operation not in (wire.WRITE, wire.READ) or header.num_spans > wire.MAX_SPANS:
            logger.error("%s: a client sent a malformed request", self._name)
            return False
        table = wire.receive_table(connection, header.num_spans, deadline)
        if not self._holds(table):
            logger.error("%s: a client asked for bytes outside of the arena", self._name)
            return False
        if header.operation == wire.READ:
            wire.send_all(connection, wire.OK, deadline)
        for offset, length in table.tolist():
            span = self._arena[offset : offset + length]
            if header.operation == wire.READ:
                wire.send_all(connection, span, deadline)
            else:
                wire.receive_into(connection, span, deadline)
        if header.operation == wire.WRITE:
            wire.send_all(connection, wire.OK, deadline)
        return True

    def _holds(self, table: npt.NDArray[np.int64]) -> bool:
        offset, length = table.T
        return not bool(((table < 0).any(axis=1) | (length > self._arena.nbytes - offset)).any())


def prepare(connection: socket.socket) -> None:
    """No delay for small frames; a peer whose machine vanished is noticed after about a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _shut_down(connection: socket.socket) -> None:
    """Wake every thread that blocks on it."""
    with suppress(OSError):  # it may have ended by itself
        connection.shutdown(socket.SHUT_RDWR)
