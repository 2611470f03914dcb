"""The hub: download, upload, offline. The server is ours and speaks as much as is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from kempner.data.text.tokenizer import train_bpe
from kempner.extensions.hf.source import find_weights
from tests import zygote
from tests.conftest import ROOT, Train, clean_env
from tests.hf_models import load_quietly, make, ours, theirs

COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """One model, OWNER/NAME: the files of a directory."""

    files: Path
    breaks = 0  # so many downloads of weights break off in the middle
    asked: list[str]
    pushed: dict[str, bytes]

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        path = urllib.parse.unquote(self.path)
        if "/resolve/" in path:
            return self.send_file(self.files / path.partition("/resolve/")[2].partition("/")[2])
        files = sorted(file for file in self.files.rglob("*") if file.is_file())
        if "/tree/" in self.path:
            return self.answer([self.entry(file) for file in files])
        names = [{"rfilename": str(file.relative_to(self.files))} for file in files]
        about = {"id": "me/tiny", "sha": COMMIT, "siblings": names, "private": False}
        self.answer(about | {"modelId": "me/tiny", "tags": [], "downloads": 0, "likes": 0})

    def entry(self, file: Path) -> dict[str, object]:
        size, oid = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
        lfs = {"oid": oid, "size": size, "pointerSize": 100}
        more = {"lfs": lfs} if file.suffix == ".safetensors" else {}
        return {
            "type": "file",
            "path": str(file.relative_to(self.files)),
            "size": size,
            "oid": oid[:40],
            **more,
        }

    def send_file(self, file: Path) -> None:
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if file.suffix == ".safetensors" and Hub.breaks:
            Hub.breaks -= 1
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.asked.append(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            self.answer({"url": "https://huggingface.co/me/tiny"})
        elif "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    value = entry["value"]
                    self.pushed[value["path"]] = base64.b64decode(value["content"])
            url = f"https://huggingface.co/me/tiny/commit/{COMMIT}"
            self.answer({"commitUrl": url, "commitOid": COMMIT, "success": True})
        else:
            self.answer({})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The server's address and an empty cache, as environment of a user's command."""
    Hub.files, Hub.asked, Hub.pushed, Hub.breaks = tmp_path / "hub", [], {}, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "secret",
    }
    server.shutdown()
    server.server_close()


