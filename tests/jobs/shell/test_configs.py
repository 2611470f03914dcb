"""Each file of configs/ is taken by the script that it is for, with the nodes that it is for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kempner.data.text.tokenizer import train_bpe
from tests.cluster import ROOT, SCRIPTS
from tests.conftest import clean_env
from tests.hf_models import make

CONFIGS = sorted(  # verified/ has figures: tests/extensions/unit/test_verified.py
    p.relative_to(ROOT) for p in ROOT.glob("configs/**/*.toml") if p.parent.name != "verified"
)
# What a user brings: the one thing that such a file may miss.
BROUGHT = {
    "configs/rl/7b.toml": "model.init_from: models/llama: no such directory",
    "configs/rl/math.toml": "model.init_from: models/llama: no such directory",
    "configs/train/sft-moe.toml": "model.init_from: models/qwen3-moe: no such directory",
    "configs/train/sft.toml": "model.init_from: models/llama: no such directory",
    "configs/train/dpo.toml": "model.init_from: runs/sft@1000: no such directory",
    "configs/sweeps/sizes.toml": "data/corpus: no such directory",
}


def command_of(config: Path) -> list[str]:
    if config.parts[1] == "sweeps":
        return [sys.executable, str(ROOT / "scripts/sweep.py"), str(config), "plan"]
    script, words = "multinode.sh", ["--data.dataset_path=fake:"]
    if config.parts[1] == "rl":
        script, words = "rl.sh", []
    elif "lowcomm" in config.parts:
        script = "replicas.sh"
    if config.parts[1] == "scale":
        nodes = re.search(r"-(\d+)nodes?", config.stem)
        words += [f"--nodes={nodes[1] if nodes else 4}", "--gpus-per-node=8"]
    return ["bash", str(SCRIPTS / script), str(config), *words, "--dry-run"]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_configuration_of_the_kit(config: Path) -> None:
    env = clean_env() | {"KEMPNER_PYTHON": sys.executable}
    done = subprocess.run(command_of(config), cwd=ROOT, env=env, capture_output=True, text=True)
    missing = BROUGHT.get(str(config))
    if missing:
        assert done.returncode == 2 and missing in done.stderr
        assert len(re.findall(r"no such directory;|no such directory, ", done.stderr)) == 1
    else:
        assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


WITH_A_MODEL = {  # the family that the test brings, and what is too long for a model so small
    "configs/train/sft-moe.toml": (
        "qwen3_moe",
        ["--data.dataset_path=fake:", "--distributed.ep=2"],
    ),
    "configs/rl/math.toml": ("qwen2", ["--rl.sampling.max_tokens=32"]),
}


@pytest.mark.parametrize("config", WITH_A_MODEL)
def test_a_configuration_with_what_a_user_brings(config: str, tmp_path: Path) -> None:
    family, words = WITH_A_MODEL[config]
    make(family, tmp_path / "model")
    (tmp_path / "model/tokenizer.json").write_bytes(train_bpe(["a few words"] * 3, 257))
    (tmp_path / "data").mkdir()
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(20)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "data/math.jsonl").write_text(lines)
    script, nodes = ("rl.sh", 4) if "rl" in config else ("multinode.sh", 2)
    words = [*words, "--model.init_from=model", "--train.seq_len=64", "--dry-run"]
    command = ["bash", str(SCRIPTS / script), str(ROOT / config), *words]
    done = subprocess.run(
        [*command, f"--nodes={nodes}", "--gpus-per-node=8"],
        cwd=tmp_path,
        env=clean_env() | {"KEMPNER_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
