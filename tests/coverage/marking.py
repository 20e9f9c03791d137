"""Puts a mark before every statement and at both ends of every branch of a module."""

import ast
import io
import re
import tokenize
from dataclasses import dataclass, field
from types import CodeType
from typing import Literal

EXCUSE = re.compile(r"# untested: \S")
_WITH_BODY = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.If, ast.For, ast.AsyncFor, ast.While, ast.With,
    ast.AsyncWith, ast.Try, ast.TryStar, ast.ExceptHandler,
)  # fmt: skip
_IMPORT = "from _coverage_marks import marks as _marks_"


@dataclass(frozen=True)
class Point:
    """What is run or not. `kind`: a branch counts where it leaves its head without running a statement below it."""

    line: int  # of the statement, or of the head of the branch
    kind: Literal["statement", "branch"]
    excused: bool  # a comment says why nothing runs it


@dataclass
class Marking:
    source: str
    path: str
    first: int  # number of its first point among those of all modules
    points: list[Point] = field(default_factory=list)  # in the order of their numbers

    def code(self) -> CodeType:
        """Return the code of the module with its marks."""
        tree = ast.parse(self.source, self.path)
        self._excused = excused_lines(tree, self.source)
        head = _head_of(tree.body)
        body = self._block(tree.body[head:])
        tree.body = [*tree.body[:head], *(ast.parse(_IMPORT).body if self.points else []), *body]
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def _mark(self, line: int, kind: Literal["statement", "branch"]) -> ast.stmt:
        number = self.first + len(self.points)
        self.points.append(Point(line, kind, line in self._excused))
        mark = ast.parse(f"_marks_[{number}] = 1").body[0]
        for node in ast.walk(mark):
            if isinstance(node, ast.stmt | ast.expr):
                node.lineno = node.end_lineno = line
        return mark

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        marked = []
        for statement in statements:
            if _computes_nothing(statement):
                marked.append(statement)
                continue
            marked.append(self._mark(statement.lineno, "statement"))
            self._below(statement)
            marked.append(statement)
        return marked

    def _below(self, statement: ast.stmt) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                head = _head_of(statement.body)
                statement.body = [*statement.body[:head], *self._block(statement.body[head:])]
            case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
                statement.body = self._block(statement.body)
                is_endless = isinstance(statement, ast.While) and isinstance(statement.test, ast.Constant)
                if statement.orelse:
                    statement.orelse = self._block(statement.orelse)
                elif not is_endless:
                    statement.orelse = [self._mark(statement.lineno, "branch")]
            case ast.With() | ast.AsyncWith():
                statement.body = self._block(statement.body)
            case ast.Try() | ast.TryStar():
                statement.body = self._block(statement.body)
                for handler in statement.handlers:
                    handler.body = self._block(handler.body)
                statement.orelse = self._block(statement.orelse)
                statement.finalbody = self._block(statement.finalbody)
            case ast.Match():
                for case in statement.cases:
                    case.body = self._block(case.body)
            case _:
                return


def _head_of(body: list[ast.stmt]) -> int:
    """Return how many statements must stay first: the docstring, and imports from the future."""
    count = 0
    for statement in body:
        is_text = count == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            break
        count += 1
    return count


def _computes_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return True  # the text below an attribute, or the ellipsis of a protocol
    is_for_types = (
        isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    )
    return is_for_types or isinstance(statement, ast.Global | ast.Nonlocal)


def excused_lines(tree: ast.Module, source: str) -> set[int]:
    """Return the lines of every statement whose first lines, up to its block, carry a reason."""
    reasons = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and EXCUSE.match(token.string)
    }
    excused: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        end = node.end_lineno or node.lineno
        head_end = node.lineno if isinstance(node, ast.Match) else end
        if isinstance(node, _WITH_BODY):
            head_end = node.body[0].lineno - 1
        if reasons & set(range(node.lineno, max(head_end, node.lineno) + 1)):
            excused.update(range(node.lineno, end + 1))
    return excused
