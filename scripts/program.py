"""Run any program under this kit's supervision: scripts/slurm/run.sh starts one of these per rank.

python scripts/program.py [OPTIONS] -- COMMAND [ARGUMENTS]      see docs/start/any-program.md

--here N     all N ranks on this machine, without Slurm
--check N    only check the arguments, for a job of N nodes; prints ANSWER, the run directory,
             "torchrun" if that is the command, the checkpoint directory, "done" if an earlier
             start of the job has finished the run, and a hash of the command, each followed by
             a NUL
"""

if __name__ == "__main__":
    import os
    import sys

    sys.path.insert(0, os.path.dirname(__file__))  # PYTHONSAFEPATH leaves it out
    import first

    first.start_program()  # before anything that may be missing or slow

from dataclasses import replace

from kempner.jobs.program.book import hash_of, is_done
from kempner.jobs.program.copy import CodeCopy, check_code
from kempner.jobs.program.launchers import check_launcher, uses_torchrun
from kempner.jobs.program.options import check_command, check_run_dir, parse_options
from kempner.jobs.program.start import start_supervisor, supervise_here
from kempner.jobs.system.front_door import ANSWER, run_program


def main(words: list[str]) -> int:
    if words[:1] in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    check, here = words[:1] == ["--check"], words[:1] == ["--here"]
    options = parse_options(words[2 if check or here else 0 :])
    copy = CodeCopy.given()
    if copy:
        options = replace(options, command=copy.command(options.command))
    elif check and options.code:
        check_code(options.code, options.command)
    if check:
        check_launcher(options.command, int(words[1]))
    check_command(options.command)
    check_run_dir(options.run_dir)
    if check:
        launcher = "torchrun" if uses_torchrun(options.command) else ""
        over = "done" if is_done(options) else ""
        command = hash_of(options.command)
        answer = (ANSWER, options.run_dir, launcher, options.checkpoint_dir or "", over, command)
        print(*answer, sep="\0", end="\0")
        return 0
    return supervise_here(options, int(words[1])) if here else start_supervisor(options)


if __name__ == "__main__":
    run_program(main, "kempner")
