"""Routing policies: the seam. One Protocol, one table, one contract test over the whole table (tests/contract/test_routing_policy.py)."""

from importlib import import_module
from typing import Protocol

from protocol.errors import ConfigError
from router.config import RouterConfig
from router.placement import Placement, RoutingRequest
from router.view import ClusterView


class Policy(Protocol):
    """Built as `Class(config)`. `choose` is a pure function of its arguments: it keeps nothing, draws nothing, waits for nothing.

    It takes healthy workers only and none of `request.excluded`; it raises Unavailable when none is left.
    """

    def choose(self, request: RoutingRequest, view: ClusterView) -> Placement: ...


POLICIES = {
    "always_disaggregate": "router.policies.always_disaggregate:AlwaysDisaggregate",
    "cache_aware": "router.policies.cache_aware:CacheAware",
    "least_loaded": "router.policies.least_loaded:LeastLoaded",
}


def new_policy(name: str, config: RouterConfig) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"router.policy: {name!r} is unknown; known: {', '.join(POLICIES)}", field="router.policy")
    module, _, kind = POLICIES[name].partition(":")
    policy: Policy = getattr(import_module(module), kind)(config)
    return policy
