"""The newest measurement of each layer (profile.layers_interval) as a table. No torch."""

from __future__ import annotations

import math
from typing import Any

from kempner.jobs.records.run_history import History
from kempner.jobs.report.page.markup import escape_html

MOST_LAYERS = 1000
LAYER_COLUMNS = {  # in metrics.jsonl, under "layers", and on the page
    "grad_norm": "gradient",
    "update_rms": "update",
    "activation_rms": "activation",
    "activation_max": "largest",
    "logit_max": "attention logit",
    "load_max": "busiest expert",
}


def layers_table(run: History) -> str:
    """Write the table; empty for a run without measurements."""
    measured = {
        line["step"]: figures
        for line in run.losses
        if isinstance(figures := line.get("layers"), dict) and "activation_rms" in figures
    }
    if not measured:
        return ""
    step = max(measured)
    columns = {
        name: values
        for name in LAYER_COLUMNS
        if isinstance(values := measured[step].get(name), dict)
    }
    layers = list(dict.fromkeys(layer for values in columns.values() for layer in values))
    rows = "".join(
        f'<tr><th scope="row">{escape_html(layer, 40)}</th>'
        + "".join(
            f'<td data-l="{LAYER_COLUMNS[name]}" class="n">{_figure(values.get(layer))}</td>'
            for name, values in columns.items()
        )
        + "</tr>"
        for layer in sorted(layers[:MOST_LAYERS], key=_place)
    )
    head = "".join(f'<th class="n">{LAYER_COLUMNS[name]}</th>' for name in columns)
    return (
        f"<section><h2>Layers <span>at step {step:,}: norm of the gradient; root mean square of "
        "the update and of the activations, and their largest</span></h2>"
        f'<table class="cards"><thead><tr><th>layer</th>{head}</tr></thead><tbody>{rows}</tbody>'
        "</table></section>"
    )


def _place(layer: str) -> tuple[int, int]:
    """Return the sort key: the embedding first, then the blocks, then the rest."""
    if layer.isdecimal():
        # The name is unchecked: int() refuses a string of thousands of digits.
        return 1, int(layer[:9])
    return (0, 0) if layer == "embed" else (2, 0)


def _figure(value: Any) -> str:
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return f"{value:.3g}" if number else "–"
