"""Settings of a store node."""

import msgspec

from kvstore.layout import BlockLayout
from transport.config import TransportConfig


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`eviction` is a row of kvstore.eviction.EVICTION, `codec` of kvstore.codec.CODECS. `max_hold_s` bounds every reservation, lease and hold,
    whatever deadline its owner names. `max_reserved_fraction`: credit for writers, as a share of the slots."""

    capacity_bytes: int = 512 * 1024**2
    eviction: str = "lru"
    codec: str = "raw"
    max_hold_s: float = 120.0
    max_reserved_fraction: float = 0.5
    hint_ttl_s: float = 600.0


class StoreNodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one store process needs; written by the controller."""

    cluster: str
    name: str
    node: str
    redis_url: str
    token: str
    layout: BlockLayout
    store: StoreConfig
    transport: TransportConfig
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    log_path: str = ""
