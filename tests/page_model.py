"""A small model with a tokenizer and a chat template, for the commands of the pages.

python -m tests.page_model DIR
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests import hf_models
from tests.templates import GENERATION, write_tokenizer

if __name__ == "__main__":
    hf_models.COMMON.update(vocab_size=265, max_position_embeddings=4096)
    hf_models.make("llama2", Path(sys.argv[1]))
    write_tokenizer(Path(sys.argv[1]), GENERATION)
