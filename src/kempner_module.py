"""python src/kempner_module.py MODULE ARGUMENTS: as `python -m`, which looks into the current
directory first. That is where its user typed sbatch: another user may have put a `kempner` there,
and the user a file with the name of one of Python's modules."""

import runpy
import sys

del sys.argv[0]  # the directory of this file is on sys.path, and the current one is not
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
