"""One worker does both phases: the least loaded decode worker. Never disaggregates."""

from protocol.errors import Unavailable
from router.config import RouterConfig
from router.placement import Placement, RoutingRequest
from router.view import ClusterView


class LeastLoaded:
    def __init__(self, config: RouterConfig) -> None:
        pass

    def choose(self, request: RoutingRequest, view: ClusterView) -> Placement:
        workers, resort = view.candidates("decode", request.excluded)
        if not workers:
            raise Unavailable("no healthy worker")
        worker = min(workers, key=lambda worker: (worker.sequences, worker.waiting_tokens, worker.name))
        return Placement(None, worker, "least loaded", last_resort="decode_role" if resort else "")
