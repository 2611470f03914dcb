"""The window between the warning signal and the end of the job."""

from __future__ import annotations

import pytest

from kempner.slurm import short_window


@pytest.mark.parametrize(
    ("lead", "save", "enough"),
    [
        ("60", 30.0, None),
        ("60", 30.1, 120),
        ("10", 5.1, 60),
        ("120", 300.0, 630),
        ("", 900.0, None),
    ],
)
def test_the_window_should_hold_two_saves(
    monkeypatch: pytest.MonkeyPatch, lead: str, save: float, enough: int | None
) -> None:
    monkeypatch.setenv("KEMPNER_SIGNAL_LEAD", lead)
    warning = short_window(save)
    if enough is None:
        assert warning is None
    else:
        assert warning is not None and f"SBATCH_SIGNAL=B:SIGTERM@{enough} " in warning
        assert f"takes {save:.1f} s" in warning and f"only {lead} s" in warning


def test_nobody_says_how_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEMPNER_SIGNAL_LEAD", raising=False)
    assert short_window(900.0) is None
