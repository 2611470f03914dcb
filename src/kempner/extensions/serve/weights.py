"""Load an engine's weights: the first ones, and new ones while the model is in use."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from kempner.checkpoint.history import Damaged
from kempner.config.option import ConfigError
from kempner.config.values import format_value
from kempner.extensions.hf.load import is_finite, load_weights, not_finite
from kempner.extensions.hf.source import WeightsSource, held_weights
from kempner.extensions.hf.stored import check_source
from kempner.extensions.serve.lease import LeaseRefused, WeightsWithdrawn
from kempner.model.config import ModelConfig
from kempner.model.decoder import Decoder
from kempner.parallel.config import is_adapter

WEIGHTS_POLL_S = 0.2  # between two checks for a version
_T = TypeVar("_T")


def replace_weights(model: Decoder, name: str) -> None:
    """Read the weights of a directory in Hugging Face format, or of RUN[@STEP], into the model.
    Raises LeaseRefused; after any other error the model is unusable."""
    with contextlib.ExitStack() as reading:
        try:
            # All refusals come before load_weights(), which overwrites the model.
            source = reading.enter_context(held_weights(name))
            check_served_weights(model, source)
            if name := not_finite(source):
                raise ConfigError(f"{source.path}: {name} has values that are not finite")
        except (ConfigError, Damaged, OSError) as error:
            raise LeaseRefused(str(error)) from None
        load_weights(model, model.cfg, source)


def receive_version(model: Decoder, manifest: str, token: str) -> int:
    """Receive weights directly from a trainer's ranks, given the version's manifest;
    returns its number. Raises LeaseRefused; after any other error the model is unusable."""
    from kempner.extensions.rl.trainer.transfer import Gone, Withdrawn
    from kempner.extensions.rl.trainer.transfer import receive_weights as read

    try:
        facts = json.loads(Path(manifest).read_text())
        read(model, facts, token)
        version = int(facts["version"])
    except Withdrawn as error:
        raise WeightsWithdrawn(f"{manifest}: {error}") from None
    except (Gone, FileNotFoundError, KeyError, ValueError) as error:
        raise LeaseRefused(f"{manifest}: {error}") from None
    for name, parameter in model.named_parameters():  # the old values are lost
        if not is_finite(parameter):
            raise OverflowError(f"{name} is not finite")
    return version


def check_served_weights(model: Decoder, source: WeightsSource) -> None:
    """Raise ConfigError or Damaged if these weights do not belong to this model."""
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise ConfigError("the model has adapters; serve one with merged adapters")
    shape, own = ModelConfig(**source.model()).shape, model.cfg.shape
    for key, value in own.items():
        if shape[key] != value:
            raise ConfigError(
                f"{source.path}: model.{key} is {format_value(shape[key])}, here it is "
                f"{format_value(value)}"
            )
    check_source(source, model.cfg)


# --- The versions of a trainer: see extensions/rl/exchange.py ---


def newest_manifest(weights: Path) -> Path | None:
    """Return the manifest of the newest version in a directory."""
    # Numbers are zero-padded to eight digits, so names sort numerically.
    return max(weights.glob("v*/manifest.json"), default=None)


def first_version(
    weights: Path,
    load: Callable[..., _T],
    token: str,
    end: threading.Event,
) -> tuple[_T, int] | None:
    """Load the newest version, once there is one; returns the model and its version, None if `end`
    is set first. `load` is kempner.extensions.generate.load's, whose exceptions are passed on."""
    while not end.is_set():
        if (manifest := newest_manifest(weights)) is None:
            end.wait(WEIGHTS_POLL_S)
            continue
        try:
            facts = json.loads(manifest.read_text())
            fill = partial(receive_version, manifest=str(manifest), token=token)
            by_files = facts["transport"] == "directory"
            loaded = load(str(manifest.parent), fill=None if by_files else fill)
            return loaded, int(facts["version"])
        except LeaseRefused:  # the trainer is about to offer another version
            end.wait(WEIGHTS_POLL_S)
        except (ConfigError, OSError):
            # A version may be removed while we read it, if a newer one is in use everywhere.
            if newest_manifest(weights) in (manifest, None):
                raise
    return None
