"""Settings of a router."""

import msgspec


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`policy` is a row of router.policies.POLICIES. `stall_s`: a worker whose status has not come, or whose steps have not moved while it has work,
    for so long gets no new request and loses its running ones to another. `max_attempts`: how often one request is placed; a hand-off belongs to its
    placement. `wait_for_worker_s`: a request that has begun waits so long for a worker when none is left; a new one is refused at once."""

    host: str = "127.0.0.1"
    http_port: int = 8000
    policy: str = "cache_aware"
    default_deadline_s: float = 120.0
    max_deadline_s: float = 3600.0
    stall_s: float = 5.0
    max_attempts: int = 4
    wait_for_worker_s: float = 30.0
    max_requests: int = 1024  # in flight; more are refused with 429
    max_body_bytes: int = 8 * 1024**2
    timelines: int = 2048  # finished requests kept for GET /v1/requests/{id}/timeline
    local_prefill_tokens: int = 64  # cache_aware: uncached prompts up to this length are prefilled by the decode worker
    poll_s: float = 1.0  # between two looks at the registry
    drain_s: float = 30.0  # after SIGTERM running requests may finish for so long


class RouterProcessConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one router process needs; written by the launcher to a private file."""

    cluster: str
    name: str
    redis_url: str
    token: str
    model_path: str
    model_name: str
    max_context_tokens: int
    router: RouterConfig
    log_path: str = ""
    log_level: str = "INFO"
