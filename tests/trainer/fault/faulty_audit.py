"""scripts/audit.py with faults put in: see faulty_train.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

if __name__ == "__main__":
    from tests.trainer.fault.faulty_train import TRAIN, main

    main(TRAIN.with_name("audit.py"))
