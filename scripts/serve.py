"""Serve the model of a run, a checkpoint, or a directory in Hugging Face format over HTTP.

    python scripts/serve.py runs/quickstart
    python scripts/serve.py models/llama --slots 32 --port 8001
    KEMPNER_SERVE_TOKEN=... python scripts/serve.py runs/7b@1000 --host 0.0.0.0
    python scripts/serve.py --weights runs/rl/rl/0/weights    the newest version of a trainer

Completions and chat completions as in OpenAI's API, with the log-probabilities and ids of tokens;
weights change without a restart: docs/extensions/serve.md. SIGTERM or Ctrl-C ends it, refusing
requests in progress. Exit code 0, 1 if the engine has failed, or 2 on bad input.
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

import argparse
import os
import signal
import threading
from functools import partial
from pathlib import Path

from kempner.config.option import ConfigError
from kempner.extensions.hf.source import held_weights
from kempner.extensions.hf.stored import check_source
from kempner.extensions.planner.engine import check_room, no_room
from kempner.extensions.serve.arguments import TOKEN_VARIABLE, check_window, parse_serve_arguments
from kempner.jobs import this_job
from kempner.jobs.system.compiler import missing_compiler
from kempner.jobs.system.files import write_atomic
from kempner.jobs.system.front_door import explain_os_error, read_text, run_program
from kempner.jobs.system.seal import refuse_other_file
from kempner.jobs.system.signals import TO_LEAVE, leave_event

OPEN_TO_ALL = ("0.0.0.0", "::")


def main(argv: list[str]) -> int:
    end = leave_event()
    options = parse_serve_arguments(argv, __doc__)
    token = read_token(options)
    own_gpu()
    check_start(options)
    return 0 if options.check else run_server(options, token, end)


def check_start(options: argparse.Namespace) -> None:
    """Raise ConfigError for problems that a start would only find after reading the model. The
    nodes of a job may have what this host lacks: they check for themselves."""
    # It imports NumPy, which --help does not need.
    from kempner.extensions.generate.load import inference_device, model_shape

    here = not (options.check and this_job.is_here())
    if options.device == "cuda" and here:
        inference_device(options.device)
    if options.compile and here:
        check_compile(inference_device(options.device).type)
    if options.source:
        with held_weights(options.source) as source:
            cfg, window = model_shape(source)
            window = check_window(options.window, window)
            if not source.is_checkpoint:
                check_source(source, cfg)
        if here:
            check_room(cfg, options.slots, window, inference_device(options.device).type)
    if options.publish:
        refuse_other_file(url_file(options), "--publish", ("http://",))
        check_place(options.publish, make=not options.check)


def check_compile(device: str) -> None:
    """Raise ConfigError if --compile has no effect there, or no compiler."""
    if device != "cuda":
        raise ConfigError("--compile: it is for a GPU; leave it out")
    text = missing_compiler("cuda", option="--compile", off="or leave --compile out")
    if text:
        raise ConfigError(text)


def url_file(options: argparse.Namespace) -> Path:
    """Return the file of this engine's URL."""
    task = os.environ.get("KEMPNER_ENGINE") or os.environ.get("SLURM_PROCID", "0")
    return Path(options.publish, f"engine-{task}").resolve()


def read_token(options: argparse.Namespace) -> str:
    """Return the token. Raises ConfigError; never with the token in it."""
    # Removed from the environment: child processes must not inherit it.
    token, file = os.environ.pop(TOKEN_VARIABLE, "").strip(), options.token_file
    if file is not None:
        token = read_text(file, "--token-file").strip()
        if file.stat().st_mode & 0o077:
            raise ConfigError(f"--token-file {file}: may be read by others; chmod 600 it")
        if not token:
            raise ConfigError(f"--token-file {file}: is empty")
    if len(token.split()) > 1:  # not possible in a header
        raise ConfigError(
            f"{file or TOKEN_VARIABLE}: a token is one word, without spaces or line breaks"
        )
    if not token and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(
            f"--host {options.host}: others could use the engine; give a token by "
            f"{TOKEN_VARIABLE} or --token-file"
        )
    return token


def check_place(folder: Path, make: bool) -> None:
    """Raise ConfigError if no file can be written to a directory, which may not exist yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
            there = folder
    except OSError as error:
        raise ConfigError(f"--publish: {explain_os_error(error)}") from None
    # If a container has not mounted it yet (container.sh) this is a directory of the image.
    closed = not os.access(there, os.W_OK | os.X_OK) and "KP_UNMOUNTED" not in os.environ
    if not there.is_dir() or closed:
        what = "not writable" if there.is_dir() else "not a directory"
        raise ConfigError(f"--publish: {there} is {what}; name another directory")


def run_server(options: argparse.Namespace, token: str, end: threading.Event) -> int:
    """Serve until `end` is set."""
    from kempner.extensions.generate.load import load_model_and_tokenizer
    from kempner.extensions.serve.http import Server
    from kempner.extensions.serve.weights import first_version
    from kempner.extensions.serve.worker import Worker
    from kempner.jobs.ranks.process_group import allow_open_files
    from kempner.jobs.system.front_door import BadPortRange, NoFreePort

    allow_open_files()  # one connection per client
    try:
        name = options.source or str(options.weights)
        # Before reading the model, which takes minutes: a port in use is reported at once.
        server = Server(options.host, options.port, name, token)
    except (BadPortRange, NoFreePort):
        raise
    except OSError as error:
        fix = "; 0 takes a free one" if options.port else ""
        raise ConfigError(f"--port {options.port}: {error.strerror}{fix}") from None
    if options.source:
        loaded, version = load_model_and_tokenizer(options.source, options.device), 0
    else:
        found = first_version(
            options.weights, partial(load_model_and_tokenizer, device=options.device), token, end
        )
        if found is None:  # told to end
            return 0
        loaded, version = found
    window = check_window(options.window, loaded.window)
    cfg, device = loaded.model.cfg, loaded.model.embed.weight.device.type
    check_room(cfg, options.slots, window, device)  # also for a trainer's version
    try:
        worker = server.worker = Worker(
            loaded,
            options.slots,
            window,
            options.queue,
            version,
            fixed=options.deterministic,
            compiled=options.compile,
        )
    except RuntimeError as error:  # PyTorch has no separate class for the host
        if "memory" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise ConfigError(no_room(options.slots, window, f"more than is free: {first}")) from None

    def work() -> None:
        worker.run()
        end.set()  # also after a failure

    threads = [threading.Thread(target=work), threading.Thread(target=server.serve_forever)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    host = this_job.own_address() if options.host in OPEN_TO_ALL else options.host
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.port}"
    print(f"serve: {loaded.about} at {url}", flush=True)
    place = options.publish and url_file(options)
    if place:
        # Once the server answers: clients connect as soon as they can read the file.
        write_atomic(place, f"{url}\n")
    end.wait()
    if place:
        place.unlink(missing_ok=True)
    # No client finds it now: the engine refuses requests in progress, then the answers are sent.
    worker.end("the engine is ending")
    threads[0].join()
    server.wait_for_answers()
    server.shutdown()
    for number in TO_LEAVE:  # Slurm repeats them, and Python removes handlers at exit
        signal.signal(number, signal.SIG_IGN)
    return worker.exit_code


def own_gpu() -> None:
    """Select one GPU for the engine: the one of its node with the number of its task."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    task = int(os.environ.get("SLURM_LOCALID", "0"))
    if len(visible) > 1 and "SLURM_STEP_NUM_TASKS" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[task % len(visible)]


if __name__ == "__main__":
    run_program(main)
