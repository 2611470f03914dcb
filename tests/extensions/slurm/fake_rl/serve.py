"""Stands in for scripts/serve.py, as rl.py beside it. With FAKE_ENGINE=CODE it ends at once."""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kempner.jobs import this_job
from kempner.jobs.system.files import write_atomic

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


if code := os.environ.get("FAKE_ENGINE"):
    sys.exit(int(code))
weights, token = Path(option("--weights")), Path(option("--token-file"))
assert token.stat().st_mode & 0o777 == 0o600
while not list(weights.glob("v*/manifest.json")):
    time.sleep(0.05)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path == "/health" or self.headers["Authorization"] == token.read_text()
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(self.path).encode())

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer((option("--host"), 0), Handler)
host = this_job.own_address() if option("--host") == "0.0.0.0" else "127.0.0.1"
place = Path(option("--publish"), f"engine-{os.environ['KEMPNER_ENGINE']}")
write_atomic(place, f"http://{host}:{server.server_port}\n")
print("serve: here", flush=True)
server.serve_forever()
