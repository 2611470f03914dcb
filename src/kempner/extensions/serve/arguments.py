"""The options of scripts/serve.py, also as rl.inference.args. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kempner.config.command_line import argument_parser
from kempner.config.option import ConfigError

TOKEN_VARIABLE = "KEMPNER_SERVE_TOKEN"
OF_RUN = ("source", "weights", "token_file", "publish", "check")  # set by a run itself


def parse_serve_arguments(argv: Sequence[str], doc: str | None = None) -> argparse.Namespace:
    """Parse the command line. `doc`: the text of --help. Raises ConfigError."""
    parser = argument_parser("serve.py", doc)
    add = parser.add_argument
    add(
        "source",
        metavar="MODEL",
        nargs="?",
        help="a run (RUN or RUN@STEP), a checkpoint, or a directory in Hugging Face format",
    )
    add(
        "--weights",
        type=Path,
        metavar="DIR",
        help="in place of MODEL: where a trainer publishes versions; waits for the first",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    add("--port", type=int, default=8000, help="0: any free port (default: 8000)")
    add("--slots", type=int, default=16, help="texts generated at a time (default: 16)")
    add("--queue", type=int, default=1024, help="most texts that may wait (default: 1024)")
    add(
        "--window",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its completion (default: all that the model sees)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="bitwise the same log-probabilities, whatever else the engine generates; slower",
    )
    add(
        "--compile",
        action="store_true",
        help="on a GPU, compile the steps: each shape takes seconds when it first occurs",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where to run the model")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"a file of mode 600 with the token that requests must have (default: "
        f"{TOKEN_VARIABLE})",
    )
    add(
        "--publish",
        type=Path,
        metavar="DIR",
        help="write the URL to engine-K here once requests are taken; K: KEMPNER_ENGINE, else the "
        "number of this task, or 0",
    )
    add("--check", action="store_true", help="check the command line, and exit")
    options = parser.parse_args(argv)
    if bool(options.source) == bool(options.weights):
        parser.error("give either MODEL or --weights DIR")
    for name in ("slots", "queue", "window"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")
    if not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port}: must be from 0 to 65535")
    return options


def problem_of(words: Sequence[str], least: int, most: int) -> str:
    """Return what is wrong with more options for an engine of a run, whose texts grow up to `least`
    tokens, and whose model sees `most`; empty if nothing."""
    # Placeholders for the values that the run itself will give.
    arguments = ["--weights=.", f"--window={least}"]
    try:
        # argparse would print the help, and end this process.
        if {"-h", "--help"} & {*words}:
            return "--help: cannot be given to an engine of a run; leave it out"
        plain, options = (
            vars(parse_serve_arguments(arguments)),
            vars(parse_serve_arguments([*arguments, *words])),
        )
    except ConfigError as error:
        return "; ".join(error.problems)
    for name in OF_RUN:
        if options[name] != plain[name]:
            name = "MODEL" if name == "source" else f"--{name.replace('_', '-')}"
            return f"{name}: cannot be given to an engine of a run; leave it out"
    window = options["window"]
    if window < least:
        return f"--window {window}: is under train.seq_len = {least}, up to which texts may grow"
    try:
        check_window(window, most)
    except ConfigError as error:
        return str(error)
    return ""


def check_window(window: int | None, most: int) -> int:
    """Return the most tokens of a text; the model sees `most`. Raises ConfigError."""
    if window is not None and window > most:
        raise ConfigError(f"--window {window}: the model sees {most} tokens at most")
    return window or most
