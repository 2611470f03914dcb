"""vLLM as an engine of a run, with the options of scripts/serve.py.

    python -m kempner.extensions.rl.engines.vllm_engine --weights DIR --publish DIR \\
        --token-file FILE [words for vLLM]

It waits for the first version of the weights, starts `vllm serve` with it, and publishes the URL
when requests are accepted. vLLM is looked up in the Python that KEMPNER_VLLM names, else in this
one. The client of its routes is VllmEngine in client.py. Exit code: vLLM's, 0 after SIGTERM, 2
on bad input.

In vLLM's process this module is the middleware that requires the token in each request, and lets
one run at a time change weights: vLLM's own --api-key leaves those routes open.
"""

from __future__ import annotations

import argparse
import hmac
import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError
from kempner.extensions.rl.engines.client import CHANGES, LEASE, SLOTS
from kempner.extensions.serve.arguments import TOKEN_VARIABLE
from kempner.extensions.serve.lease import RUN, Lease, LeaseHeld
from kempner.jobs import this_job
from kempner.jobs.ranks.port_range import ReservedPort
from kempner.jobs.system.compiler import keep_private
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import NoFreePort, run_program
from kempner.jobs.system.seal import refuse_other_file
from kempner.jobs.system.signals import leave_event

BEARER = "Authorization: Bearer TOKEN"
VLLM_POLL_S = 0.5
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes for weights
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ON_A_CPU = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines on one host must not share cores
}


class Allowed:
    """The ASGI middleware, a class that handles all kinds of connections: a function would
    not see websockets."""

    def __init__(self, app: Any) -> None:
        self.app, self.wanted = app, os.environ.get(TOKEN_VARIABLE, "").encode()
        self.lease = Lease()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        allowed = scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self.wanted)
        run = headers.get(RUN.lower().encode(), b"").decode("latin-1")
        # The server's own scope, lifespan, is not a request.
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif not allowed:
            if scope["type"] == "websocket":
                # 1008: policy violation (RFC 6455).
                await send({"type": "websocket.close", "code": 1008})
            else:
                await refuse_request(send, 401, "give the token of this engine: " + BEARER)
        elif scope["path"] == LEASE:
            if scope.get("method") == "POST":  # the run has ended
                self.lease.release(run)
            await send_answer(send, 200, {"run": self.lease.run, "leased": self.lease.held(run)})
        else:
            try:
                if scope["path"] in CHANGES:
                    self.lease.take(run)
                self.lease.renew(run)
            except LeaseHeld as error:
                await refuse_request(send, 409, str(error))
            else:
                await self.app(scope, receive, send)


async def refuse_request(send: Any, code: int, message: str) -> None:
    await send_answer(send, code, {"error": {"message": message, "code": code}})


