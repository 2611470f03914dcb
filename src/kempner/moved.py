"""Modules under the names that they had before version 0.2.0: programs and environments of users
import these, and jobs that are running are continued by the kit of the day."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `import kempner` must stay cheap
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

MOVED = {
    "kempner.slurm": "kempner.jobs.slurm",
    "kempner.trackers": "kempner.jobs.trackers",
    "kempner.history": "kempner.jobs.records",
    "kempner.checkpoint.reader": "kempner.checkpoint.format.reader",
    "kempner.checkpoint.metadata": "kempner.checkpoint.format.metadata",
    "kempner.lowcomm": "kempner.extensions.lowcomm",
    "kempner.rl": "kempner.extensions.rl",
}


def name_today(name: str) -> str | None:
    """Return the name of a module that is known by an old one; None for any other name."""
    old = next((old for old in MOVED if name == old or name.startswith(f"{old}.")), None)
    return None if old is None else MOVED[old] + name[len(old) :]


class MovedModules:
    """A finder, and the loader of what it finds: the module of today itself, so that its classes
    are the same under both names. It must come before the finder of files, which would load a
    module below a moved package a second time."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if (today := name_today(name)) is None:
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        if (there := find_spec(today)) is None:
            return None
        spec = ModuleSpec(name, cls, origin=there.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = there.submodule_search_locations
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        from importlib import import_module

        module = import_module(str(name_today(spec.name)))
        OWN_SPECS[module.__name__] = module.__spec__
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.__spec__ = OWN_SPECS.pop(module.__name__)  # it runs already

    @staticmethod
    def get_code(name: str) -> CodeType | None:
        """Return the code for `python -m NAME`."""
        from importlib.util import find_spec

        spec = find_spec(str(name_today(name)))
        return spec.loader.get_code(spec.name)  # type: ignore


OWN_SPECS: dict[str, ModuleSpec | None] = {}
sys.meta_path.insert(0, MovedModules)
