"""A stand-in for `python -m router FILE`: lists the members in Redis as its own GET /cluster, whatever path is asked for."""

import asyncio
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from protocol.membership import Member, Registry
from router.config import RouterProcessConfig


async def members(config: RouterProcessConfig) -> list[Member]:
    async with Redis.from_url(config.redis_url) as redis:
        return await Registry(redis, config.cluster).members()


class Handler(BaseHTTPRequestHandler):
    config: RouterProcessConfig

    def do_GET(self) -> None:
        found = asyncio.run(members(self.config))
        workers = [{"name": member.name, "healthy": True} for member in found if member.kind == "worker"]
        stores = [{"name": member.name} for member in found if member.kind == "store"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(msgspec.json.encode({"workers": workers, "stores": stores}))


if __name__ == "__main__":
    Handler.config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RouterProcessConfig)
    server = HTTPServer((Handler.config.router.host, Handler.config.router.http_port), Handler)
    print(f"ready http://{Handler.config.router.host}:{server.server_port}", flush=True)
    server.serve_forever()
