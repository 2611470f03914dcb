"""A small model in Hugging Face format, made without transformers, and requests to its engine."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kempner.data.text.tokenizer import train_bpe
from kempner.extensions.hf.tensors import tensor_names
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "vocab_size": 260, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 256,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def make_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    cfg = ModelConfig(
        vocab_size=config["vocab_size"], dim=config["hidden_size"], n_layers=2, n_heads=4,
        n_kv_heads=2, ffn_dim=80,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    names = tensor_names(cfg, "llama")
    tensors = {
        names[name]: torch.randn(p.shape, generator=generator) * 0.4 + (p.dim() == 1) * 0.5
        for name, p in Decoder(cfg).named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(train_bpe(["a few words, a few more"], 259))
    about = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


class Client:
    """Speaks to one engine."""

    def __init__(self, port: int, token: str = "", host: str = "127.0.0.1") -> None:
        self.port, self.token, self.host = port, token, host

    def open(self, path: str, body: Any = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connection.request("GET" if body is None else "POST", path, data, headers)
        return connection

    def send(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        return self.open(path, body).getresponse()

    def ask(self, path: str, body: Any = None, code: int = 200) -> Any:
        with self.send(path, body) as answer:
            text = answer.read().decode()
        assert answer.status == code, text
        return json.loads(text) if text.startswith("{") else text

    def complete(self, prompt: Any, **more: Any) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = self.ask("/v1/completions", {"prompt": prompt, **more})[
            "choices"
        ]
        return choices

    def figures(self) -> dict[str, float]:
        lines = self.ask("/metrics").splitlines()
        return {
            name.removeprefix("kempner_"): float(value)
            for name, value in (line.split() for line in lines if line[0] != "#")
        }

    def busy(self) -> float:
        """Texts in work, and those that wait."""
        figures = self.figures()
        return figures["requests_running"] + figures["requests_waiting"]
