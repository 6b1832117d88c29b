"""The default: go where the prefix is, unless the queue there costs more; disaggregate only what is worth moving.

All costs are in tokens: those waiting, those uncached, and SEQUENCE_TOKENS for each sequence that already decodes there.
"""

from protocol.errors import Unavailable
from router.config import RouterConfig
from router.placement import Placement, RoutingRequest
from router.view import ClusterView, WorkerView

SEQUENCE_TOKENS = 16  # prompt tokens that delay a newcomer about as much as one more sequence in every step


class CacheAware:
    def __init__(self, config: RouterConfig) -> None:
        self._local_tokens = config.local_prefill_tokens

    def choose(self, request: RoutingRequest, view: ClusterView) -> Placement:
        def cost(worker: WorkerView) -> tuple[int, str]:
            load = worker.waiting_tokens + worker.sequences * SEQUENCE_TOKENS
            return load + request.uncached_tokens(worker), worker.name

        decoders, decode_resort = view.candidates("decode", request.excluded)
        if not decoders:
            raise Unavailable("no healthy worker")
        decode = min(decoders, key=cost)
        resort = "decode_role" if decode_resort else ""
        uncached = request.uncached_tokens(decode)
        if uncached <= self._local_tokens:
            return Placement(None, decode, f"{uncached} uncached tokens: not worth moving", last_resort=resort)
        prefills = [worker for worker in view.candidates("prefill", request.excluded)[0] if worker.prefers("prefill")]
        if not prefills:
            return Placement(None, decode, "no prefill worker", last_resort=resort or "no_prefill_worker")
        prefill = min(prefills, key=cost)
        if prefill.key == decode.key:
            return Placement(None, decode, "one worker is best for both", last_resort=resort)
        return Placement(prefill, decode, f"{uncached} uncached tokens", last_resort=resort)
