"""A public name is defined in one module, so that it says which thing is meant wherever it is
imported."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.house.test_layers import MODULES

EXCEPT = {"main", "TYPE_CHECKING"}  # each program has its own; typing's own is slow to import


def test_no_public_name_is_defined_in_two_modules() -> None:
    homes = defaultdict(set)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)]
            for name in names:
                homes[name].add(module)
    public = {name: at for name, at in homes.items() if name[0] != "_" and name not in EXCEPT}
    assert not {name: at for name, at in public.items() if len(at) > 1}
