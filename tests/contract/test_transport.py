"""The contract of transport.endpoint over every row of TRANSPORTS, between real processes; and over NIXL's stand-in for a network, which needs progress."""

import glob
import random
from collections.abc import Callable, Iterator

import pytest
from transport_peer import Peer, Spans, content

from protocol.errors import ConfigError, PeerGone, TransferFailed, TransferTimeout
from transport.config import TransportConfig
from transport.endpoint import TRANSPORTS, open_endpoint

ARENA_BYTES = 4 << 20
NETWORK = "nixl over tcp"
TIMEOUT_S = 20.0
SIZES = [1, 7, 4095, 4096, 4097, 65536, 100_003, 737_280]

CONFIGS = {name: TransportConfig(backend=name, secret="s3cret") for name in TRANSPORTS}
CONFIGS[NETWORK] = TransportConfig(backend="nixl", ucx_tls="tcp,self", ucx_error_mode="peer")

Start = Callable[[str], Peer]


@pytest.fixture(scope="module", params=list(CONFIGS))
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(backend: str) -> Iterator[tuple[Peer, Peer]]:
    """An initiator and a passive side for the tests that leave both alive."""
    initiator, passive = (Peer(CONFIGS[backend], name, ARENA_BYTES) for name in ("initiator#1", "passive#1"))
    initiator.connect(passive.metadata)
    yield initiator, passive
    initiator.stop()
    passive.stop()


@pytest.fixture
def start(backend: str) -> Iterator[Start]:
    peers: list[Peer] = []

    def start_one(name: str) -> Peer:
        peers.append(Peer(CONFIGS[backend], name, ARENA_BYTES))
        return peers[-1]

    yield start_one
    for peer in peers:
        if peer.process.poll() is None:
            peer.kill()


def scattered_spans(seed: int) -> Spans:
    """Spans of all sizes that overlap on neither side, in an order of their own on each."""
    rng = random.Random(seed)
    sizes = SIZES * 2
    spans, offsets = [], []
    for _ in range(2):
        rng.shuffle(sizes)
        offset, placed = 0, {}
        for index, size in enumerate(sizes):
            offset += rng.randrange(0, 3000)
            placed.setdefault(size, []).append(offset)
            offset += size
            assert offset <= ARENA_BYTES, index
        offsets.append(placed)
    for size in SIZES:
        spans += [(local, remote, size) for local, remote in zip(offsets[0][size], offsets[1][size], strict=True)]
    return spans


@pytest.mark.parametrize("direction", ["write", "read"])
def test_bytes_arrive_where_they_should_and_nowhere_else(shared: tuple[Peer, Peer], direction: str) -> None:
    initiator, passive = shared
    initiator.fill(1)
    passive.fill(2)
    spans = scattered_spans(seed=len(direction))
    before = initiator.counters()
    getattr(initiator, direction)("passive#1", spans, TIMEOUT_S)
    here, there = bytearray(content(1, ARENA_BYTES)), bytearray(content(2, ARENA_BYTES))
    for local, remote, length in spans:
        if direction == "write":
            there[remote : remote + length] = here[local : local + length]
        else:
            here[local : local + length] = there[remote : remote + length]
    assert initiator.arena() == here
    assert passive.arena() == there
    after = initiator.counters()
    moved = "bytes_written" if direction == "write" else "bytes_read"
    assert after[moved] - before[moved] == sum(SIZES) * 2
    assert after["transfers"] - before["transfers"] == 1
    assert after["failures"] == before["failures"]
    assert after["seconds"] > before["seconds"]


def test_threads_may_transfer_at_once(shared: tuple[Peer, Peer]) -> None:
    initiator, passive = shared
    initiator.fill(3)
    passive.fill(4)
    quarter = ARENA_BYTES // 4
    errors = initiator.write_in_threads("passive#1", [[(index * quarter, index * quarter, quarter)] for index in range(4)], TIMEOUT_S)
    assert errors == []
    assert passive.arena() == initiator.arena()


@pytest.mark.parametrize(
    "bad", [(-1, 0, 8), (0, -1, 8), (0, 0, -8), (ARENA_BYTES - 7, 0, 8), (0, ARENA_BYTES - 7, 8), (0, 0, ARENA_BYTES + 1), (0, 2**63 - 1, 8), (0, 2**64, 8)]
)
def test_a_span_outside_of_an_arena_is_refused_before_any_byte_moves(shared: tuple[Peer, Peer], bad: tuple[int, int, int]) -> None:
    initiator, passive = shared
    initiator.fill(5)
    passive.fill(6)
    before = initiator.counters()
    for direction in ("write", "read"):
        with pytest.raises(ValueError, match="outside of"):
            getattr(initiator, direction)("passive#1", [(0, 0, 4096), bad], TIMEOUT_S)
    assert initiator.arena() == content(5, ARENA_BYTES).tobytes()
    assert passive.arena() == content(6, ARENA_BYTES).tobytes()
    assert initiator.counters() == before


def test_nothing_to_move_and_no_time_left(shared: tuple[Peer, Peer]) -> None:
    initiator, passive = shared
    initiator.fill(7)
    passive.fill(8)
    initiator.write("passive#1", [], TIMEOUT_S)
    initiator.write("passive#1", [(0, 0, 0), (ARENA_BYTES, ARENA_BYTES, 0)], TIMEOUT_S)
    with pytest.raises(TransferTimeout):
        initiator.write("passive#1", [(0, 0, 4096)], -1.0)
    assert passive.arena() == content(8, ARENA_BYTES).tobytes()


