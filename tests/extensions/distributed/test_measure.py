"""`train.py --bench` and a PROFILE file, through the trainer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kempner.data.formats.fake import FakeDataset
from kempner.data.source import Shape
from kempner.extensions.bench.measure import _table, why_failed
from kempner.jobs.records import events
from kempner.jobs.system.reading import read_jsonl
from kempner.train.configure import load_config
from tests.conftest import TINY, Train, start_train, status
from tests.waiting import LIMIT_S, until

BENCH = ("--bench", "--bench.warmup=1", "--bench.steps=3", "--metrics.peak_tflops=0.001")


def test_variants_by_two_ranks_in_one_go(train: Train, tmp_path: Path) -> None:
    """Each has its figures; MFU counts the keys that are seen, which are fewer in documents."""
    base = tmp_path / "base"
    variants = '["", "--train.micro_batch=1 --bench.length=variable"]'
    done = train(base, *BENCH, f"--bench.compare={variants}", nproc=2)
    found = json.loads((base / "bench.json").read_text())
    cfg = load_config(TINY[:1], [*TINY[1:], "--data.dataset_path=fake:"])
    keys = (cfg.train.seq_len / 2, seen_keys(cfg.train.seq_len))
    for result, expected in zip(found["results"], keys, strict=True):
        assert len(result["steps"]) == 3 and result["tokens_per_step"] == 8 * 32
        flops = cfg.model.flops_per_token(32) + 12 * 2 * 4 * 16 * (expected - 16)
        for step in result["steps"]:
            speed = 8 * 32 / step["step, s"]
            assert step["tokens/s"] == pytest.approx(speed)
            assert step["MFU"] == pytest.approx(speed * flops / (2 * 1e9))
        times = [step["step, s"] for step in result["steps"]]
        assert result["summary"]["step, s"]["mean"] == pytest.approx(np.mean(times))
        assert result["summary"]["step, s"]["sd"] == pytest.approx(np.std(times, ddof=1))
    assert found["results"][1]["config"]["train"]["micro_batch"] == 1
    assert found["torch"] and found["device"] == "CPU"
    assert "of the best" in done.stdout and "MFU = tokens/s x" in done.stdout
    assert status(base)["state"] == "done"
    assert not list(base.rglob("step_*")), "a measurement leaves no checkpoint"


def seen_keys(length: int) -> float:
    """That a query of the first eight samples of a run sees, counted one by one."""
    from kempner.data.mixture import Mixture

    source = FakeDataset("fake", Shape(length, 257, separate=True))
    _, indices = Mixture.alone(source, 0).draw(0, 8)
    documents = source.read(indices).documents
    assert documents is not None
    return float(np.mean([sum(row[: i + 1] == row[i]) for row in documents for i in range(length)]))


def test_a_variant_that_is_refused_stops_all_of_them(train: Train, tmp_path: Path) -> None:
    variants = '["--train.micro_batch=3", "--train.micro_batch=1"]'
    done = train(tmp_path / "run", *BENCH, f"--bench.compare={variants}", code=2)
    assert "do not divide" in done.stderr and not (tmp_path / "run").exists()


def test_a_variant_with_an_open_quote(train: Train, tmp_path: Path) -> None:
    done = train(tmp_path / "run", *BENCH, """--bench.compare=["--run.name='x"]""", code=2)
    assert "bench.compare, --run.name='x: No closing quotation" in done.stderr
    assert "Traceback" not in done.stderr


def test_out_of_memory_says_by_how_much(tmp_path: Path) -> None:
    """The words are those of torch's allocator."""
    told = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB "
        "of which 512.00 MiB is free. Process 1 has 139.30 GiB memory in use."
    )
    fault = events.FaultEvent(
        time=1.0, kind="oom", reason=f"rank 0 on host: OutOfMemoryError: {told}"
    )
    events.append_event(tmp_path / "attempts.jsonl", fault)
    assert why_failed(tmp_path, 1) == "out of memory, by 2.00 GiB or more"
    failed = {"summary": {}, "failed": "out of memory", "planned_gib": 150.0}
    assert "150.00 GiB" in _table(failed)


def test_a_profile_file_gives_a_trace_of_the_next_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--train.max_steps=1000000", "--profile.steps=2", "--profile.ranks=[1]"]
    words += ["--data.dataset_path=fake:", f"--run.dir={run_dir}"]
    process = start_train(*TINY, *words, nproc=2)
    try:
        (run_dir / "PROFILE").parent.mkdir(exist_ok=True)
        (run_dir / "PROFILE").touch()
        until(lambda: list(run_dir.glob("profile/*")), alive=(process,))
        (run_dir / "STOP").touch()
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    (trace,) = run_dir.glob("profile/*")  # of rank 1 alone
    first, last = map(int, trace.name.split("-")[1:3])
    assert trace.name == f"steps-{first}-{last}-rank-1.json.gz" and last == first + 1
    content = gzip.decompress(trace.read_bytes())
    names = [event.get("name") for event in json.loads(content)["traceEvents"]]
    assert names.count("Optimizer.step#Optimizer.step") == 2
    assert not (run_dir / "PROFILE").exists()


def test_a_profile_of_ranks_that_are_not_there_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--train.max_steps=1000000", "--profile.ranks=[7]"]
    process = start_train(*TINY, *words, "--data.dataset_path=fake:", f"--run.dir={run_dir}")
    try:
        until(lambda: (run_dir / "metrics.jsonl").exists(), alive=(process,))
        (run_dir / "PROFILE").touch()
        until(lambda: not (run_dir / "PROFILE").exists(), alive=(process,))
        (run_dir / "STOP").touch()
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "profile.ranks = 7: none of the 1 rank(s) writes a trace" in out


def test_replicas_are_measured_in_whole_rounds(train: Train, tmp_path: Path) -> None:
    rounds = ("--lowcomm.replicas=2", "--lowcomm.interval=4", "--train.max_steps=4")
    train(tmp_path / "run", *BENCH, *rounds, nproc=2)
    (result,) = json.loads((tmp_path / "run/bench.json").read_text())["results"]
    assert len(result["steps"]) == 4 and result["tokens_per_step"] == 8 * 32
    lines = map(json.loads, (tmp_path / "run/1/metrics.jsonl").read_text().splitlines())
    rounds_of = [line["step"] for line in lines if "outer_time" in line]
    assert rounds_of == [4, 8]  # of the warm-up, and what counts


def test_a_variant_that_is_ended_has_no_figures(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = (
        *TINY,
        "--data.dataset_path=fake:",
        f"--run.dir={run}",
        *BENCH,
        "--bench.steps=1000000",
    )
    process = start_train(*words)
    until(lambda: len(read_jsonl(run / "1/metrics.jsonl")) > 3, alive=(process,))
    process.terminate()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "Traceback" not in err, err
    assert "of warm-up" not in out and not (run / "bench.json").exists()
