"""Modules under the names that they had before version 0.2.0: programs and environments of users
import these, and jobs that are running are continued by the kit of the day."""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

from kempner import MOVED

OWN_SPECS: dict[str, ModuleSpec | None] = {}


def name_today(name: str) -> str | None:
    """Return the name of a module that is known by an old one; None for any other name."""
    for old, today in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return today + name[len(old) :]
    return None


def find_moved(name: str) -> ModuleSpec | None:
    """Return a spec that gives the module of today itself, so that its classes are the same under
    both names."""
    if (today := name_today(name)) is None or (there := find_spec(today)) is None:
        return None
    spec = ModuleSpec(name, MovedLoader, origin=there.origin)  # type: ignore[arg-type]
    spec.submodule_search_locations = there.submodule_search_locations
    return spec


class MovedLoader:
    """Loader of what find_moved() finds."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        module = import_module(str(name_today(spec.name)))
        OWN_SPECS[module.__name__] = module.__spec__
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.__spec__ = OWN_SPECS.pop(module.__name__)  # it runs already

    @staticmethod
    def get_code(name: str) -> CodeType | None:
        """Return the code for `python -m NAME`."""
        spec = find_spec(str(name_today(name)))
        return spec.loader.get_code(spec.name)  # type: ignore
