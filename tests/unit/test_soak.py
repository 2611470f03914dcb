"""The plan of the soak, which the seed alone decides, and what the soak refuses to accept."""

import itertools
import json
from pathlib import Path

from benchmarks.soak import GAP, KINDS, draw, revived


def test_plan() -> None:
    plan = draw(40, seed=3)
    assert plan == draw(40, seed=3) != draw(40, seed=4)
    assert {fault.kind for fault in plan[:20]} == set(KINDS)
    steps = [0.0, *(fault.step for fault in plan)]
    assert all(b - a >= GAP[0] - 0.1 for a, b in itertools.pairwise(steps))


def test_a_start_after_the_end_is_found(tmp_path: Path) -> None:
    """Slurm requeued the job once more, although the batch script had ended the run."""
    events: list[dict[str, object]] = [
        {"event": "start", "attempt": 0},
        {"event": "decision", "decision": "requeue", "why": "interrupted"},
        {"event": "start", "attempt": 1},
        {"event": "decision", "decision": "end", "why": "the run is done"},
    ]
    file = tmp_path / "attempts.jsonl"
    file.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert revived(tmp_path) == []
    with file.open("a") as log:
        log.write(json.dumps({"event": "start", "attempt": 2}) + "\n")
    assert revived(tmp_path) == ["attempt 2 started after the decision 'the run is done'"]
