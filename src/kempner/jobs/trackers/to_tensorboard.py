"""Points -> TensorBoard event files in RUN/tensorboard, one for each start of this tracker.

No position is recorded: the points in the files are counted, one event each. A killed writer leaves
at most half an event, which is neither counted nor shown.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from kempner.jobs.this_job import host_name
from kempner.jobs.trackers.points import MetricsPoint

CONFIG_TAG = "config"


class TensorBoard:
    def __init__(self, run_dir: Path) -> None:
        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        files = sorted(folder.glob("events.out.tfevents.*"))
        self.position = sum(map(_count, files))
        # TensorBoard reads the files in the order of their names, which begin with the time.
        name = f"events.out.tfevents.{time.time_ns() // 1000}.{host_name()}.{os.getpid()}"
        self._file = open(folder / name, "wb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        # In files of an older version TensorBoard ignores SessionLog.START: see write().
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        text = (run_dir / "config.toml").read_text()
        summary = text_pb(CONFIG_TAG, "\n".join(f"    {line}" for line in text.splitlines()))
        # By start number: TensorBoard shows the configuration of each.
        self._write(Event(wall_time=time.time(), step=len(files), summary=summary))

    def write(self, points: list[MetricsPoint]) -> None:
        """Write the points; they are durable when it returns."""
        for point in points:
            if point.undoes:  # readers then drop their points from this step on
                start = SessionLog(status=SessionLog.START)
                self._write(Event(wall_time=point.time, step=point.step, session_log=start))
            values = [Summary.Value(tag=k, simple_value=v) for k, v in point.values.items()]
            summary = Summary(value=values)
            self._write(Event(wall_time=point.time, step=point.step, summary=summary))
        self._file.flush()
        # The next start counts the points in the files, and sends the rest.
        os.fsync(self._file.fileno())
        self.position += len(points)

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())

    def close(self, failed: bool) -> None:
        self._file.close()


def _count(path: Path) -> int:
    """Count the points in an event file."""
    events = (Event.FromString(data) for data in RawEventFileLoader(str(path)).Load())
    return sum(e.HasField("summary") and e.summary.value[0].tag != CONFIG_TAG for e in events)
