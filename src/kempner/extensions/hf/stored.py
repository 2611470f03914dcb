"""The tensors of a directory in Hugging Face format: *.safetensors, one file or several with an
index, read lazily. No torch: the tensors are compared with the model's needs beforehand.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from kempner.checkpoint import history
from kempner.config.option import ConfigError
from kempner.extensions.hf.source import WeightsSource, read_hf_config, run_of, vocabulary_size
from kempner.extensions.hf.tensors import stored_parts, tensor_names
from kempner.jobs.system.front_door import how_to_run
from kempner.model.config import ModelConfig
from kempner.model.shapes import tensor_shapes

SINGLE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
KNOWN_DTYPES = {"F64", "F32", "F16", "BF16"}
DOWNLOAD_AGAIN = "download or copy it again"
COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # from config.json
SHOWN_TENSORS = 5  # names in a message


class TensorPlace(NamedTuple):
    """Offset of a tensor's elements: a file and a byte in it."""

    path: Path
    at: int


class Stored:
    """The open files of a model. `slice(NAME)[a:b]` reads only these rows."""

    def __init__(self, directory: Path, framework: str = "np") -> None:
        """`framework`: type of the slices, "np" or "pt". Raises ConfigError if a file is missing,
        truncated, or of another format."""
        self.directory = directory
        self._open = contextlib.ExitStack()
        self._files: dict[str, Any] = {}  # by tensor
        self.places: dict[str, TensorPlace] = {}
        index = self._listed()
        with contextlib.ExitStack() as files:
            for file in sorted(set(index.values())) if index else [SINGLE]:
                handle = files.enter_context(_open(directory / file, framework))
                for name in handle.keys():  # noqa: SIM118  # no dict
                    # Of a tensor in two files, either might be read.
                    if index and index.get(name) != file:
                        raise ConfigError(
                            f"{directory / file}: {INDEX_FILE} does not list {name} for this file; "
                            f"{DOWNLOAD_AGAIN}"
                        )
                    self._files[name] = handle
                self.places |= _places(directory / file)
            if absent := sorted(set(index) - set(self._files)):
                raise ConfigError(f"{directory / INDEX_FILE}: {_some(absent)} in none of its files")
            # All are sound: keep them open.
            self._open = files.pop_all()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._open.close()

    def _listed(self) -> dict[str, str]:
        """Map tensors to files, from the index; {} without one."""
        index = self.directory / INDEX_FILE
        # Takes precedence over the index, as in transformers.
        if (self.directory / SINGLE).is_file():
            return {}
        if not index.is_file():
            pickles = list(self.directory.glob("*.bin")) + list(self.directory.glob("*.pth"))
            why = "; its weights are pickles, which can run code" if pickles else ""
            raise ConfigError(
                f"{self.directory}: no {SINGLE} or {INDEX_FILE} in it{why}; save the model with "
                "transformers' save_pretrained"
            )
        try:
            files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            # An index may be untrusted: it must not lead out of the directory.
            if all(Path(file).name == file for file in files.values()):
                return files
            raise ValueError("weight_map names a file in another directory")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index}: not an index ({error}); {DOWNLOAD_AGAIN}") from None

    def slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype as in the header, such as BF16."""
        return str(self.slice(name).get_dtype())

    def problems(self, cfg: ModelConfig, kind: str) -> list[str]:
        """List differences between these tensors and the model's: every tensor of the model must be
        present, in its shape, and no other."""
        shapes = tensor_shapes(cfg)
        names = tensor_names(cfg, kind)
        expected_shapes: dict[str, tuple[int, ...]] = {}
        for own_name, hf_name in names.items():
            expected_shapes |= stored_parts(hf_name, shapes[own_name])
        problems = []
        if missing := [name for name in expected_shapes if name not in self._files]:
            problems.append(f"{_some(missing)} missing, which the model needs")
        extra = [name for name in self._files if name not in expected_shapes]
        extra = [name for name in extra if not COMPUTED.fullmatch(name)]
        if cfg.tie_embeddings and "lm_head.weight" in extra and self._tied_is_equal():
            extra.remove("lm_head.weight")
        if extra:
            problems.append(f"{_some(extra)} not part of the model; nothing is left out silently")
        wrong = []
        for name, expected in expected_shapes.items():
            if name in self._files and (shape := self.shape(name)) != expected:
                wrong.append(f"{name} has shape {[*shape]}, the model needs {[*expected]}")
            if name in self._files and (dtype := self.dtype(name)) not in KNOWN_DTYPES:
                wrong.append(f"{name} is {dtype}; only {', '.join(sorted(KNOWN_DTYPES))} are read")
        problems += wrong[:SHOWN_TENSORS]
        if more := wrong[SHOWN_TENSORS:]:
            problems.append(f"{len(more)} more wrong shapes or dtypes")
        return [f"{self.directory}: {line}" for line in problems]

    def _tied_is_equal(self) -> bool:
        """Return whether the output layer, which a tied model lacks, equals the embedding."""
        head, embed = "lm_head.weight", "model.embed_tokens.weight"
        if embed not in self._files or self.shape(head) != self.shape(embed):
            return False
        # Not by numpy, which has no bfloat16.
        with Stored(self.directory, "pt") as same:
            # In pieces: both matrices of a large vocabulary take gigabytes.
            step = 4096
            return all(
                bool((same.slice(head)[at : at + step] == same.slice(embed)[at : at + step]).all())
                for at in range(0, self.shape(head)[0], step)
            )


def check_hf_directory(directory: Path, cfg: ModelConfig) -> None:
    """Raise ConfigError with all reasons why a directory does not match this model: its tensors and
    its tokenizer. Reads headers only."""
    with Stored(directory) as stored:
        problems = stored.problems(cfg, read_hf_config(directory)["model_type"])
    if (size := vocabulary_size(directory)) > cfg.vocab_size:
        problems.append(
            f"{directory}: the ids of its tokenizer go up to {size - 1}, but vocab_size is "
            f"{cfg.vocab_size}; the tokenizer belongs to another model"
        )
    if problems:
        raise ConfigError(problems)


def check_source(source: WeightsSource, cfg: ModelConfig) -> None:
    """Check any source in the same way; a checkpoint's tensors were checked when it was written."""
    if not source.is_checkpoint:
        check_hf_directory(source.path, cfg)
    elif "lora" in history.read_manifest(source.path)["fixed"]:
        raise ConfigError(
            f"{source.path}: holds only adapters; merge them with `{how_to_run('convert.py')} "
            f"export {run_of(source.path)} DIR`, then start from DIR"
        )


def _open(path: Path, framework: str) -> Any:
    import safetensors

    try:
        return safetensors.safe_open(path, framework=framework)
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; {DOWNLOAD_AGAIN}") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path}: truncated or not a safetensors file ({error}); {DOWNLOAD_AGAIN}"
        ) from None


def _places(path: Path) -> dict[str, TensorPlace]:
    """Locate the tensors from the header of a file that the library has checked: 8 bytes of
    length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: TensorPlace(path, 8 + length + x["data_offsets"][0]) for name, x in header.items()
    }


def _some(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN_TENSORS} more" if len(names) > SHOWN_TENSORS else ""
    return f"{', '.join(names[:SHOWN_TENSORS])}{more} {'is' if len(names) == 1 else 'are'}"
