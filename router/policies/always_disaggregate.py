"""Prefill on one worker, decode on another, whatever the prompt. Least loaded of each role."""

from protocol.errors import Unavailable
from router.config import RouterConfig
from router.placement import Placement, RoutingRequest
from router.view import ClusterView, WorkerView


class AlwaysDisaggregate:
    def __init__(self, config: RouterConfig) -> None:
        pass

    def choose(self, request: RoutingRequest, view: ClusterView) -> Placement:
        decoders, decode_resort = view.candidates("decode", request.excluded)
        if not decoders:
            raise Unavailable("no healthy worker")
        decode = min(decoders, key=_decode_load)
        prefills, prefill_resort = view.candidates("prefill", request.excluded | {decode.key})
        if not prefills:
            return Placement(None, decode, "only one healthy worker", last_resort="no_second_worker")
        resort = "decode_role" if decode_resort else "prefill_role" if prefill_resort else ""
        return Placement(min(prefills, key=_prefill_load), decode, "always disaggregated", last_resort=resort)


def _decode_load(worker: WorkerView) -> tuple[int, int, str]:
    return worker.sequences, worker.waiting_tokens, worker.name


def _prefill_load(worker: WorkerView) -> tuple[int, int, str]:
    return worker.waiting_tokens, worker.sequences, worker.name
