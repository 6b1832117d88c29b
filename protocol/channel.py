"""gRPC channels and servers with the cluster's settings: the token, message size, keepalive. Knows nothing of the messages."""

import hmac

import grpc

VERSION = 1  # of the messages; a peer may be one older

_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024**2),
    ("grpc.max_send_message_length", 64 * 1024**2),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def new_server() -> grpc.aio.Server:
    return grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", 0)])


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that proves membership of the cluster."""
    return (("authorization", f"Bearer {token}"),)


async def require_token(context: grpc.aio.ServicerContext, token: str) -> None:  # type: ignore[type-arg]
    """End the call with UNAUTHENTICATED unless it carries the cluster's token."""
    given = dict(context.invocation_metadata() or ()).get("authorization", "")
    if not hmac.compare_digest(str(given).encode(), f"Bearer {token}".encode()):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong cluster token")


def version_accepted(version: int) -> bool:
    return version in (VERSION, VERSION - 1)
