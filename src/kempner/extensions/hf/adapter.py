"""LoRA adapters of a run: the weights they belong to, and adapter and weights as files.

An adapter is exported in peft's form, or merged into the weights of its base.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kempner.checkpoint import history
from kempner.config.option import ConfigError
from kempner.extensions.hf.families import config_json
from kempner.extensions.hf.source import (
    CONFIG_FILE,
    HF_FOLDER,
    WeightsSource,
    held_weights,
    read_hf_config,
    run_of,
)
from kempner.extensions.hf.stored import Stored
from kempner.extensions.hf.tensors import tensor_names
from kempner.jobs.system.directories import refuse_others
from kempner.model.config import ModelConfig
from kempner.model.shapes import tensor_shapes

FINGERPRINT_SAMPLES, FINGERPRINT_BYTES = (
    64,
    1 << 16,
)  # pieces of a file that go into a fingerprint, and their bytes

Lora = dict[str, Any]  # "lora" under "fixed" in a manifest: the [lora] section, and "base"


def weights_fingerprint(source: WeightsSource) -> str:
    """Return 16 hex digits that identify weights: from the manifest of a checkpoint, or from
    samples of a directory's files."""
    digest = hashlib.sha256()
    if source.is_checkpoint:
        # With the time: a run that went back saves the same step a second time.
        manifest = history.read_manifest(source.path)
        digest.update(json.dumps([manifest[key] for key in ("run", "step", "time")]).encode())
        return digest.hexdigest()[:16]
    with Stored(source.path) as stored:  # its index may name the files in any way
        paths = sorted({place.path for place in stored.places.values()})
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}".encode())
            # Only samples: reading all of a large model takes minutes.
            for at in range(0, size, max(FINGERPRINT_BYTES, size // FINGERPRINT_SAMPLES)):
                file.seek(at)
                digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()[:16]


def weights_identity(name: str) -> str:
    """Return the weights_fingerprint() of the weights that `name` refers to now."""
    with held_weights(name) as source:
        return weights_fingerprint(source)


@contextlib.contextmanager
def base_of(manifest: dict[str, Any]) -> Iterator[WeightsSource]:
    """Open the base weights of a checkpoint's adapter. Raises ConfigError if gone or changed."""
    name = manifest["fixed"]["model"]["init_from"]
    with held_weights(name) as source:
        if weights_fingerprint(source) != manifest["fixed"]["lora"]["base"]:
            raise ConfigError(
                f"{name}: not the weights that the adapter was trained on; restore those"
            )
        yield source


@contextlib.contextmanager
def merged_adapter(checkpoint: Path, manifest: dict[str, Any]) -> Iterator[Callable[[str], Any]]:
    """Yield a function from a tensor's name to its base weights plus alpha / rank B A, fp32. The
    base is rounded to bf16 first, as in training."""
    # Not at the top: checking a configuration needs weights_identity() without torch.
    import torch

    from kempner.checkpoint.format.reader import read_tensors
    from kempner.extensions.hf.load import ReadJob, fill_tensors
    from kempner.parallel.lora import FROZEN

    lora, cfg = manifest["fixed"]["lora"], ModelConfig(**manifest["fixed"]["model"])
    adapters, shapes = set(adapter_names(cfg, lora)), tensor_shapes(cfg)
    with base_of(manifest) as source, contextlib.ExitStack() as files:
        if not source.is_checkpoint:
            stored = files.enter_context(Stored(source.path, "pt"))
            names = tensor_names(cfg, read_hf_config(source.path)["model_type"])

        def read(name: str) -> Any:
            if source.is_checkpoint:
                weight = read_tensors(source.path, [key := f"model.{name}"])[key]
            else:
                weight = torch.empty(shapes[name])
                box = tuple((0, size) for size in shapes[name])
                fill_tensors(stored, [ReadJob(weight, names[name], box)])
            weight = weight.to(FROZEN).float()
            prefix = name.removesuffix("weight")
            if prefix in adapters:
                keys = [f"model.{prefix}lora_{x}" for x in "ba"]
                # In the order of the keys: B is [out, rank], A is [rank, in].
                b, a = read_tensors(checkpoint, keys).values()
                weight += lora["alpha"] / lora["rank"] * (b @ a)
            return weight

        yield read


def adapter_names(cfg: ModelConfig, lora: Lora) -> list[str]:
    """List the prefixes of weight, lora_a and lora_b: `blocks.0.attention.wq.` and so on."""
    # w1 to w3 are the feed-forward layer's, wq to wo attention's.
    matrices = [
        f"{'ffn' if '1' <= name[1] <= '3' else 'attention'}.{name}." for name in lora["targets"]
    ]
    return [f"blocks.{i}.{matrix}" for i in range(cfg.n_layers) for matrix in matrices]


def export_adapter(checkpoint: Path, out: Path) -> Path:
    """Write the adapter of a checkpoint in peft's form to a new or empty directory; returns it.

    Raises ConfigError, Damaged, OSError.
    """
    from safetensors.torch import save_file

    from kempner.checkpoint.format.reader import read_tensors

    manifest = history.read_manifest(checkpoint)
    lora = lora_of(checkpoint, manifest)
    cfg = ModelConfig(**manifest["fixed"]["model"])
    carried = run_of(checkpoint) / HF_FOLDER
    config = read_hf_config(carried) if (carried / CONFIG_FILE).is_file() else None
    # Only the family matters: an adapter has no config.json but names its base.
    names = tensor_names(cfg, config_json(cfg, config, "float32", None)["model_type"])
    tensors, modules = {}, set()
    for prefix in adapter_names(cfg, lora):
        hf_name = names[f"{prefix}weight"].removesuffix(".weight")
        # peft matches targets by the end of a name: q_proj is that of every layer.
        modules.add(hf_name.rpartition(".")[2])
        keys = [f"model.{prefix}lora_{x}" for x in "ab"]
        for x, tensor in zip("AB", read_tensors(checkpoint, keys).values(), strict=True):
            # peft's names: base_model is its LoraModel, whose model is the whole model.
            tensors[f"base_model.model.{hf_name}.lora_{x}.weight"] = tensor
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cfg.init_from,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    refuse_others(out, "DIR", (), "give another directory, or remove it")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    (out / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    return out


def lora_of(checkpoint: Path, manifest: dict[str, Any]) -> Lora:
    """Return the adapter's settings. Raises ConfigError if the checkpoint holds a full model."""
    if (lora := manifest["fixed"].get("lora")) is None:
        raise ConfigError(f"{checkpoint}: is a whole model, not an adapter; leave out --adapter")
    return lora  # type: ignore[no-any-return]
