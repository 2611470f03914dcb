"""Sampling settings of texts. No torch."""

from __future__ import annotations

from dataclasses import dataclass

COLDEST = 0.01  # lowest temperature above 0


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token. The filters apply in this order, as in transformers."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int | None = None  # only the k most likely tokens
    top_p: float = 1.0  # only the most likely tokens that together have this probability
    min_p: float = 0.0  # only tokens with at least this fraction of the largest probability
    seed: int = 0
    max_tokens: int = 200
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings

    @property
    def cuts(self) -> bool:
        """True if any filter is on."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def filters(self) -> tuple[float, int | None, float, float]:
        """Settings that rows must share to be sampled together."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def problem(self) -> tuple[str, str] | None:
        """Return the first field with an invalid value, and the values allowed."""
        ranges = {
            # logits divided by less than COLDEST overflow
            "temperature": (
                self.temperature == 0 or COLDEST <= self.temperature < float("inf"),
                f"must be 0, or finite and at least {COLDEST}",
            ),
            "top_k": (self.top_k is None or self.top_k >= 1, "must be at least 1"),
            "top_p": (0 < self.top_p <= 1, "must be over 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "must be from 0 to 1"),
            "max_tokens": (self.max_tokens >= 1, "must be at least 1"),
            "stop": ("" not in self.stop, "must not be empty"),
        }
        return next(((name, text) for name, (fine, text) in ranges.items() if not fine), None)
