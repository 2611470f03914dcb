"""Changes to the configuration of a resumed run, for its log and its records."""

from __future__ import annotations

from pathlib import Path

from kempner.config.loading import as_dict, load_config_files
from kempner.config.option import ConfigError
from kempner.config.values import to_text
from kempner.optim.config import learning_rate
from kempner.train.sections import RunConfig


def what_changed(file: Path, cfg: RunConfig, step: int) -> list[str]:
    """List each key that differs from the config.toml of the last attempt, and the effect on the
    learning rate of the next step."""
    try:
        before = load_config_files(RunConfig, [file])
    except ConfigError:  # missing, or from a version with other options
        return []
    # Each gets the other's sections, so that each option has a value on both sides.
    now = cfg
    for name, section in before.more:  # unused sections have their defaults
        now = now if name in dict(cfg.more) else now.with_section(name, type(section)())
    for name, section in cfg.more:
        before = before if name in dict(before.more) else before.with_section(name, type(section)())
    was = as_dict(before)
    changes = [
        f"{section}.{key}: {to_text(old)} -> {to_text(new)}"
        for section, values in as_dict(now).items()
        for key, new in values.items()
        if (old := was[section][key]) != new
    ]
    rates = [
        learning_rate(c.schedule, c.optimizer.lr, step, c.train.max_steps) for c in (before, cfg)
    ]
    same_steps = learning_rate(cfg.schedule, cfg.optimizer.lr, step, before.train.max_steps)
    if rates[1] != same_steps:
        changes.append(
            f"learning rate after step {step}: {rates[0]:.2e} -> {rates[1]:.2e}; "
            f"schedule.name = {cfg.schedule.name} is stretched to train.max_steps"
        )
    return changes
