"""Engine events as rows of the data plane: one meaning for both phases. Knows the messages; nothing of who sends them."""

from collections.abc import Mapping

from engine.events import Chunk, Failed
from engine.sequence import Tally
from protocol import headrace_pb2 as pb


def chunk_row(chunk: Chunk, instants: Mapping[str, float]) -> pb.Row:
    request_id, attempt = chunk.sequence.key
    return pb.Row(
        request_id=request_id,
        attempt=attempt,
        tokens=chunk.tokens,
        text=chunk.text,
        finish_reason=chunk.finish_reason,
        logprobs=[one.to_message() for one in chunk.logprobs],
        prompt_logprobs=[one.to_message() for one in chunk.prompt_logprobs],
        embedding=chunk.embedding,
        instants=[pb.Instant(name=name, at=at) for name, at in instants.items()],
    )


def error_row(failed: Failed, work: pb.Work) -> pb.Row:
    """The last row of a request that failed here."""
    error, (request_id, attempt) = failed.error, failed.key
    return pb.Row(
        request_id=request_id,
        attempt=attempt,
        finish_reason="error",
        error_code=error.code,
        error_message=error.message,
        error_stage=error.stage or "",
        error_field=error.field or "",
        work=work,
    )


def tell(tally: Tally, work: pb.Work) -> pb.Work:
    """What the engine did for the sequence so far, into `work`."""
    work.computed_tokens = tally.computed_tokens
    work.computed_prompt_tokens = tally.computed_prompt_tokens
    work.reused_device_tokens = tally.reused_device_tokens
    work.reused_store_tokens = tally.reused_store_tokens
    work.recomputed_tokens = tally.recomputed_tokens
    work.cached_tokens = tally.cached_tokens
    work.preemptions = tally.preemptions
    return work
