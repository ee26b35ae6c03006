"""Rules that generate mutants: every place in a source file where one can be made, and its replacement text.

Python goes by the syntax tree, C++ by tokens, as clang-format sets them: binary operators stand between blanks, the
brackets of templates do not. Left alone is what nobody would call a mistake, or what no test should hold: docstrings,
annotations, ``__all__``, logs and warnings, the texts of errors, ``repr``; assertions, which are guards of this
project's own; and calls that end processes or delete files, which a mistake might aim at others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

__all__ = ["Place", "places"]


class Place(NamedTuple):
    """One possible mutant."""

    rule: str
    start: int
    """Offset into the text, in characters."""
    stop: int
    new: str


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
OTHER_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
OTHER_METHODS = {
    "amax": "amin", "amin": "amax", "append": "extend", "popleft": "pop", "floor": "ceil", "ceil": "floor",
    "add_": "sub_", "sub_": "add_", "mul_": "div_", "div_": "mul_", "is_alive": "is_set", "update": "setdefault",
}  # fmt: skip
NEEDED = re.compile(
    r"property|setter|getter|classmethod|staticmethod|dataclass|overload|abstractmethod|contextmanager|jit|autotune|"
    r"runtime_checkable|custom_op|register|fixture"
)
"""Decorators that are kept, since without them nothing can be imported or called."""
QUIET = re.compile(
    r"^(logger|logging|warnings|log)\b|\.(kill|killpg|rmtree|unlink|rmdir|warn|exception|add_argument)$|"
    r"^(print|cast|TypeVar|field|super|isinstance|issubclass|hasattr|subprocess)\b|\.note$"
)
"""Calls that are not mutated, with their arguments."""
QUIET_FUNCTIONS = re.compile(r"^(__repr__|__str__|__dir__|__all__|describe\w*|_describe\w*|_compose|format_\w+)$")
SAME_ORDER = {"min", "max", "getattr", "setattr", "zip", "partial", "gcd", "print", "ref"}


def places(file: str, text: str) -> list[Place]:
    """All mutants of one file, in a fixed order."""
    found = _Python(text).places if file.endswith(".py") else list(_of_cpp(text))
    return sorted(found)


class _Python(ast.NodeVisitor):
    def __init__(self, text: str) -> None:
        self.text, self.places = text, list[Place]()
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bytes = [line.encode() for line in text.splitlines(keepends=True)]
        self.visit(ast.parse(text))

    def _offset(self, line: int, column: int) -> int:
        return self._lines[line - 1] + len(self._bytes[line - 1][:column].decode())

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, rule: str, node: ast.AST, new: ast.AST | str) -> None:
        start, stop = self._span(node)
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        if isinstance(new, ast.expr) and not isinstance(new, (ast.Name, ast.Constant, ast.Call, ast.Attribute)):
            text = f"({text})"
        self.places.append(Place(rule, start, stop, text))

    def _changed(self, node: Any, **fields: Any) -> Any:
        other = deepcopy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    def visit_FunctionDef(self, node: Any) -> None:
        if QUIET_FUNCTIONS.match(node.name):
            return
        for decorator in node.decorator_list:
            if not NEEDED.search(ast.unparse(decorator)):
                start, stop = self._span(decorator)
                self.places.append(Place("dropped decorator", self.text.rindex("@", 0, start), stop, ""))
        body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        gives_value = any(isinstance(n, (ast.Return, ast.Yield, ast.YieldFrom)) for s in body for n in ast.walk(s))
        if len(body) > 1 and not gives_value:
            self._add("early return", body[len(body) // 2], "return")
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == "__all__":
            return
        if isinstance(target, (ast.Attribute, ast.Subscript)) and "self.__dict__" not in ast.unparse(target):
            self._add("dropped assignment", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("dropped assignment", node, "pass")
        if type(node.op) in OPERATORS and not _is_text(node.value):
            self._add("other operator", node, self._changed(node, op=OPERATORS[type(node.op)]()))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not QUIET.search(ast.unparse(node.value.func)):
            self._add("dropped call", node, "pass")
            self.visit(node.value)
        elif isinstance(node.value, (ast.Yield, ast.Await)) and node.value.value is not None:
            self.visit(node.value.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Do not mutate texts of errors."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Do not mutate assertions, which guard against bugs of this project."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Do not mutate text."""

    def visit_Import(self, node: ast.Import) -> None:
        """Do not mutate imports."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test) or "__main__" in ast.unparse(node.test):
            return
        ends = isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break)) and not node.orelse
        if ends and len(node.body) == 1:
            self._add("dropped guard", node.test, "False")
        else:
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add("swapped alternatives", node, self._changed(node, body=node.orelse, orelse=node.body))
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.UnaryOp, ast.Compare, ast.BoolOp)):
            self._add("negated condition", test, ast.UnaryOp(op=ast.Not(), operand=test))

    def visit_With(self, node: ast.With) -> None:
        for index, item in enumerate(node.items):
            if item.optional_vars is None and not QUIET.search(ast.unparse(item.context_expr)):
                others = [ast.unparse(other) for i, other in enumerate(node.items) if i != index]
                last = node.items[-1]
                end = self._span(last.optional_vars or last.context_expr)[1]
                new = f"with {', '.join(others)}" if others else "if True"
                self.places.append(Place("dropped context", self._span(node)[0], self.text.index(":", end), new))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        other = COMPARISONS.get(type(node.ops[0]))
        if other is not None:
            self._add("other comparison", node, self._changed(node, ops=[other(), *node.ops[1:]]))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("and/or", node, self._changed(node, op=other))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("dropped not", node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_type = isinstance(node.op, ast.BitOr) and any(
            isinstance(side, ast.Name) and side.id[0].isupper() for side in (node.left, node.right)
        )
        if type(node.op) in OPERATORS and not is_type and not _is_text(node):
            self._add("other operator", node, self._changed(node, op=OPERATORS[type(node.op)]()))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("other flag", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("off by one", node, str(node.value + 1))
        elif isinstance(node.value, float):
            self._add("other number", node, repr(2 * node.value if node.value else 1.0))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = ast.unparse(node.slice)
        if index in ("0", "-1"):
            self._add("first/last", node.slice, "-1" if index == "0" else "0")
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        value: Any = node.value
        is_call = isinstance(value, ast.Call) and value.args and not QUIET.search(ast.unparse(value.func))
        if is_call and not isinstance(value.args[0], ast.Starred):
            self._add("early value", value, value.args[0])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if QUIET.search(name):
            return
        if isinstance(node.func, ast.Name) and node.func.id in OTHER_FUNCTIONS:
            self._add("other function", node.func, OTHER_FUNCTIONS[node.func.id])
        if isinstance(node.func, ast.Attribute) and node.func.attr in OTHER_METHODS:
            stop = self._span(node.func)[1]
            start = stop - len(node.func.attr)
            self.places.append(Place("other function", start, stop, OTHER_METHODS[node.func.attr]))
        pair = node.args[:2]
        may_swap = len({ast.dump(arg) for arg in pair}) == 2 and name.split(".")[-1] not in SAME_ORDER
        if may_swap and not any(map(_is_literal, pair)):
            self._add("swapped arguments", node, self._changed(node, args=[pair[1], pair[0], *node.args[2:]]))
        self.generic_visit(node)


def _is_literal(node: ast.expr) -> bool:
    return isinstance(node, (ast.Starred, ast.JoinedStr)) or (isinstance(node, ast.Constant) and node.value is not None)


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


CPP_RULES: dict[str, dict[str, str]] = {
    "other comparison": {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "},
    "other operator": {
        " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " += ": " -= ", " -= ": " += ",
        " & ": " | ", " | ": " & ", " >> ": " << ",
    },
    "and/or": {" && ": " || ", " || ": " && "},
    "dropped not": {"if (!": "if (", " !": " "},
    "other flag": {"true": "false", "false": "true"},
    "other function": {"std::min": "std::max", "std::max": "std::min", ".front()": ".back()", ".back()": ".front()"},
}  # fmt: skip
CPP_LEFT_ALONE = re.compile(r"^\s*(#|static_assert|using |template|namespace|typedef|\"|<<|\*|extern|friend)|operator")
CPP_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|\'(?:[^\'\\\n]|\\.)+\'', re.DOTALL)
CPP_CALL = re.compile(r"^( +)((?!return|throw|delete|case|else|co_)[\w:]+(?:(?:\.|->)\w+)*\([^{}]*\);)$")
CPP_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def _of_cpp(text: str) -> Iterator[Place]:
    hidden = CPP_TEXT.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)  # of the same length
    start = 0
    for line in hidden.splitlines(keepends=True):
        if not CPP_LEFT_ALONE.search(line):
            code = line.split("\0")[0]  # what stands behind a text is mostly a part of it
            yield from _in_line(code, start)
        start += len(line)


def _in_line(code: str, start: int) -> Iterator[Place]:
    for rule, pairs in CPP_RULES.items():
        for old, new in pairs.items():
            at = code.find(old)
            while at >= 0:
                is_word = not old.isalpha() or re.match(rf"\b{old}\b", code[at:])
                if is_word and not (at and old.isalpha() and (code[at - 1].isalnum() or code[at - 1] == "_")):
                    yield Place(rule, start + at, start + at + len(old), new)
                at = code.find(old, at + len(old))
    for number in CPP_NUMBER.finditer(code):
        yield Place("off by one", start + number.start(), start + number.end(), str(int(number[0]) + 1))
    call = CPP_CALL.match(code.rstrip("\n"))
    if call is not None and not call[2].startswith("ZCOMM_"):
        yield Place("dropped call", start + call.start(2), start + call.end(2), ";")