async def send_answer(send: Any, code: int, content: dict[str, Any]) -> None:
    """Send the complete answer to a request."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers += [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(argv: list[str]) -> int:
    end = leave_event()
    options, more = parse_engine_arguments(argv)
    python = os.environ.get("KEMPNER_VLLM") or sys.executable
    if "KEMPNER_VLLM" not in os.environ and importlib.util.find_spec("vllm") is None:
        return fail_start(
            "this Python has no vLLM; set KEMPNER_VLLM to one that has it: docs/extensions/rl.md"
        )
    try:
        token = options.token_file.read_text().strip()
    except OSError as error:
        return fail_start(f"--token-file {options.token_file}: {error.strerror}")
    if not token or options.token_file.stat().st_mode & 0o077:
        return fail_start(f"--token-file {options.token_file}: must have a token, and mode 600")
    held = options.weights / f".engine-{engine_number()}"
    while (model := hold_version(options.weights, held)) is None:
        if end.wait(VLLM_POLL_S):
            return 0
    place = (options.publish / f"engine-{engine_number()}").resolve()
    try:
        refuse_other_file(place, "--publish", ("http://",))
    except ConfigError as error:
        return fail_start(str(error))
    try:  # held until this process ends: vLLM binds it, too, and no other process of ours
        reserved = None if options.port else ReservedPort()
    except OSError as error:
        return fail_start(error.strerror or str(error), 1 if isinstance(error, NoFreePort) else 2)
    port = reserved.port if reserved else options.port
    command = [
        python,
        "-m",
        "vllm.entrypoints.cli.main",
        *vllm_arguments(model, options, port),
        *more,
    ]
    # In a separate group, so that stop_process() ends every process that vLLM starts.
    process = subprocess.Popen(command, env=vllm_environment(token), start_new_session=True)
    try:
        while process.poll() is None and not end.is_set():
            if not place.exists() and await_ready(port, token, model):
                host = this_job.own_address() if options.host in ("0.0.0.0", "::") else options.host
                place.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(place, f"http://{host}:{port}\n")
                shutil.rmtree(held, ignore_errors=True)
            end.wait(VLLM_POLL_S)
        # A server that ends unasked has failed, whatever its exit code.
        return 0 if end.is_set() else process.returncode or 1
    finally:
        # First the URL: nobody may find an engine that is about to end.
        place.unlink(missing_ok=True)
        stop_process(process)
        shutil.rmtree(held, ignore_errors=True)


def fail_start(message: str, code: int = 2) -> int:
    print(f"vllm_engine: error: {message}", file=sys.stderr)
    return code


def parse_engine_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options; unknown words are passed to vLLM."""
    parser = argument_parser("python -m kempner.extensions.rl.engines.vllm_engine", __doc__)
    # Otherwise an option of vLLM could match the beginning of one of these.
    parser.allow_abbrev = False
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--publish", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=SLOTS["vllm"])
    return parser.parse_known_args(argv)


def hold_version(weights: Path, held: Path) -> Path | None:
    """Return the newest version, None before the first, as links to its files in `held`, because it
    is removed when there is a newer one, even while vLLM reads it."""
    shutil.rmtree(held, ignore_errors=True)
    if (manifest := max(weights.glob("v*/manifest.json"), default=None)) is None:
        return None
    version = manifest.parent
    try:
        shutil.copytree(version, held / version.name, copy_function=os.link)
    except OSError:  # removed meanwhile, or no links in this file system
        return version if manifest.exists() else None
    return held / version.name


def vllm_arguments(model: Path, options: argparse.Namespace, port: int) -> list[str]:
    """Return vLLM's command line. Token ids go in and out, and their log-probabilities are those of
    the distribution that they were drawn from."""
    gpus = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    words = ["serve", str(model), "--host", options.host, "--port", str(port)]
    # --enable-scale-out adds /inference/v1/generate: /v1/completions needs a tokenizer.
    words += ["--skip-tokenizer-init", "--enable-scale-out", "--max-num-seqs", str(options.slots)]
    words += ["--logprobs-mode", "processed_logprobs", "--middleware", f"{__spec__.name}.Allowed"]
    # On a CPU the trainer computes in fp32: an engine in bf16 would have another policy.
    if not gpus:
        return [*words, "--dtype", "float32", "--enforce-eager"]
    return [*words, "--tensor-parallel-size", str(len(gpus))]


def vllm_environment(token: str) -> dict[str, str]:
    source = str(Path(__file__).parents[4])  # for the middleware
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    # vLLM keeps the compiled model in its own cache, and everything else in torch's.
    keep_private()
    own = ENVIRONMENT | ({} if os.environ.get("CUDA_VISIBLE_DEVICES") else ON_A_CPU)
    # The user's values come last, and win.
    return {**own, **os.environ, "PYTHONPATH": path, TOKEN_VARIABLE: token}


def engine_number() -> str:
    return os.environ.get("KEMPNER_ENGINE") or os.environ.get("SLURM_PROCID", "0")


def await_ready(port: int, token: str, model: Path) -> bool:
    """Return whether vLLM answers; it is then told its weights' version."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps({"new_version": str(int(model.name[1:]))})
    try:
        connection.request("POST", "/update_weight_version", body, headers)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stop_process(process: subprocess.Popen[bytes]) -> None:
    """Stop vLLM and all processes that it has started."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            # Waits for the leader alone: the next turn kills the rest of its group.
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    run_program(main)
