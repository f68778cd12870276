"""The text of a game: commands and feedback from TextWorld's context-sensitive grammar, parsed once.

TextWorld's own parsers read the grammar and its queries (each text once a process); deriving text is done here, on
tuples. Transcripts equal stock TextWorld's: `benchmarks/alfworld_speed.py` compares them.

Non-obvious behaviour
* Facts are TextWorld's view, not the planner's: an operator asserts all its effects, in order, also conditional ones
  whose condition fails, and negative facts ("not_p") exist only once an effect has asserted them.
* Two placeholders of a query never stand for the same object.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from vla_wmrl.errors import UserError

Placeholder = tuple[str, str]  # (name, type)
Signature = tuple[str, tuple[str, ...]]  # (predicate, types of its arguments)
Mapping = dict[Placeholder, str]  # what a placeholder stands for

TASK_RULE = re.compile(r'("task"\s*:\s*\[\s*\{\s*"rhs"\s*:\s*)("(?:[^"\\]|\\.)*")')
MAX_DEPTH = 40  # of nested grammar rules


class Entity(NamedTuple):
    """An object or place as the grammar sees it: {o.name}, {o.indefinite}."""

    id: str
    type: str
    name: str
    indefinite: str = "a"
    definite: str = "the"

    def __str__(self) -> str:
        return self.name


class Facts:
    """A set of facts by signature, with each signature's facts sorted when asked for. Copies share sets."""

    def __init__(self, types: dict[str, str], rows: Iterable[Iterable[str]] = ()):
        self._types = types
        self._sets: dict[Signature, frozenset[tuple[str, ...]]] = {}
        self._sorted: dict[Signature, list[tuple[str, ...]]] = {}
        start: dict[Signature, set] = {}
        for predicate, *names in rows:
            start.setdefault(self._signature(predicate, names), set()).add(tuple(names))
        self._sets = {signature: frozenset(names) for signature, names in start.items()}

    def _signature(self, predicate: str, names: Iterable[str]) -> Signature:
        return predicate, tuple(self._types[name] for name in names)

    def copy(self) -> Facts:
        other = Facts(self._types)
        other._sets, other._sorted = dict(self._sets), dict(self._sorted)
        return other

    def assert_fact(self, predicate: str, *names: str) -> None:
        """Add a fact and drop its opposite."""
        opposite = predicate[4:] if predicate.startswith("not_") else f"not_{predicate}"
        for name, keep in ((opposite, False), (predicate, True)):
            signature = self._signature(name, names)
            held = self._sets.get(signature, frozenset())
            if (names in held) != keep:
                self._sets[signature] = held | {names} if keep else held - {names}
                self._sorted.pop(signature, None)

    def of(self, signature: Signature) -> list[tuple[str, ...]]:
        """Arguments of the facts with a signature, sorted."""
        if signature not in self._sorted:
            self._sorted[signature] = sorted(self._sets.get(signature, ()))
        return self._sorted[signature]

    def entities(self) -> set[str]:
        """Everything that some fact mentions."""
        return {name for names in self._sets.values() for fact in names for name in fact}

    def rows(self) -> list[tuple[str, ...]]:
        """All facts as (predicate, arguments...), sorted."""
        return sorted((signature[0], *names) for signature, held in self._sets.items() for names in held)


@lru_cache(maxsize=4096)
def parse_symbols(text: str) -> tuple:
    """A piece of grammar as nodes: ("text", s), ("rule", name), ("eval", code), ("if", node, query), ("list", node).

    Raises UserError for an expression that is more than names, attributes, "+" and "or".
    """
    from textworld.envs.pddl import textgen

    return tuple(map(_node, textgen._parse_and_convert(text, rule_name="symbols")))


def _node(symbol) -> tuple:
    match type(symbol).__name__:
        case "TerminalSymbol":
            return ("text", str(symbol))
        case "NonterminalSymbol":
            return ("rule", str(symbol))
        case "EvalSymbol":
            return ("eval", _compile(symbol.expression))
        case "ConditionalSymbol":
            return ("if", _node(symbol.expression), str(symbol.given) if symbol.given else "")
        case "ListSymbol":
            return ("list", _node(symbol.symbol))
    raise UserError(f"a game's grammar has a symbol of unknown kind: {symbol!r}")