def test_connect_and_disconnect_are_idempotent(shared: tuple[Peer, Peer]) -> None:
    initiator, passive = shared
    initiator.fill(9)
    assert initiator.connect(passive.metadata) == "passive#1"
    initiator.disconnect("passive#1")
    initiator.disconnect("passive#1")
    with pytest.raises(PeerGone):
        initiator.write("passive#1", [(0, 0, 8)], TIMEOUT_S)
    assert initiator.connect(passive.metadata) == "passive#1"
    assert initiator.connect(passive.metadata) == "passive#1"
    initiator.write("passive#1", [(0, 0, ARENA_BYTES)], TIMEOUT_S)
    assert passive.arena() == initiator.arena()


def test_metadata_of_something_else_is_refused(shared: tuple[Peer, Peer], backend: str) -> None:
    initiator, _ = shared
    for metadata in (b"", b"noise", b"\x80"):
        with pytest.raises(TransferFailed):
            initiator.connect(metadata)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_peer_killed_during_transfers_is_gone(start: Start, shared: tuple[Peer, Peer], direction: str) -> None:
    initiator, _ = shared
    victim = start(f"victim#{direction}")
    initiator.connect(victim.metadata)
    getattr(initiator, direction)(victim.name, [(0, 0, ARENA_BYTES)], TIMEOUT_S)
    initiator.send("repeat", direction, victim.name, [(0, 0, ARENA_BYTES)], TIMEOUT_S)
    victim.kill()
    with pytest.raises(PeerGone):
        initiator.receive(2 * TIMEOUT_S)
    with pytest.raises(PeerGone):
        getattr(initiator, direction)(victim.name, [(0, 0, 8)], TIMEOUT_S)
    with pytest.raises(PeerGone):
        initiator.connect(victim.metadata)
        getattr(initiator, direction)(victim.name, [(0, 0, 8)], TIMEOUT_S)


def test_a_killed_peer_comes_back_as_a_new_generation(start: Start, shared: tuple[Peer, Peer]) -> None:
    initiator, _ = shared
    first, second, third = start("restarted#1"), start("restarted#2"), start("restarted#1")
    initiator.connect(first.metadata)
    initiator.write("restarted#1", [(0, 0, 4096)], TIMEOUT_S)
    first.kill()
    with pytest.raises(PeerGone):
        initiator.write("restarted#1", [(0, 0, 4096)], TIMEOUT_S)
    # Another generation; then, as after a reset of the registry, the first name once more.
    for seed, peer in enumerate((second, third)):
        peer.fill(seed)
        assert initiator.connect(peer.metadata) == peer.name
        initiator.read(peer.name, [(0, 0, ARENA_BYTES)], TIMEOUT_S)
        assert initiator.arena() == peer.arena()


def test_a_stopped_peer_never_hangs_a_transfer(start: Start, shared: tuple[Peer, Peer], backend: str) -> None:
    """One-sided copies go on without the peer; where its kernel or its progress is needed, the deadline ends the wait and nothing lands here later."""
    initiator, _ = shared
    peer = start("stopped#1")
    initiator.connect(peer.metadata)
    initiator.fill(11)
    peer.fill(12)
    initiator.read(peer.name, [(0, 0, 8)], TIMEOUT_S)
    peer.pause()
    initiator.send("read", peer.name, [(8, 8, ARENA_BYTES - 8)], 1.0)
    one_sided = backend in ("nixl", "shm")
    if one_sided:
        initiator.receive(TIMEOUT_S)
        peer.resume()
        assert initiator.arena() == peer.arena()
    else:
        with pytest.raises(TransferTimeout):
            initiator.receive(TIMEOUT_S)
        initiator.fill(13)
        peer.resume()
        peer.counters()
        assert initiator.arena() == content(13, ARENA_BYTES).tobytes()
        initiator.write(peer.name, [(0, 0, ARENA_BYTES)], TIMEOUT_S)
        assert initiator.arena() == peer.arena()


def test_only_a_peer_that_needs_progress_makes_some(shared: tuple[Peer, Peer], backend: str) -> None:
    _, passive = shared
    assert (passive.rounds() > 0) == (backend == NETWORK)


def test_close_leaves_nothing_behind(start: Start, backend: str) -> None:
    initiator, passive = start("closing#1"), start("closed#1")
    assert passive.arena() == bytes(ARENA_BYTES)
    initiator.connect(passive.metadata)
    initiator.write("closed#1", [(0, 0, ARENA_BYTES)], TIMEOUT_S)
    for peer in (initiator, passive):
        before, after = peer.close()
        assert {kind: count for kind, count in after.items() if count > before.get(kind, 0) and kind != "/dev/null"} == {}
        with pytest.raises(TransferFailed):
            peer.write("closed#1", [(0, 0, 8)], TIMEOUT_S)
        peer.stop()
    assert glob.glob("/dev/shm/headrace*") + glob.glob("/dev/shm/ucx_shm*") == []


@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_empty_arena_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="arena"):
        open_endpoint(CONFIGS[name], "empty#1", 0)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="carrier pigeon"):
        open_endpoint(TransportConfig(backend="carrier pigeon"), "a", 4096)
