"""The lock of a run that nobody holds any more."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from kempner.config.option import ConfigError
from kempner.resilience import lock


@pytest.mark.parametrize(
    ("step", "alive", "free"),
    [
        ("1", "12.0 12.1", False),
        ("1", "12.batch 12.0", True),
        ("4294967290", "12.interactive 12.0", False),
        (None, "12.batch 12.0", False),
    ],
)
def test_the_lock_of_a_step_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str | None, alive: str, free: bool
) -> None:
    """A replica that is started again on another host does not wait for the dead one's beats."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    monkeypatch.setenv("SLURM_STEP_ID", "2")
    monkeypatch.setattr("kempner.slurm._ask", lambda *command: f"{alive}\n".replace(" ", "\n"))
    beats = iter(range(100))
    monkeypatch.setattr(lock, "_mtime", lambda path: float(next(beats)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    holder = {"job": "12", "slurm_id": "12", "restart": "0", "step": step, "host": "other"}
    (tmp_path / "lock").write_text(json.dumps(holder))
    if free:
        lock.RunLock(tmp_path).release()
    else:
        with pytest.raises(ConfigError, match="in use by job 12 on other"):
            lock.RunLock(tmp_path)
