"""torch.compile, for each block or for the whole model."""

from __future__ import annotations

import torch

from kempner.model.decoder import Decoder


def compile_model(model: Decoder, scope: str) -> None:
    """Before the model is sharded, so that the hooks of FSDP stay outside of what is compiled.

    block: all blocks are alike and share one graph, which is compiled once, however deep the model
    is. model: one graph from the embedding to the loss, which takes as much longer to compile.
    """
    if scope == "model":
        model.compile()
        return
    for block in model.blocks:
        block.compile()
    model.loss = torch.compile(model.loss)
