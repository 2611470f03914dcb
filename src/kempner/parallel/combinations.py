"""What the parallel plans cannot be combined with, told before a GPU is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kempner.run import RunConfig


def context_problems(cfg: RunConfig) -> list[str]:
    """Of rows whose tokens several ranks share (context.py)."""
    ranks, method = cfg.distributed.cp, cfg.distributed.cp_method
    if ranks == 1:
        return []
    found = []
    parts = 2 * ranks if method == "ring" else ranks
    option, shortest = "train.seq_len", cfg.train.seq_len
    if cfg.train.seq_len_ramp is not None:
        option, shortest = "train.seq_len_ramp, at first", cfg.train.seq_len_ramp[0]
    if shortest % parts:
        near = max(parts, shortest // parts * parts)
        found.append(
            f"{option} = {shortest}: distributed.cp = {ranks} with cp_method = {method} cuts a "
            f"sequence into {parts} parts; give a multiple, such as {near}"
        )
    elif cfg.distributed.tp > 1 and shortest // ranks % cfg.distributed.tp:
        found.append(
            f"{option} = {shortest}: distributed.tp = {cfg.distributed.tp} must divide the "
            f"{shortest // ranks} tokens that each of distributed.cp = {ranks} ranks has; give "
            "another length, or other sizes"
        )
    if cfg.model.aux_loss:
        found.append(
            f"model.aux_loss = {cfg.model.aux_loss}: is that of whole sequences, of which a rank "
            f"has a part with distributed.cp = {ranks}; give --model.aux_loss=0, such as with "
            "--model.router_bias, or --distributed.cp=1"
        )
    if cfg.train.compile_scope == "model":
        found.append(
            f"train.compile_scope = model: attention over distributed.cp = {ranks} ranks is not "
            "compiled, and leaves no whole graph; give --train.compile_scope=block"
        )
    if cfg.preference.loss != "none":
        found.append(
            f"preference.loss = {cfg.preference.loss}: not with distributed.cp = {ranks}: an "
            "answer would be on several ranks; give --distributed.cp=1"
        )
    return found + (_ring_problems(cfg) if method == "ring" else _ulysses_problems(cfg))


def _ulysses_problems(cfg: RunConfig) -> list[str]:
    ranks, heads = cfg.distributed.cp, cfg.model.n_heads // cfg.distributed.tp
    if heads % ranks == 0:
        return []
    return [
        f"distributed.cp = {ranks} with cp_method = ulysses: must divide the {heads} query heads "
        "of a tensor-parallel rank; give another --distributed.cp, or --distributed.cp_method=ring"
    ]


def _ring_problems(cfg: RunConfig) -> list[str]:
    model, instead = cfg.model, "give --distributed.cp_method=ulysses, or --distributed.cp=1"
    window, cap, kernel = model.sliding_window, model.attention_softcap, cfg.train.attention
    found = []
    if cfg.data.document_mask:
        found.append(f"data.document_mask: the ring has no mask of documents; {instead}")
    if window is not None and window < cfg.train.seq_len:
        found.append(f"model.sliding_window = {window}: the ring has no windows; {instead}")
    if cap is not None:
        found.append(f"model.attention_softcap = {cap}: the ring does not cap scores; {instead}")
    if kernel not in ("auto", "flash"):
        found.append(f"train.attention = {kernel}: the ring's kernel is flash; {instead}")
    return found
