"""Settings of byte movement."""

import msgspec


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`backend` is a row of transport.endpoint.TRANSPORTS. `ucx_tls` and `ucx_error_mode` are NIXL's; docs/architecture.md says which pairs need progress.
    `ucx_net_devices`: the interfaces that UCX listens on and uses. It asks nobody who they are, so name only networks where every machine may write into
    the caches. `host` is the address that tcp listens on; `secret` authenticates tcp peers and is set by the launcher."""

    backend: str = "nixl"
    ucx_tls: str = "tcp,sm,self"
    ucx_error_mode: str = "none"
    ucx_net_devices: str = "lo"
    host: str = "127.0.0.1"
    secret: str = ""
