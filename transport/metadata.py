"""How an endpoint describes itself to its peers: msgpack of one tagged struct per backend, the tag naming backend and version."""

from typing import TypeVar

import msgspec

from protocol.errors import TransferFailed

T = TypeVar("T", bound=msgspec.Struct)


def encode_metadata(address: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(address)


def decode_metadata(metadata: bytes, kind: type[T]) -> T:
    """Raises TransferFailed for another backend, another version, or noise."""
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"metadata of an endpoint that this one cannot talk to: {error}") from None
