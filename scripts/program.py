"""Any program under the care of this kit: scripts/slurm/run.sh starts one of these for each rank.

python scripts/program.py [OPTIONS] -- COMMAND [ARGUMENTS]      see docs/any-program.md

--here N     all N ranks on this machine, without Slurm
--check      only checks the words, and prints the run directory
"""

from __future__ import annotations

import sys
from dataclasses import replace

from kempner.config.option import ConfigError
from kempner.program.copy import Copy, check_code
from kempner.program.options import check_command, parse
from kempner.program.start import supervise, supervise_here


def main(words: list[str]) -> int:
    check, here = words[:1] == ["--check"], words[:1] == ["--here"]
    try:
        options = parse(words[1 if check else 2 if here else 0 :])
        if copy := Copy.given():
            options = replace(options, command=copy.command(options.command))
        elif check and options.code:
            check_code(options.code, options.command)
        check_command(options.command)
        if check:
            print(options.run_dir)
            return 0
        return supervise_here(options, int(words[1])) if here else supervise(options)
    except ConfigError as error:
        for problem in error.problems:
            print(f"kempner: error: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
