"""The library behind scripts/train.py: see ARCHITECTURE.md for the rooms and who may import
whom."""

from __future__ import annotations

import sys

__version__ = "0.2.0"  # pyproject.toml reads it; CHANGELOG.md, CITATION.cff and the tag repeat it

TYPE_CHECKING = False
if TYPE_CHECKING:  # `import kempner` must stay cheap: no torch before it is needed
    from importlib.machinery import ModuleSpec
    from os import PathLike

    from kempner.data.text.tokenizer import Tokenizer
    from kempner.model.decoder import Decoder


def load_model(source: str | PathLike[str], device: str = "auto") -> tuple[Decoder, Tokenizer]:
    """Load a plain nn.Module and its tokenizer from a run (RUN or RUN@STEP), a checkpoint, or a
    directory in Hugging Face format.

        model, tokenizer = load_model("runs/quickstart")
        logits = model(torch.tensor([tokenizer.encode("def ")]))  # [1, T, V]

    The model is in evaluation mode, bf16 on a GPU and fp32 on a CPU; `device`: auto, cpu or cuda.
    """
    from kempner.extensions.generate.load import load_model_and_tokenizer

    loaded = load_model_and_tokenizer(str(source), device)
    return loaded.model, loaded.words.tokenizer


MOVED = {  # module -> its name today
    "kempner.slurm": "kempner.jobs.slurm",
    "kempner.trackers": "kempner.jobs.trackers",
    "kempner.history": "kempner.jobs.records",
    "kempner.checkpoint.reader": "kempner.checkpoint.format.reader",
    "kempner.checkpoint.metadata": "kempner.checkpoint.format.metadata",
    "kempner.lowcomm": "kempner.extensions.lowcomm",
    "kempner.rl": "kempner.extensions.rl",
}


class MovedModules:
    """A finder of the modules that had other names before version 0.2.0: see kempner/moved.py. It
    must come before the finder of files, which would load what is below a moved package a second
    time."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(tuple(MOVED)):
            return None
        from kempner.moved import find_moved

        return find_moved(name)


sys.meta_path.insert(0, MovedModules)
