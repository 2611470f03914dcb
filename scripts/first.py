"""First import of every program here: says what to do if the environment is missing, and handles
Ctrl-C and closed streams while the rest is imported.

It is also read by an old Python: no syntax after 3.6, neither here nor in the programs.
"""

import os
import sys

REQUIRED_PACKAGES = ("kempner", "torch", "numpy", "tomli", "safetensors", "huggingface_hub")
PROGRAM_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BIN = os.path.join(PROGRAM_ROOT, ".venv", "bin")


def start_program():
    sys.excepthook = import_hook
    if sys.version_info < (3, 10):  # noqa: UP036
        refuse_start(f"Python {sys.version.split()[0]} is older than 3.10", in_environment())
    use_own_package()
    # Not before the check: an older Python could not even parse it.
    from kempner.jobs.system import front_door

    front_door.begin_program()


def use_own_package():
    """Import the package beside this program, even if Python has another clone's."""
    import importlib.util

    if importlib.util.find_spec("kempner"):  # else import_hook() says what to do
        sys.path.insert(0, os.path.join(PROGRAM_ROOT, "src"))


def import_hook(kind, error, trace):
    """Replace the traceback of an import that fails without the environment, or that is interrupted
    before front_door.py handles interrupts."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    lacking = getattr(error, "name", None)
    if issubclass(kind, ModuleNotFoundError) and lacking in REQUIRED_PACKAGES:
        refuse_start(f"it lacks the package {lacking}", in_environment())
    if issubclass(kind, ModuleNotFoundError) and lacking == "ray":
        fix = f"run: {os.path.join(BIN, 'pip')} install -c constraints.txt -e '.[ray]'"
        refuse_start("it lacks the package ray", fix)
    sys.__excepthook__(kind, error, trace)


def in_environment():
    """Return the same command with the environment's Python."""
    import shlex

    python = os.path.join(BIN, "python")
    fix = "type: {} {}".format(python, " ".join(map(shlex.quote, sys.argv)))
    if os.path.exists(python):
        return fix
    return f"make the environment by `make -C {PROGRAM_ROOT} .venv/train`, then {fix}"


def refuse_start(why, fix):
    """Print one line, exit code 2; for --help describe the program, exit code 0."""
    if "--help" in sys.argv[1:] or "-h" in sys.argv[1:]:
        about = sys.modules["__main__"].__doc__.strip()
        sys.stdout.write(f"{about}\n\nTo list all options, which needs the environment, {fix}\n")
        sys.stdout.flush()
        os._exit(0)
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    sys.stderr.write(f"{name}: error: {sys.executable} cannot run the kit: {why}; {fix}\n")
    sys.stderr.flush()
    os._exit(2)


if __name__ == "__main__":
    print("first.py is not a program: the programs in scripts/ import it")