def predicates_asked(nodes: tuple) -> set[str] | None:
    """Predicates (without "not_") that a piece of grammar asks for; None where it names a rule (it may ask for any)."""
    asked: set[str] = set()
    for node in nodes:
        inner = node[1:2] if node[0] in ("if", "list") else ()
        below = predicates_asked(inner)
        if node[0] == "rule" or below is None:
            return None
        queries = [node[2]] if node[0] == "if" and node[2] else []
        asked |= below | {name.removeprefix("not_") for query in queries for name, _ in parse_query(query)}
    return asked


ALLOWED = (
    ast.Expression, ast.Name, ast.Load, ast.Attribute, ast.Constant, ast.BinOp, ast.Add, ast.BoolOp, ast.Or, ast.And,
)  # fmt: skip


def _compile(expression: str):
    """Game files come from anywhere: their expressions may read names and join text, nothing else."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise UserError(f"a game's grammar has an expression that does not parse: {expression!r}") from error
    for node in ast.walk(tree):
        harmless = isinstance(node, ALLOWED) and not str(getattr(node, "attr", "")).startswith("_")
        if not harmless:
            raise UserError(f"a game's grammar has an expression that is not allowed: {expression!r}")
    return compile(tree, "<grammar>", "eval")


@lru_cache(maxsize=4096)
def parse_query(text: str) -> tuple[tuple[str, tuple[Placeholder, ...]], ...]:
    """A conjunctive query as ((predicate, placeholders), ...)."""
    from textworld.logic import Rule

    conditions = Rule.parse_conjunctive_query(text).preconditions
    return tuple((c.name, tuple((p.name, p.type) for p in c.parameters)) for c in conditions)


class Grammar(NamedTuple):
    rules: dict[str, tuple[tuple[str, tuple], ...]]  # rule -> ((condition, nodes), ...): the first that holds is taken
    templates: dict[str, str]  # action -> its command
    feedback: dict[str, str]  # action -> its feedback


def read_grammar(text: str) -> Grammar:
    """A game's grammar. Those that differ only in the sentence of the task are parsed once a process.

    Raises UserError where it does not parse.
    """
    task = TASK_RULE.search(text)
    if task is None:
        return _read_grammar(text)
    shared = _read_grammar(text[: task.start(2)] + '"TASK"' + text[task.end(2) :])
    return shared._replace(rules=shared.rules | {"task": (("", parse_symbols(json.loads(task[2], strict=False))),)})


@lru_cache(maxsize=16)
def _read_grammar(text: str) -> Grammar:
    from tatsu.exceptions import ParseException
    from textworld.envs.pddl.logic import GameLogic

    try:
        parsed = GameLogic(domain="", grammar=text)
    except (ParseException, ValueError) as error:
        raise UserError(f"a game's grammar does not parse: {str(error).splitlines()[0]}") from error
    rules = parsed.grammar._rules.items()
    return Grammar(
        rules={name: tuple((r.condition, tuple(map(_node, r.rhs))) for r in some) for name, some in rules},
        templates={name: action.template for name, action in parsed.actions.items()},
        feedback={name: action.feedback_rule for name, action in parsed.actions.items()},
    )


class Writer:
    """Writes text of one game: grammar, entities and subtypes of each type; the facts are passed with each call."""

    def __init__(self, grammar: Grammar, entities: dict[str, Entity], types: list[list]):
        self._rules, self._entities, self._hierarchy = grammar.rules, entities, _hierarchy(types)
        self._signatures: dict[Signature, list[Signature]] = {}

    def write(self, text: str, facts: Facts, mapping: Mapping) -> str:
        """`text` (a command's template, a feedback, "#intro#") with everything in it replaced.

        Raises UserError for a rule that the grammar does not have.
        """
        variables = {name: self._entities[value] for (name, _), value in mapping.items()}
        return self._expand(parse_symbols(text), facts, mapping, variables, 0)

    def _expand(self, symbols: tuple, facts: Facts, mapping: Mapping, variables: dict, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UserError("a game's grammar has rules that contain themselves")
        return "".join(part for symbol in symbols for part in self._parts(symbol, facts, mapping, variables, depth + 1))

    def _parts(self, symbol: tuple, facts: Facts, mapping: Mapping, variables: dict, depth: int) -> list[str]:
        kind, content = symbol[0], symbol[1]
        if kind == "text":
            return [content]
        if kind == "eval":
            return [str(eval(content, {"__builtins__": {}}, variables))]
        if kind == "rule":
            return [self._expand(self._choose(content, facts, mapping), facts, mapping, variables, depth)]
        if kind == "if":
            return [
                self._expand((content,), facts, *extended, depth)
                for extended in self._matches(symbol[2], facts, mapping, variables)
            ]
        return [self._list(self._parts(content, facts, mapping, variables, depth), facts, mapping, variables, depth)]

    def _list(self, parts: list[str], facts: Facts, mapping: Mapping, variables: dict, depth: int) -> str:
        def rule(name: str) -> str:
            return self._expand((("rule", name),), facts, mapping, variables, depth)

        if len(parts) < 2:
            return parts[0] if parts else rule("list_empty")
        return rule("list_separator").join(parts[:-1]) + rule("list_last_separator") + parts[-1]

    def _choose(self, name: str, facts: Facts, mapping: Mapping) -> tuple:
        for condition, nodes in self._rules.get(name, ()):
            if not condition or next(self.assignments(condition, facts, mapping), None) is not None:
                return nodes
        raise UserError(f"a game's grammar has no rule that applies for #{name}#")

    def _matches(self, query: str, facts: Facts, mapping: Mapping, variables: dict) -> Iterator[tuple[Mapping, dict]]:
        if not query:
            yield mapping, variables
            return
        for found in self.assignments(query, facts, mapping):
            yield found, variables | {name: self._entities[value] for (name, _), value in found.items()}

    def assignments(self, query: str, facts: Facts, mapping: Mapping) -> Iterator[Mapping]:
        """All extensions of `mapping` under which every condition of the query is a fact, in TextWorld's order."""
        yield from self._assign(parse_query(query), facts, mapping)

    def _assign(self, conditions: tuple, facts: Facts, mapping: Mapping) -> Iterator[Mapping]:
        if not conditions:
            yield mapping
            return
        (predicate, placeholders), rest = conditions[0], conditions[1:]
        for signature in self._subsignatures(predicate, placeholders):
            for names in facts.of(signature):
                extended = dict(mapping)
                for placeholder, name in zip(placeholders, names, strict=True):
                    known = extended.get(placeholder)
                    if known != name and (known is not None or name in extended.values()):
                        break
                    extended[placeholder] = name
                else:
                    yield from self._assign(rest, facts, extended)

    def _subsignatures(self, predicate: str, placeholders: tuple[Placeholder, ...]) -> list[Signature]:
        types = tuple(kind for _, kind in placeholders)
        if (predicate, types) not in self._signatures:
            known = [self._hierarchy.get(name) for name in types]
            found = [(predicate, tuple(t.name for t in some)) for some in self._hierarchy.multi_subtypes(known)]
            self._signatures[predicate, types] = found
        return self._signatures[predicate, types]


def _hierarchy(types: list[list]):
    from textworld.logic import Type, TypeHierarchy

    hierarchy, seen = TypeHierarchy(), set()
    for name, parents in types:
        if name not in seen:  # PDDL's root type is called object, and so is one of ALFWorld's
            hierarchy.add(Type(name, parents))
        seen.add(name)
    return hierarchy


def entities_of(ids: Iterable[str], types: dict[str, str]) -> dict[str, Entity]:
    """Readable names ("desk 1") for translated ids ("desk_bar__plus_00_..."), numbered as ALFWorld numbers them.

    The first id of a kind in alphabetical order has the highest number.
    """
    ordered = sorted(ids)
    kinds = {i: i.partition("_bar_")[0] + ("basin" if "basin" in i else "") for i in ordered if "_bar_" in i}
    left: dict[str, int] = {}
    for kind in kinds.values():
        left[kind] = left.get(kind, 0) + 1
    entities = {}
    for i in ordered:
        number = ""
        if i in kinds:
            number, left[kinds[i]] = str(left[kinds[i]]), left[kinds[i]] - 1
        entities[i] = Entity(i, types[i], f"{kinds.get(i, i)} {number}")
    return entities
