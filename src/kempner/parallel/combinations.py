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
    instead = "give --distributed.cp_method=ulysses, or --distributed.cp=1"
    parts = 2 * ranks if method == "ring" else ranks
    length, heads = cfg.train.seq_len, cfg.model.n_heads // cfg.distributed.tp
    option, shortest = "train.seq_len", length
    if cfg.train.seq_len_ramp is not None:
        option, shortest = "train.seq_len_ramp, at first", cfg.train.seq_len_ramp[0]
    if shortest % parts:
        near = max(parts, shortest // parts * parts)
        found.append(
            f"{option} = {shortest}: distributed.cp = {ranks} with cp_method = {method} cuts a "
            f"sequence into {parts} parts; give a multiple, such as {near}"
        )
    if cfg.preference.loss != "none":
        found.append(
            f"preference.loss = {cfg.preference.loss}: not with distributed.cp = {ranks}: an "
            "answer would be on several ranks; give --distributed.cp=1"
        )
    if method == "ulysses":
        if heads % ranks:
            found.append(
                f"distributed.cp = {ranks} with cp_method = ulysses: must divide the {heads} "
                "query heads of a tensor-parallel rank; give another --distributed.cp, or "
                "--distributed.cp_method=ring"
            )
        return found
    if cfg.data.document_mask:
        found.append(f"data.document_mask: the ring has no mask of documents; {instead}")
    window = cfg.model.sliding_window
    if window is not None and window < length:
        found.append(f"model.sliding_window = {window}: the ring has no windows; {instead}")
    if (cap := cfg.model.attention_softcap) is not None:
        found.append(f"model.attention_softcap = {cap}: the ring does not cap scores; {instead}")
    if (kernel := cfg.train.attention) not in ("auto", "flash"):
        found.append(f"train.attention = {kernel}: the ring's kernel is flash; {instead}")
    return found
