"""Load a model and its tokenizer into this process: from a run, a checkpoint, or a directory in
Hugging Face format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kempner.checkpoint import history
from kempner.checkpoint.history import Damaged
from kempner.config import toml
from kempner.config.option import ConfigError
from kempner.data.sidecar import BYTES_TOKENIZER, SIDECAR, Sidecar
from kempner.data.source import DataError
from kempner.data.text.chat_template import ChatMessage, ChatTemplate, read_tokenizer_config
from kempner.data.text.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    import_data_package,
    load_tokenizer,
)
from kempner.data.text.vocabulary import read_vocabulary, vocabulary_fingerprint
from kempner.extensions.hf.source import (
    HF_FOLDER,
    TOKENIZER_FILE,
    WeightsSource,
    end_tokens,
    held_weights,
    is_of_bytes,
    run_of,
)
from kempner.model.config import ModelConfig
from kempner.parallel.config import LoraConfig

if TYPE_CHECKING:
    import torch

    from kempner.model.decoder import Decoder


class Words(NamedTuple):
    """Tokenizer and special tokens of a model."""

    tokenizer: Tokenizer
    begin: list[int]  # tokens that begin a text
    ends: set[int]  # tokens that end one
    folder: Path  # with the tokenizer's files

    def prompt(self, text: str) -> list[int]:
        """Encode a text that the model continues."""
        # A model without such tokens has at least one that ends a text.
        return [*self.begin, *self.tokenizer.encode_prompt(text)] or [self.tokenizer.eod]

    def fingerprint(self) -> str:
        """Return a fingerprint of the meaning of the token ids. Raises ConfigError."""
        if isinstance(self.tokenizer, FileTokenizer):
            return vocabulary_fingerprint(read_vocabulary(self.folder / TOKENIZER_FILE))
        return BYTES_TOKENIZER["kind"]

    def chat_template(self) -> ChatTemplate:
        """Return the tokenizer's own template. Raises ConfigError without one."""
        # Cached per day: a template may write the date, and an engine runs for weeks.
        return _read_template(self.folder, date.today())

    def chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Encode a conversation, up to where the next answer begins, by the tokenizer's own
        template. Raises ConfigError without one, ValueError if it refuses the conversation."""
        text = self.chat_template().render(messages, None, True)
        assert isinstance(self.tokenizer, FileTokenizer)  # bytes have no tokenizer_config.json
        return self.tokenizer.encode_prompt(text)


# Parsing it anew for each conversation would stall all texts of an engine.
@lru_cache(maxsize=1)
def _read_template(folder: Path, today: date) -> ChatTemplate:
    try:
        config = read_tokenizer_config(folder)
    except DataError:
        raise ConfigError(
            f"{folder}: has no chat template, so the model was not trained on conversations: let "
            "it continue a text instead (generate.py without --chat, or /v1/completions)"
        ) from None
    return ChatTemplate(config, today)


class Loaded(NamedTuple):
    model: Decoder
    words: Words
    window: int  # tokens that the model has been trained to see
    about: str  # for messages


def model_shape(source: WeightsSource) -> tuple[ModelConfig, int]:
    """Return the shape of a model, and the number of tokens it was trained to see. Raises
    ConfigError."""
    cfg = ModelConfig(**source.model())
    if not source.is_checkpoint:
        return cfg, cfg.max_seq_len
    fixed = history.read_manifest(source.path)["fixed"]
    return cfg, min(fixed["train"]["seq_len"], cfg.max_seq_len)


def load_model_and_tokenizer(
    name: str, device: str, fill: Callable[[Decoder], object] | None = None
) -> Loaded:
    """Load a model. `name`: RUN[@STEP], a checkpoint, a directory in Hugging Face format, or an id
    of the hub. `device`: auto, cpu or cuda. `fill`: gives a directory without weights its values.

    The weights are bf16 on a GPU and fp32 on a CPU. Retention leaves a checkpoint alone while it is
    read. Disables cuDNN's attention in this process: it compiles a plan for each new shape, up to
    half a second for every text length. Raises ConfigError, Damaged or OSError, with a remedy.
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    with held_weights(name) as source:
        place = inference_device(device)
        if not source.is_checkpoint:
            cfg, window = model_shape(source)
            words = words_of_directory(source.path)
            model = read_base(source, cfg, place, fill=fill)
            return Loaded(model, words, window, str(source.path))
        manifest = history.read_manifest(source.path)
        words = words_of_run(Path(name), source.path)
        model = read_checkpoint(source, manifest, place)
        window = model_shape(source)[1]
    return Loaded(model, words, window, f"step {manifest['step']:,} of {source.path}")


# --- The tokenizer ---


