"""Mutants: small changes of a source file, each of which some test should notice. Values only; nothing is run here."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Function", "Mutant", "apply", "functions_of", "mutants_of", "sample"]

_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_CHANGED_COPIES = {"replace", "msgspec.structs.replace", "replace_struct"}
_FOR_PEOPLE = ("_log.", "notice", "Notice", "logging.", "warnings.", "super().__init__")
_LEAVES = (ast.Raise, ast.Continue, ast.Return, ast.Break)
_NEVER = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mutant:
    """One change.

    Attributes:
        path: the file, from the root of the package.
        function: the dotted name of the innermost function or class; empty in the module itself.
        before: what stands there, on one line.
        after: what takes its place.
        number: which of several equal ones in the function, from 0.
        line: where in the file it begins, from 1.
        span: start and end in the file's bytes.
        text: the bytes that take their place.
    """

    path: str
    function: str
    before: str
    after: str
    number: int
    line: int
    span: tuple[int, int]
    text: str

    @property
    def key(self) -> str:
        """Names it; stays as it is when code around it changes."""
        which = f" #{self.number + 1}" if self.number else ""
        return f"{self.path} {self.function or '<module>'}: {self.before} => {self.after}{which}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or class in a file: its dotted name, its lines from 1, and a digest of its text."""

    name: str
    first: int
    last: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """``node`` is replaced by ``after``; people are shown the change within ``shown``."""

    node: ast.AST
    after: str
    shown: tuple[str, str]


