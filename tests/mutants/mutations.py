"""Small changes of a module, each of which some test should notice."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.coverage.marking import excused_lines

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+", ast.Pow: "*",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    line: int  # where it is
    before: str  # what is replaced
    after: str  # by what
    source: str  # the whole module with it


def mutations(source: str) -> list[Mutation]:
    """Return all changes of `source` that this module knows, in order; none of annotations, texts and excused lines."""
    tree = ast.parse(source)
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line.encode()))
    data = source.encode()

    def span(node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return offsets[node.lineno - 1] + node.col_offset, offsets[node.end_lineno - 1] + node.end_col_offset

    excused = excused_lines(tree, source)
    found: dict[tuple[int, int, str], Mutation] = {}
    for node in _computing(tree):
        for first, last, after in _changes(node, data, span):
            line = data.count(b"\n", 0, first) + 1
            changed = (data[:first] + after.encode() + data[last:]).decode()
            if line not in excused and _compiles(changed):
                found[first, last, after] = Mutation(line, data[first:last].decode(), after, changed)
    return [found[key] for key in sorted(found)]


def _computing(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through what is computed: no annotations, no texts."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert():
            yield node
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            below = [*node.body, *node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)]
        case ast.AnnAssign():
            below = [node.value] if node.value is not None else []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case _:
            below = list(ast.iter_child_nodes(node))
    yield node
    for child in below:
        yield from _computing(child)


def _changes(node: ast.AST, data: bytes, span: Callable[[ast.AST], tuple[int, int]]) -> Iterator[tuple[int, int, str]]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield span(left)[1], span(right)[0], f" {_COMPARISONS[type(operator)]} "
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            if not any(isinstance(side, ast.Constant | ast.JoinedStr) and _is_text(side) for side in (left, right)):
                between = data[span(left)[1] : span(right)[0]].decode()
                symbol = between.strip().strip("()").strip()
                yield span(left)[1], span(right)[0], between.replace(symbol, _ARITHMETIC[type(operator)], 1)
        case ast.BoolOp(op=operator, values=[left, right, *_]):
            yield span(left)[1], span(right)[0], " or " if isinstance(operator, ast.And) else " and "
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield *span(node), data[slice(*span(operand))].decode()
        case ast.Constant(value=bool() as value):
            yield *span(node), str(not value)
        case ast.Constant(value=int() | float() as value):
            yield *span(node), repr(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield *span(value), "None"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
                yield *span(test), f"(not ({data[slice(*span(test))].decode()}))"
        case ast.Expr(value=ast.Call() | ast.Await() as call):
            yield *span(call), "None"
        case ast.Raise() | ast.AugAssign():
            yield *span(node), "pass"
        case ast.Break():
            yield *span(node), "continue"
        case ast.Continue():
            yield *span(node), "break"
        case _:
            return


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _compiles(source: str) -> bool:
    try:
        compile(source, "<mutant>", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True
