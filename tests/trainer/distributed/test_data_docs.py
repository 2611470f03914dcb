"""docs/guide/data.md: its commands and its configuration, as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT, clean_env, start_train, status
from tests.trainer.unit.test_data_readers import write_megatron

SMALL = ["--model.dim=32", "--model.n_layers=1", "--model.n_heads=2", "--model.n_kv_heads=1",
         "--model.ffn_dim=32", "--train.seq_len=64", "--metrics.log_interval=1",
         "--train.global_batch=10"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page takes as given: some text, and files of Megatron's."""
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name, files in (("corpus", "src/kempner/jobs/ray"), ("code", "src/kempner/optim")):
        (tmp_path / name).symlink_to(ROOT / files)
    (tmp_path / "megatron").mkdir()
    documents = [[np.arange(40 + n).tolist()] for n in range(100)]
    write_megatron(tmp_path / "megatron/books_text_document", documents, 8)
    return tmp_path


def test_the_commands_for_several_data_sets_do_what_the_page_says(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs/guide/data.md").read_text()
    section = page[page.index("\n## Several data sets") : page.index("\n## Documents")]
    [config] = re.findall(r"```toml\n# mix.toml\n(.*?)```", section, re.S)
    (folder / "mix.toml").write_text(config)
    commands = re.findall(r"^    python (.*)$", section, re.M)
    assert len(commands) == 4
    said = []
    for command in commands:
        small = SMALL if "mix.toml" in command else []
        done = subprocess.run(
            [sys.executable, *shlex.split(command), *small],
            cwd=folder, env=clean_env(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    shown = said[2]
    assert "from step 0" in shown and "from step 30" in shown
    assert re.search(r"web +70.00% +10.00% ", shown) and "books_text_document" in shown
    assert " 11 12 13 14 15 " in shown  # Megatron's files have no tokenizer
    [text] = re.findall(
        r"of web; 64 of its 64 tokens are in the loss:\n(.*?)\n\nsample", shown, re.S
    )
    assert any(text in path.read_text() for path in (folder / "corpus").glob("*.py"))
    assert (folder / "mixture.png").stat().st_size > 10_000
    lines = [json.loads(x) for x in (folder / "runs/mix/metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    books = [steps[n]["sources"]["books_text_document"]["tokens"] for n in (30, 31)]
    assert books == [1 * 64, 7 * 64]
    assert steps[31]["lr"] < 0.4 * steps[30]["lr"]
    # Resumed by two processes, with the documents apart.
    more = ["--train.max_steps=42", "--data.document_mask", f"--run.dir={folder / 'runs/mix'}"]
    paths = (folder / "mix.toml").read_text().replace('\npath = "', f'\npath = "{folder}/')
    (folder / "there.toml").write_text(paths.replace("configs/", f"{ROOT}/configs/"))
    process = start_train(str(folder / "there.toml"), *SMALL, *more, nproc=2)
    out, err = process.communicate(timeout=120)
    assert "continues after step 40" in out and status(folder / "runs/mix")["step"] == 42, err


def inspect(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/prepare_data.py", "inspect", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_inspect_shows_a_data_set_and_refuses_what_is_none(data_dir: Path, tmp_path: Path) -> None:
    done = inspect(str(data_dir))
    assert done.returncode == 0, done.stderr
    assert "bytes" in done.stdout and "256 of its 256 tokens are in the loss" in done.stdout
    nothing = inspect(str(tmp_path))
    assert nothing.returncode == 2 and "no dataset.json in it" in nothing.stderr
