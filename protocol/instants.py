"""The life-cycle instants of a request: one vocabulary for timelines, metrics and traces. Unix seconds."""

from enum import StrEnum


class Instant(StrEnum):
    RECEIVED = "received"
    ROUTED = "routed"
    PREFILL_QUEUED = "prefill_queued"
    PREFILL_STARTED = "prefill_started"
    KV_PUSHED = "kv_pushed"  # the last block of the prompt was committed at the decode node's store
    FIRST_TOKEN = "first_token"
    DECODE_QUEUED = "decode_queued"
    KV_READY = "kv_ready"  # the decode worker has every block it will load
    DECODE_STARTED = "decode_started"
    FINISHED = "finished"
