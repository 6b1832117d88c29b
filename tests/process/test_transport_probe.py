"""The probe tells what works on this machine, and why something does not."""

import psutil
import pytest

from protocol.errors import HeadraceError
from transport.config import TransportConfig
from transport.probe import PassiveProcess, probe


@pytest.mark.parametrize("backend", ["nixl", "shm", "tcp"])
def test_a_backend_that_works(backend: str) -> None:
    result = probe(TransportConfig(backend=backend, secret="s"))
    assert result.works, result.reason


def test_a_backend_that_does_not_says_why() -> None:
    works, reason = probe(TransportConfig(backend="tcp"))
    assert not works
    assert "transport.secret" in reason


def test_a_passive_process_ends_with_its_context() -> None:
    with PassiveProcess(TransportConfig(backend="shm"), "passive", 4096) as passive:
        assert passive.metadata
        process = passive._process
        assert process.poll() is None
    assert process.returncode == 0
    with pytest.raises(HeadraceError, match="carrier pigeon"):
        PassiveProcess(TransportConfig(backend="carrier pigeon"), "passive", 4096)


@pytest.mark.parametrize("backend", ["nixl", "shm", "tcp"])
def test_nothing_listens_beyond_this_machine(backend: str) -> None:
    with PassiveProcess(TransportConfig(backend=backend, secret="s"), "passive", 4096) as passive:
        assert passive.metadata
        addresses = {entry.laddr.ip for entry in psutil.Process(passive._process.pid).net_connections("inet") if entry.status == psutil.CONN_LISTEN}
        assert addresses <= {"127.0.0.1"}
        assert addresses or backend == "shm"
