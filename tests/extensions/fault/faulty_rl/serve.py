"""scripts/serve.py with faults put in: see faulty_train.py."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
sys.path[:0] = [str(ROOT)]

if __name__ == "__main__":
    from tests.trainer.fault.faulty_train import main

    main(ROOT / "scripts/serve.py")