def words_of_run(source: Path, checkpoint: Path) -> Words:
    """Return the words of the run, or of the data that it was made from. A document begins with its
    BOS, or else with the end of the previous one; a conversation has no predecessor and begins as
    its tokenizer begins a text, as in an export."""
    config = toml.loads((checkpoint / "config.toml").read_text())
    paths = (config["run"]["dir"], config["data"]["dataset_path"])
    tried = dict.fromkeys(
        (source, checkpoint.parent.parent, *(Path(path).expanduser() for path in paths if path))
    )
    carried = run_of(checkpoint) / HF_FOLDER
    for directory in tried:
        if (directory / SIDECAR).is_file():
            return _words_of_data(directory, carried)
    if (carried / TOKENIZER_FILE).is_file():
        return words_of_directory(carried)
    raise ConfigError(
        f"{checkpoint}: its tokenizer is in none of {', '.join(map(str, tried))}; "
        f"copy {SIDECAR} (and tokenizer.json) from the data into the first of them"
    )


def words_in_run(run: Path) -> Words | None:
    """Return the words whose files a run directory itself has; None if it has none."""
    carried = run / HF_FOLDER
    if (run / SIDECAR).is_file():
        return _words_of_data(run, carried)
    return words_of_directory(carried) if (carried / TOKENIZER_FILE).is_file() else None


def _words_of_data(directory: Path, carried: Path) -> Words:
    """`carried`: of the model that the run started from."""
    tokenizer, kind = load_tokenizer(directory), Sidecar.load(directory / SIDECAR).kind
    ends = [*end_tokens(carried), tokenizer.eod]
    if kind == "text":
        begin = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        return Words(tokenizer, [begin], set(ends), directory)
    tokenizer = FileTokenizer(directory / TOKENIZER_FILE, eod=ends[0])
    return Words(tokenizer, own_beginning(directory), set(ends), directory)


def words_of_directory(directory: Path) -> Words:
    """Return the words of a Hugging Face directory, whose tokenizer decides how texts begin."""
    ends = end_tokens(directory)
    if is_of_bytes(directory):
        return Words(ByteTokenizer(), [ByteTokenizer.eod], set(ends), directory)
    tokenizer = FileTokenizer(directory / TOKENIZER_FILE, eod=ends[0] if ends else None)
    return Words(tokenizer, own_beginning(directory), {tokenizer.eod, *ends}, directory)


def own_beginning(directory: Path) -> list[int]:
    """Return the tokens that a tokenizer itself puts before each text, such as a BOS."""
    file = str(directory / TOKENIZER_FILE)
    # Its post-processor adds them to any text; an empty text has no others.
    return list(import_data_package("tokenizers").Tokenizer.from_file(file).encode("").ids)


# --- The weights ---


def inference_device(kind: str) -> torch.device:
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: no GPU is visible; give --device cpu")
    return torch.device("cuda" if kind != "cpu" and torch.cuda.is_available() else "cpu")


def read_checkpoint(
    source: WeightsSource, manifest: dict[str, Any], device: torch.device
) -> Decoder:
    """Read the model of a checkpoint; one with adapters also gets its base. Raises
    ConfigError."""
    from kempner.checkpoint.format.reader import read_into
    from kempner.extensions.hf.adapter import base_of
    from kempner.parallel.config import is_adapter

    cfg = ModelConfig(**manifest["fixed"]["model"])
    if (lora := manifest["fixed"].get("lora")) is None:
        return read_base(source, cfg, device)
    options = LoraConfig(lora["rank"], lora["alpha"], tuple(lora["targets"]))
    with base_of(manifest) as base:
        model = read_base(base, cfg, device, options)
    parameters = model.named_parameters()
    read_into(source.path, {f"model.{name}": p for name, p in parameters if is_adapter(name)})
    return model


def read_base(
    source: WeightsSource,
    cfg: ModelConfig,
    device: torch.device,
    lora: LoraConfig | None = None,
    fill: Callable[[Decoder], object] | None = None,
) -> Decoder:
    """Read the model of a source, for inference; with `lora`, its adapters have no values yet.
    `fill`: see load_model_and_tokenizer(). Raises ConfigError."""
    import torch

    from kempner.extensions.hf.load import load_weights
    from kempner.model.decoder import Decoder, rope_table
    from kempner.parallel.build import compute_dtype
    from kempner.parallel.lora import add_adapters

    dtype = compute_dtype("auto", device.type)
    # On the meta device, to avoid allocating weights in fp32 first.
    with torch.device("meta"):
        model = Decoder(cfg).cast(dtype)
    # Before the adapters: rounds the base to bf16, as training with adapters does.
    if lora is not None:
        add_adapters(model, lora)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    try:
        fill(model) if fill else load_weights(model, cfg, source)
    except Damaged as error:
        raise ConfigError(f"{error}; name an older checkpoint") from None
    # to_empty() leaves it undefined, and no file of weights holds it.
    model.rope = rope_table(cfg).to(device)
    return model.cast(dtype)