def convert(
    *words: object, code: int = 0, program: str = "convert", **env: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / f"scripts/{program}.py"), *map(str, words)]
    done = zygote.run(
        command, cwd=ROOT, env=clean_env(**env), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "secret" not in done.stdout + done.stderr
    return done


def test_fetched_where_there_is_a_network_and_used_where_there_is_none(
    hub: dict[str, str], data_dir: Path, tmp_path: Path
) -> None:
    """The connection breaks, the download ends well; then the model is found without a request."""
    model = make("smollm", Hub.files)
    (Hub.files / "consolidated.safetensors").write_bytes(b"the same weights once more")
    config = f'model.init_from = "me/tiny"\ntrain.seq_len = 64\ndata.dataset_path = "{data_dir}"\n'
    (tmp_path / "mine.toml").write_text(config)
    Hub.breaks = 1
    done = convert("prefetch", tmp_path / "mine.toml", "--train.max_steps=5", **hub)
    path = Path(done.stdout.splitlines()[-1].removeprefix("model: "))
    assert Hub.breaks == 0
    assert {file.name for file in path.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip
    Hub.asked.clear()
    assert "Llama" in convert("check", path, **hub).stdout
    offline = hub | {"HF_HUB_OFFLINE": "1"}
    convert("import", "me/tiny@main", tmp_path / "run", **offline)
    assert Hub.asked == []
    assert (ours(tmp_path / "run") - theirs(model)).abs().max() < 1e-5


def test_a_data_set_of_the_hub(hub: dict[str, str], train: Train, tmp_path: Path) -> None:
    """Fetched by the configuration that names it, then read from the cache, with no request; a
    pattern of which nothing is there is refused, by the check before srun too."""
    (Hub.files / "data").mkdir(parents=True)
    for number in range(2):
        rows = [{"input_ids": [*range(number * 100, number * 100 + 90)]} for _ in range(30)]
        lines = "\n".join(map(json.dumps, rows))
        (Hub.files / f"data/part-{number}.jsonl").write_text(lines)
    (Hub.files / "data/other.bin").write_bytes(b"of no use here")
    config = tmp_path / "mine.toml"
    config.write_text(
        "[[data.sources]]\npath = 'hf://datasets/me/tiny@main/data/*.jsonl'\n[eval]\ninterval = 0\n"
    )
    offline = hub | {"HF_HUB_OFFLINE": "1"}
    words = [str(config), "--data.dataset_path=", "--train.max_steps=3"]
    done = train(tmp_path / "run", *words, "--check", code=2, **offline)
    assert "not in the cache of the hub" in done.stderr and "prefetch CONFIG" in done.stderr
    done = convert("prefetch", config, **hub)
    (files,) = re.findall("^data: (.*)$", done.stdout, re.MULTILINE)
    assert {file.name for file in Path(files).parent.iterdir()} == {"part-0.jsonl", "part-1.jsonl"}
    Hub.asked.clear()
    train(tmp_path / "run", *words, **offline)
    assert Hub.asked == []
    none = "hf://datasets/me/tiny/no/*.parquet"
    done = convert("prefetch", none, code=2, **hub)
    assert f"{none}: it has no such files" in done.stderr


def test_a_tokenizer_without_the_weights_of_its_model(hub: dict[str, str], tmp_path: Path) -> None:
    """To train from scratch: 16 GB came with the tokenizer of an 8B model."""
    make("smollm", Hub.files)
    text = (ROOT / "docs/reference/slurm.md").read_text()
    (Hub.files / "tokenizer.json").write_bytes(train_bpe([text], 260))
    (tmp_path / "text.md").write_text(text)
    words = [tmp_path / "text.md", "--tokenizer", "me/tiny@main", "--out"]
    offline = hub | {"HF_HUB_OFFLINE": "1"}
    said = convert(*words, tmp_path / "a", program="prepare_data", code=2, **offline).stderr
    assert "scripts/convert.py prefetch --tokenizer-only me/tiny@main" in said
    done = convert("prefetch", "--tokenizer-only", "me/tiny", **hub)
    path = Path(done.stdout.removeprefix("tokenizer: ").strip())
    assert "tokenizer.json" in {file.name for file in path.iterdir()}
    convert(*words, tmp_path / "a", program="prepare_data", **offline)
    about = json.loads((tmp_path / "a/dataset.json").read_text())
    assert about["tokenizer"]["name"] == "me/tiny@main"
    shutil.rmtree(hub["HF_HOME"])
    convert(*words, tmp_path / "b", program="prepare_data", **hub)  # on a login node
    assert json.loads((tmp_path / "b/dataset.json").read_text())["tokenizer"] == about["tokenizer"]
    assert not [request for request in Hub.asked if "safetensors" in request]


def test_what_is_not_there_is_said_with_the_fix(hub: dict[str, str], tmp_path: Path) -> None:
    done = convert("import", "me/tiny", tmp_path / "run", code=2, HF_HUB_OFFLINE="1", **hub)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "me/tiny: not in the cache of the hub" in done.stderr
    assert "scripts/convert.py prefetch me/tiny" in done.stderr


def test_the_trainer_asks_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append((repo, local_files_only))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    find_weights("me/tiny")
    find_weights("me/tiny@v1", download=True)
    assert asked == [("me/tiny", True), ("me/tiny", False)]


def test_pushed(hub: dict[str, str], tmp_path: Path) -> None:
    make("smollm", tmp_path / "model")
    done = convert("push", tmp_path / "model", "me/tiny", **hub)
    assert COMMIT in done.stdout
    assert Hub.pushed.keys() == {file.name for file in (tmp_path / "model").iterdir()}
    for name, content in Hub.pushed.items():
        assert content == (tmp_path / "model" / name).read_bytes()
    done = convert("push", tmp_path / "model", "me/tiny", code=2, HF_HUB_OFFLINE="1", **hub)
    assert "HF_HUB_OFFLINE is set; unset it to upload" in done.stderr


def test_the_commands_of_the_document(
    hub: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied SmolLM with a real tokenizer, from the first command to the last."""
    document = (ROOT / "docs/extensions/hugging-face.md").read_text()
    make("smollm", tmp_path / "models/llama")
    (tmp_path / "corpus").mkdir()
    text = (ROOT / "docs/reference/slurm.md").read_text()
    (tmp_path / "corpus/text.md").write_text(text)
    (tmp_path / "models/llama/tokenizer.json").write_bytes(train_bpe([text], 260))
    shutil.copytree(tmp_path / "models/llama", Hub.files)
    (config,) = re.findall(r"```toml\n(.*?)```", document, re.DOTALL)
    (tmp_path / "mine.toml").write_text(config)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    commands = re.findall(r"^    ((?:python|export) .*)$", document, re.MULTILINE)
    assert len(commands) == 9
    script = "\n".join(["set -e", f'PATH="{Path(sys.executable).parent}:$PATH"', *commands])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=clean_env(**hub),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    back = load_quietly(tmp_path / "models/mine")
    assert back.dtype == torch.bfloat16
    torch.testing.assert_close(theirs(back.float()), ours(tmp_path / "runs/mine"), atol=0.1, rtol=0)
    assert (tmp_path / "runs/llama/checkpoints/latest").exists()
    assert {"tokenizer.json", "model.safetensors", "config.json"} <= Hub.pushed.keys()
