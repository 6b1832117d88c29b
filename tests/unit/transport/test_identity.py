"""A pid that is used again, a descriptor that is another file by now: never mistaken for the peer."""

import os
import subprocess
import sys

import msgspec
import pytest

from protocol.errors import ConfigError, PeerGone, TransferFailed
from transport.arena import SharedArena, map_peer_arena
from transport.config import TransportConfig
from transport.endpoint import open_endpoint
from transport.metadata import decode_metadata, encode_metadata
from transport.process import ProcessWatch, identify, watch
from transport.shm import ShmAddress


def test_a_watch_tells_life_from_death() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    process = ProcessWatch(identity)
    assert process.is_alive()
    child.kill()
    child.wait()
    assert not process.is_alive()
    with pytest.raises(PeerGone):
        watch(identity)
    process.close()
    process.close()
    assert not process.is_alive()


def test_a_pid_that_is_used_again_is_not_the_peer() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerGone):
        watch(msgspec.structs.replace(identify(os.getpid()), start_ticks=1))
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_process_of_another_namespace_cannot_be_watched() -> None:
    assert watch(msgspec.structs.replace(identify(os.getpid()), namespace="elsewhere")) is None


def test_only_the_file_with_the_token_is_mapped() -> None:
    first, second = SharedArena(8192), SharedArena(8192)
    first.array[5] = 77
    mapped = map_peer_arena(os.getpid(), first.fd, first.token, 8192)
    assert mapped[5] == 77
    for fd, token, num_bytes in [(second.fd, first.token, 8192), (first.fd, first.token, 4096), (0, first.token, 8192), (9999, first.token, 8192)]:
        with pytest.raises(PeerGone):
            map_peer_arena(os.getpid(), fd, token, num_bytes)
    with pytest.raises(OSError):
        os.ftruncate(first.fd, 4096)
    first.close()
    second.close()
    mapped[5] = 78  # what is mapped stays


def test_shared_memory_of_another_machine_is_refused() -> None:
    endpoint = open_endpoint(TransportConfig(backend="shm"), "here", 4096)
    address = decode_metadata(endpoint.metadata, ShmAddress)
    elsewhere = msgspec.structs.replace(address, name="there", process=msgspec.structs.replace(address.process, namespace="elsewhere"))
    with pytest.raises(TransferFailed, match="does not reach"):
        endpoint.connect(encode_metadata(elsewhere))
    endpoint.close()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (TransportConfig(backend="tcp"), "transport.secret"),
        (TransportConfig(backend="tcp", secret="s", host="0.0.0.0"), "transport.host"),
        (TransportConfig(backend="tcp", secret="s", host="192.0.2.1"), "transport.host"),
        (TransportConfig(ucx_tls="^tcp"), "transport.ucx_tls"),
        (TransportConfig(ucx_tls=""), "transport.ucx_tls"),
        (TransportConfig(ucx_error_mode="maybe"), "transport.ucx_error_mode"),
        (TransportConfig(ucx_tls="sm,self", ucx_error_mode="peer"), "transport.ucx_error_mode"),
    ],
)
def test_a_config_that_cannot_work_names_its_field(config: TransportConfig, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_endpoint(config, "refused", 4096)
    assert caught.value.field == field
