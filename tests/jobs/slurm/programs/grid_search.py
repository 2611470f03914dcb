"""A grid search of scikit-learn with joblib's processes: one program on each node, which uses all
of its CPUs. A point that is done has a file. usage: grid_search.py POINTS"""

import os
import sys
import time
from pathlib import Path

from joblib import Parallel, delayed
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

rank, size, points = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
out = Path("out")
out.mkdir(exist_ok=True)


def evaluate(point):
    data = load_iris(return_X_y=True)
    score = cross_val_score(LogisticRegression(C=0.01 * (point + 1), max_iter=200), *data).mean()
    time.sleep(0.3)
    fresh = out / f"point-{point}.tmp"
    fresh.write_text(f"{score}\n")
    fresh.rename(fresh.with_suffix(""))


left = [p for p in range(rank, points, size) if not (out / f"point-{p}").exists()]
print(f"rank {rank} of {size}: {len(left)} points left", flush=True)
for first in range(0, len(left), 2):
    Parallel(n_jobs=2)(delayed(evaluate)(point) for point in left[first : first + 2])
    print(f"{len(left) - first} to go", flush=True)
