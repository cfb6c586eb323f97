"""Edits of whole statements of a training loop: one is left out, or runs every few steps."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, TypeGuard

TextEdit = tuple[int, int, str]
"""Offsets in bytes of what is replaced, and the text in its place."""
EVERY: Final = 50
"""Times of which a statement runs in one, if the training can go without it."""
_STEPPING: Final = ("backward", "step", "train_step", "training_step")
"""Names of functions by whose calls the loop over the steps is known."""
_STEPS_OF_LOOPS: Final = ("train_step", "training_step")
"""Names of functions that are a step themselves, called by a loop elsewhere."""
_COUNTERS: Final = ("batch_idx", "global_step", "iteration", "step")
"""Names of arguments that count the steps."""
_JUMPS: Final = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await)
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


class Source:
    """Text of a program, with its syntax tree; raises SyntaxError."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.data.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    @cached_property
    def functions(self) -> Mapping[str, ast.FunctionDef]:
        """Return the functions that the text defines, by their name."""
        return {
            node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)
        }

    def reached(self, node: ast.AST) -> list[ast.AST]:
        """Return what runs with a node: all below it, and the functions of the text it calls."""
        found, known = [*ast.walk(node)], set[str]()
        for each in found:
            name = _called(each) if isinstance(each, ast.Call) else ""
            if name in self.functions and name not in known:
                known.add(name)
                found += ast.walk(self.functions[name])
        return found

    def steps(self, node: ast.AST) -> bool:
        """Return whether a node, or a function of the text that it calls, trains: by names."""
        calls = [_called(each) for each in self.reached(node) if isinstance(each, ast.Call)]
        others = (set(name.split("_")) for name in calls if name not in self.functions)
        trains = any({"backward", "step"} & words for words in others)
        return trains or any(name in _STEPPING for name in calls)

    @cached_property
    def above(self) -> Mapping[ast.AST, ast.AST]:
        """Return the node that holds each node."""
        nodes = ast.walk(self.tree)
        return {below: node for node in nodes for below in ast.iter_child_nodes(node)}

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the offsets in bytes of a node."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[end_line - 1] + end_column

    def edited(self, edits: Iterable[TextEdit]) -> str:
        """Return the text with edits, none of which overlap; raises SyntaxError if it is none."""
        data = self.data
        for start, end, text in sorted(edits, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        changed = data.decode()
        ast.parse(changed)
        return changed

    def calls(self, name: str) -> list[int]:
        """Return the lines at which a function is called, by its name."""
        calls = (node for node in ast.walk(self.tree) if isinstance(node, ast.Call))
        return [call.lineno for call in calls if _called(call) == name]

    def statements(self, line: int, call: str) -> list[ast.stmt]:
        """Return the innermost statements whose calls of a function, or, without a name, which
        themselves, are at a line.
        """
        found = dict[ast.stmt, None]()
        for node in ast.walk(self.tree):
            is_wanted = isinstance(node, ast.stmt) if not call else isinstance(node, ast.Call)
            if not is_wanted or (isinstance(node, ast.Call) and _called(node) != call):
                continue
            assert isinstance(node, ast.stmt | ast.Call)
            if node.lineno <= line <= (node.end_lineno or node.lineno):
                around = (node, *self.around(node))
                found[next(each for each in around if isinstance(each, ast.stmt))] = None
        # The innermost come last.
        return list(found) if call else [*found][-1:]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that hold a node, the innermost first."""
        while node in self.above:
            node = self.above[node]
            yield node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements that follow each other, of which one is given."""
        bodies = vars(self.above[statement]).values()
        return next(body for body in bodies if isinstance(body, list) and statement in body)

    def is_alone(self, statement: ast.stmt) -> bool:
        """Return whether a statement has its lines for itself, with a comment at most."""
        begin, end = self.span(statement)
        before = self.data[self.starts[statement.lineno - 1] : begin]
        after = self.data[end:].partition(b"\n")[0].strip()
        is_branch = self.data[begin:].startswith(b"elif")
        return not before.strip() and not is_branch and (not after or after.startswith(b"#"))


def remove(source: Source, line: int, call: str) -> set[TextEdit]:
    """Return the edits that leave out the calls of a function at a line; none where its value is
    used.
    """
    edits: set[TextEdit] = set()
    for statement in source.statements(line, call):
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
            return set()
        begin, end = source.span(statement)
        if source.is_alone(statement) and len(source.block(statement)) > 1:
            last = statement.end_lineno or statement.lineno
            edits.add((source.starts[statement.lineno - 1], source.starts[last], ""))
        else:
            edits.add((begin, end, "pass"))
    return edits


def run_every(source: Source, line: int, call: str) -> set[TextEdit]:
    """Return the edits that have the calls of a function at a line run in one of `EVERY` steps
    that come there.

    It takes a condition that is there already, or puts one around all that does nothing else for
    the loop. There are none where the loop has no counter, or needs what is computed there.
    """
    for loop, within in _within_loop(source, line, call):
        for node in within:
            if isinstance(node, ast.If) and (every := _modulus(node.test)) is not None:
                begin, end = source.span(every)
                text = source.data[begin:end].decode()
                more = int(text) * EVERY if text.isdigit() else f"({EVERY} * ({text}))"
                return {(begin, end, str(more))}
        counter, group = _counter(loop), _needless(source, within)
        if group and counter:
            return _under_condition(source, group, f"if {counter} % {EVERY} == 0:")
    return set()


def needless_statements(source: Source, line: int, function: str) -> list[ast.stmt]:
    """Return the largest statement around a line that its loop over the steps can go without, with
    those after it that use what it sets.

    Where the line has none, ``function`` is what it is in, and the first call of that is meant, or
    of a function that calls it.
    """
    places, known = [(line, ""), *((at, function) for at in source.calls(function))], {function}
    for at, call in places:
        for _, within in _within_loop(source, at, call):
            if found := _needless(source, within):
                return found
        for statement in source.statements(at, call)[:1]:
            caller = next((x.name for x in source.around(statement) if _is_function(x)), "")
            if caller and caller not in known:
                known.add(caller)
                places += [(above, caller) for above in source.calls(caller)]
    return []


def _within_loop(source: Source, line: int, call: str) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Yield the loop over the steps that the calls of a function at a line are in, or the function
    that is a step, and what holds them within it, the innermost first; nothing where they are what
    trains.
    """
    for statement in source.statements(line, call)[:1]:
        around = [*source.around(statement)]
        scope = next(node for node in around if isinstance(node, _SCOPES))
        around = around[: around.index(scope) + 1]
        loop = next((node for node in around if _is_loop(source, node)), None)
        if loop is None and _is_step(source, scope):
            loop = scope
        if loop is not None and not source.steps(statement):
            yield loop, [statement, *around[: around.index(loop)]]


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


def _is_loop(source: Source, node: ast.AST) -> bool:
    return isinstance(node, ast.For | ast.While) and source.steps(node)


def _is_step(source: Source, scope: ast.AST) -> bool:
    """Return whether a function is a step of a loop elsewhere: by its name, or as it trains without
    a loop over that.
    """
    if not _is_function(scope) or scope.name in _STEPPING:
        return _is_function(scope) and scope.name in _STEPS_OF_LOOPS
    return source.steps(scope) and not any(_is_loop(source, node) for node in ast.walk(scope))


def _needless(source: Source, within: Sequence[ast.AST]) -> list[ast.stmt]:
    """Return the outermost of these that trains nothing, up to the last statement that uses what it
    sets, if the loop can go without them.
    """
    steps_too = [node for node in within if source.steps(node)]
    top = within[(within.index(steps_too[0]) if steps_too else len(within)) - 1]
    scope = next(node for node in source.around(within[-1]) if isinstance(node, _SCOPES))
    if not isinstance(top, ast.stmt):
        return []
    block = source.block(top)
    at, end, stored = block.index(top), 0, _stored(top)
    group = [top]
    while len(group) != end:
        end = len(group)
        uses = [n for n in range(at + 1, len(block)) if stored & _variables(block[n], ast.Load)]
        group = block[at : max(uses, default=at) + 1]
        stored = set().union(*map(_stored, group))
    return group if _can_be_left_out(source, group, scope) else []


def _called(call: ast.Call) -> str:
    function = call.func
    return getattr(function, "attr", getattr(function, "id", ""))


def _modulus(test: ast.expr) -> ast.expr | None:
    """Return the 50 of ``step % 50 == 0``, if the condition asks for that."""
    match test:
        case ast.BoolOp(op=ast.And(), values=tests):
            return next(filter(None, map(_modulus, tests)), None)
        case ast.UnaryOp(op=ast.Not(), operand=ast.BinOp() as divided):
            pass
        case ast.Compare(left=ast.BinOp() as divided, ops=[ast.Eq()]):
            pass
        case _:
            return None
    match divided:
        case ast.BinOp(
            op=ast.Mod(),
            right=(
                ast.Constant(value=int()) | ast.Name() | ast.Attribute() | ast.IfExp()
            ) as number,
        ):
            return number
    return None


def _counter(loop: ast.AST) -> str:
    """Return the variable that counts the rounds of a loop, or the calls of a function that is a
    step; empty without one.
    """
    match loop:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=name), *_]),
            iter=ast.Call(func=ast.Name(id="enumerate")),
        ):
            return name
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"))):
            return name
        case ast.FunctionDef(args=ast.arguments(args=arguments)):
            if names := [each.arg for each in arguments if each.arg in _COUNTERS]:
                return names[0]
    for node in ast.walk(loop):
        match node:
            case ast.AugAssign(
                target=ast.Name() | ast.Attribute() as target,
                op=ast.Add(),
                value=ast.Constant(value=1),
            ):
                return ast.unparse(target)
    return ""


def _can_be_left_out(source: Source, group: Sequence[ast.stmt], scope: ast.AST) -> bool:
    """Return whether the rest of a program goes on without statements on lines of their own."""
    mine = [node for each in group for node in ast.walk(each)]
    reached = [node for each in group for node in source.reached(each)]
    texts = [node for node in mine if isinstance(node, ast.Constant | ast.JoinedStr)]
    called = (_called(node) for node in reached if isinstance(node, ast.Call))
    if not all(map(source.is_alone, group)) or any(isinstance(node, _JUMPS) for node in mine):
        return False
    if any(map(source.steps, group)):
        return False
    # What is changed in place, by PyTorch's names, may be weights.
    if any(name == "zero_grad" or (name.endswith("_") and name[-2:] != "__") for name in called):
        return False
    if any(node.lineno != node.end_lineno for node in texts):
        return False
    stored = set().union(*map(_stored, group))
    others = {*ast.walk(scope)} - {*mine}
    for function in ast.walk(scope):
        if isinstance(function, ast.FunctionDef) and function is not scope:
            # What it is given or sets is another variable.
            own = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
            own |= _stored(function)
            others -= {each for each in ast.walk(function) if getattr(each, "id", "") in own}
    fields = {node.attr for node in reached if _is_field(node, ast.Store)}
    elsewhere = {*ast.walk(source.tree)}.difference(reached)
    return not any(
        isinstance(node, ast.Name) and node.id in stored and isinstance(node.ctx, ast.Load)
        for node in others
    ) and not any(_is_field(node, ast.Load) and node.attr in fields for node in elsewhere)


def _is_field(node: ast.AST, use: type[ast.expr_context]) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, use)


def _variables(within: ast.stmt, use: type[ast.expr_context]) -> set[str]:
    """Return the variables that a statement reads, or sets."""
    names = [node for node in ast.walk(within) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, use)}


def _stored(within: ast.stmt) -> set[str]:
    """Return the variables that a statement sets, less those that it declares to be global."""
    declared = [node for node in ast.walk(within) if isinstance(node, ast.Global | ast.Nonlocal)]
    outer = {name for node in declared for name in node.names}
    return _variables(within, ast.Store) - outer


def _under_condition(source: Source, group: Sequence[ast.stmt], condition: str) -> set[TextEdit]:
    starts = source.starts[group[0].lineno - 1 : group[-1].end_lineno]
    line = source.data[starts[0] : source.span(group[0])[0]]
    indent = line.decode()
    step = "\t" if indent.startswith("\t") else "    "
    end = "\r\n" if b"\r\n" in source.data else "\n"
    head = (starts[0], starts[0], f"{indent}{condition}{end}{step}")
    return {head, *((start, start, step) for start in starts[1:])}
