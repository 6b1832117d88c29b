"""A stand-in for `python -m router FILE`: answers 200 to everything."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec

from router.config import RouterProcessConfig


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")


if __name__ == "__main__":
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=RouterProcessConfig)
    server = HTTPServer((config.router.host, config.router.http_port), Handler)
    print(f"ready http://{config.router.host}:{server.server_port}", flush=True)
    server.serve_forever()