def functions_of(source: str) -> tuple[Function, ...]:
    """Returns the functions of a file, the outer ones first."""
    lines = source.splitlines()
    found = []
    for name, node in _named(ast.parse(source), ""):
        last = node.end_lineno or node.lineno
        digest = hashlib.sha256("\n".join(lines[node.lineno - 1 : last]).encode()).hexdigest()[:16]
        found.append(Function(name=name, first=node.lineno, last=last, digest=digest))
    return tuple(found)


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def mutants_of(path: str, source: str) -> tuple[Mutant, ...]:
    """Returns all mutants of a file, in the order of its text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, str, str]] = Counter()
    spans: set[tuple[tuple[int, int], str]] = set()
    found = []
    for function, change in _changes(ast.parse(source), ""):
        node = change.node
        begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        if ((begin, end), change.after) in spans:
            continue
        spans.add(((begin, end), change.after))
        before, after = change.shown
        number = seen[function, before, after]
        seen[function, before, after] += 1
        found.append(
            Mutant(
                path=path,
                function=function,
                before=before,
                after=after,
                number=number,
                line=node.lineno,  # type: ignore[attr-defined]
                span=(begin, end),
                text=change.after,
            )
        )
    return tuple(found)


def apply(mutant: Mutant, source: str) -> str:
    """Returns the file with the change made."""
    content = source.encode()
    start, end = mutant.span
    return (content[:start] + mutant.text.encode() + content[end:]).decode()


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> tuple[Mutant, ...]:
    """Returns ``count`` of the mutants: of every package its share, drawn by ``seed``.

    Which are drawn depends on their keys alone, so a change of the code exchanges only mutants of what was changed.
    """
    packages: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        packages[mutant.path.split("/")[0]].append(mutant)
    total = sum(map(len, packages.values()))
    drawn: list[Mutant] = []
    before = 0
    for name in sorted(packages):
        upto = before + len(packages[name])
        quota = round(count * upto / total) - round(count * before / total)
        drawn += sorted(packages[name], key=lambda each: _rank(seed, each.key))[:quota]
        before = upto
    return tuple(sorted(drawn))


def _rank(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, _Change]]:
    """The changes below a node, each with the function that it is in."""
    for child in _worth_changing(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".removeprefix(".")
        yield from ((inner, change) for change in _of(child, node))
        yield from _changes(child, inner)


def _worth_changing(node: ast.AST) -> Iterator[ast.AST]:
    """The children without types, messages, decorators, defaults and what is only said to people."""
    match node:
        case ast.FunctionDef(body=body):
            yield from body
        case ast.ClassDef(body=body):
            yield from body
        case ast.AnnAssign(value=value):
            yield from () if value is None else (value,)
        case ast.Raise():
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Assign(targets=[ast.Name(id="__slots__")]):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=ast.Name(id="isinstance" | "cast" | "TypeVar")):
            return
        case ast.Subscript(value=value, slice=ast.Tuple()) | ast.Subscript(value=value, slice=ast.Name()):
            yield value  # a generic type, or a key
        case ast.Expr(value=value) if _is_for_people(value):
            return
        case ast.Call() if _is_for_people(node):
            return
        case _:
            yield from (child for child in ast.iter_child_nodes(node) if not isinstance(child, _NEVER))


def _is_for_people(node: ast.AST) -> bool:
    """A docstring, or what is logged or told."""
    if isinstance(node, ast.Constant):
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(_FOR_PEOPLE)


def _of(node: ast.AST, parent: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Compare(ops=[op], left=left, comparators=comparators) if type(op) in _COMPARISONS:
            yield _exchange(node, ast.Compare(left, [_COMPARISONS[type(op)]()], comparators))
        case ast.BoolOp(op=op, values=values):
            yield _exchange(node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
            for index in range(len(values)):
                left = values[:index] + values[index + 1 :]
                yield _exchange(node, left[0] if len(left) == 1 else ast.BoolOp(op, left))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _exchange(node, operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _ARITHMETIC and not _is_type(node):
            yield _exchange(node, ast.BinOp(left, _ARITHMETIC[type(op)](), right))
        case ast.AugAssign(op=op, target=target, value=value) if type(op) in _ARITHMETIC:
            yield _statement(node, ast.AugAssign(target, _ARITHMETIC[type(op)](), value))
        case ast.Constant(value=value):
            yield from _other_constants(node, value, parent)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _CALLS:
            yield _exchange(node, ast.Call(ast.Name(_CALLS[name]), args, keywords))
        case ast.Call(func=func, args=args, keywords=keywords) if ast.unparse(func) in _CHANGED_COPIES:
            for keyword in keywords:
                kept = [each for each in keywords if each is not keyword]
                shown = (f"{keyword.arg}={ast.unparse(keyword.value)}", "(dropped)")
                yield _Change(node=node, after=ast.unparse(ast.Call(func, args, kept)), shown=shown)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from _conditions(node, test)
        case ast.comprehension(ifs=ifs):
            for test in ifs:
                yield from _negations(test)
        case ast.Return(value=value) if value is not None and not _is_nothing(value):
            yield _statement(node, ast.Return(None))
        case ast.Raise():
            if not (isinstance(parent, ast.If) and _is_guard(parent)):
                yield _dropped(node)
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()) if not _is_for_people(node.value):
            yield _dropped(node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _dropped(node)


def _conditions(node: ast.If | ast.While | ast.IfExp, test: ast.expr) -> Iterator[_Change]:
    """A guard is dropped; any other condition is negated."""
    if isinstance(node, ast.If) and _is_guard(node):
        shown = (f"if {ast.unparse(test)}: {ast.unparse(node.body[0]).splitlines()[0]}", "(dropped)")
        yield _Change(node=test, after="False", shown=shown)
    else:
        yield from _negations(test)


def _negations(test: ast.expr) -> Iterator[_Change]:
    if not isinstance(test, ast.Compare | ast.BoolOp) and not (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    ):  # their own changes are there already
        yield _exchange(test, ast.UnaryOp(ast.Not(), test))


def _is_guard(node: ast.If) -> bool:
    return len(node.body) == 1 and isinstance(node.body[0], _LEAVES) and not node.orelse


def _is_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_type(node: ast.BinOp) -> bool:
    """Whether it is a union of types, or builds a text."""
    if isinstance(node.op, ast.BitOr):
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        return all(each.id[:1].isupper() or each.id in ("int", "str", "float", "bytes", "bool") for each in names)
    texts = (ast.JoinedStr, ast.Constant)
    return any(isinstance(each, texts) and not _is_number(each) for each in (node.left, node.right))


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _other_constants(node: ast.Constant, value: object, parent: ast.AST) -> Iterator[_Change]:
    other: object
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int):
        other = value + 1
    elif isinstance(value, float):
        other = value * 2 or 1.0
    else:
        return
    shown = _one_line(ast.unparse(node)), repr(other)
    if isinstance(parent, ast.expr | ast.Assign | ast.AnnAssign | ast.Return | ast.keyword):
        shown = _one_line(ast.unparse(parent)), _one_line(ast.unparse(_with(parent, node, ast.Constant(other))))
    yield _Change(node=node, after=repr(other), shown=shown)


def _with(parent: ast.AST, old: ast.AST, new: ast.AST) -> ast.AST:
    """A copy of ``parent`` with ``new`` instead of ``old``."""

    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(_shallow(node))

    return Exchange().visit(parent)


def _shallow(node: ast.AST) -> ast.AST:
    """A copy whose lists are its own, so that the tree it comes from stays as it is."""
    copied = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(copied, name, list(value))
    return copied


def _exchange(node: ast.AST, after: ast.AST) -> _Change:
    text = ast.unparse(after)
    return _Change(node=node, after=f"({text})", shown=(_one_line(ast.unparse(node)), _one_line(text)))


def _statement(node: ast.AST, after: ast.AST) -> _Change:
    text = ast.unparse(after)
    return _Change(node=node, after=text, shown=(_one_line(ast.unparse(node)), _one_line(text)))


def _dropped(node: ast.AST) -> _Change:
    return _Change(node=node, after="pass", shown=(_one_line(ast.unparse(node)), "(dropped)"))


def _one_line(text: str) -> str:
    return " ".join(text.split())
