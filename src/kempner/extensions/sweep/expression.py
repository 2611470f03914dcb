"""The formulas of a sweep: arithmetic, comparisons, and/or/not, a few functions, names. No torch.

Python's own parser reads them, and a whitelist of node types limits them: an expression can look up
values and compute, and nothing else.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

from kempner.config.values import did_you_mean, format_value

EXPRESSION_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "min": min,
    "max": max,
    "log": math.log,
    "sqrt": math.sqrt,
}
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    # With ints it could take all memory: 9 ** 9 ** 9 ** 9.
    ast.Pow: lambda base, exponent: math.pow(base, exponent),
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ALLOWED = (
    "an expression has numbers, strings, names, + - * / // % **, comparisons, and, or, not, "
    "A if B else C, and " + ", ".join(EXPRESSION_FUNCTIONS)
)


class ExpressionError(ValueError):
    """An expression is malformed or has no value; the message says what to do."""


class Expression:
    """One expression, checked when it is made. `names`: the names that it reads."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.names: set[str] = set()
        try:
            # The parser takes leading blanks as an indent.
            self._tree = ast.parse(text.strip(), mode="eval").body
            self._check(self._tree)
        # ValueError: a NUL, before Python 3.12. The last two: an expression nested too deeply.
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, ExpressionError):
                raise
            what = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ExpressionError(f"{format_value(text)} is not an expression: {what}") from None

    def value(self, values: Mapping[str, Any]) -> Any:
        """Evaluate the expression for these values of its names. Raises ExpressionError if it
        has no value."""
        unknown = sorted(self.names - values.keys())
        if unknown:
            near = did_you_mean(unknown[0], [*values, *EXPRESSION_FUNCTIONS])
            raise ExpressionError(f"{format_value(self.text)}: unknown name {unknown[0]}{near}")
        try:
            result = _value(self._tree, values)
        except (ArithmeticError, ValueError, TypeError) as error:
            unset = [name for name in sorted(self.names) if values[name] is None]
            why = f"{unset[0]} is none" if unset else str(error)
            raise ExpressionError(f"{format_value(self.text)} has no value: {why}") from None
        if isinstance(result, float) and not math.isfinite(result):
            raise ExpressionError(f"{format_value(self.text)} has no finite value")
        return result

    def _check(self, node: ast.AST) -> None:
        if (name := _name(node)) is not None:
            self.names.add(name)
            return
        parts = list(ast.iter_child_nodes(node))
        allowed = False
        if isinstance(node, ast.Constant):
            allowed = isinstance(node.value, bool | int | float | str)
        elif isinstance(node, ast.Call):
            # Only the arguments are visited: a function's name is not a variable to look up.
            is_function = isinstance(node.func, ast.Name) and node.func.id in EXPRESSION_FUNCTIONS
            allowed, parts = is_function and not node.keywords and bool(node.args), [*node.args]
        elif isinstance(node, ast.BoolOp):
            # The operator is a child node, too; omit it here.
            allowed, parts = True, [*node.values]
        elif isinstance(node, ast.UnaryOp):
            allowed, parts = isinstance(node.op, ast.USub | ast.Not), [node.operand]
        elif isinstance(node, ast.BinOp):
            allowed, parts = type(node.op) in OPERATORS, [node.left, node.right]
        elif isinstance(node, ast.IfExp):
            allowed = True
        elif isinstance(node, ast.Compare):
            allowed = all(type(op) in OPERATORS for op in node.ops)
            parts = [node.left, *node.comparators]
        if not allowed:
            raise ExpressionError(
                f"{format_value(self.text)}: {format_value(ast.unparse(node))} is not allowed; "
                f"{ALLOWED}"
            )
        for part in parts:
            self._check(part)


def in_order(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Order the rules so that each follows the rules that it reads, because TOML tables do not keep
    the order of `a.x`, `b`, `a.y`. In a rule, its own name means the previous value. Raises
    ExpressionError for a cycle."""
    # `parameters` is counted from all options of the model.
    of_model = {name for name in rules if name.startswith("model.")}
    needs = {
        name: (rule.names | (of_model if "parameters" in rule.names else set())) - {name}
        for name, rule in rules.items()
    }
    try:
        # The order also contains names that the rules only read.
        return {name: rules[name] for name in TopologicalSorter(needs).static_order()
                if name in rules}  # fmt: skip
    except CycleError as error:
        # CycleError lists each name before the one that reads it.
        circle = " needs ".join(reversed(error.args[1]))
        raise ExpressionError(f"{circle}: break the cycle") from None


def _name(node: ast.AST) -> str | None:
    """Return a name such as `width`, or `model.dim` for an option; None for any other node."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return None


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    if (name := _name(node)) is not None:
        return values[name]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BoolOp):
        # Short-circuits, as in Python: `width and dim / width > 2` has a value for 0.
        stop_at = isinstance(node.op, ast.Or)
        return next((stop_at for e in node.values if bool(_value(e, values)) == stop_at),
                    not stop_at)  # fmt: skip
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, values) else node.orelse, values)
    if isinstance(node, ast.Compare):
        sides = [_value(side, values) for side in (node.left, *node.comparators)]
        return all(
            OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False)
        )
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand, values)
        return not operand if isinstance(node.op, ast.Not) else -_number(operand)
    if isinstance(node, ast.BinOp):
        left, right = (_number(_value(side, values)) for side in (node.left, node.right))
        return OPERATORS[type(node.op)](left, right)
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return EXPRESSION_FUNCTIONS[node.func.id](
        *(_number(_value(each, values)) for each in node.args)
    )


def _number(value: Any) -> int | float:
    """Return a number; raises TypeError for a string, because "a" * 10**9 would take a gigabyte."""
    if isinstance(value, int | float):
        return value
    raise TypeError(f"{format_value(value)} is not a number")
