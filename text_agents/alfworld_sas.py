"""A planning task in SAS+ form as a state machine: what is applicable, what an operator does, is the goal reached.

States are immutable bytes, so that a state can be kept, hashed and continued from (branch groups), and nothing has to
be freed. The format is version 3 of the output of Fast Downward's translator ("output.sas").

Non-obvious behaviour
* `applicable` lists operators in the order of Fast Downward's own successor generator: TextWorld takes the first of the
  operators that share a command, so another order could take another one.
* `Operator.facts` names every effect, also one whose condition does not hold: TextWorld updates its text by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Literal = tuple[int, int]  # (variable, value)


class SasError(ValueError):
    """The text is no SAS+ task of version 3."""


@dataclass(frozen=True)
class Operator:
    name: str  # action and arguments, separated by blanks
    conditions: tuple[Literal, ...]  # by variable
    effects: tuple[tuple[tuple[Literal, ...], int, int], ...]  # (conditions, variable, value)
    facts: tuple[str, ...]  # the atom each effect stands for, "Atom p(a, b)" or "NegatedAtom p(a, b)"


@dataclass(frozen=True)
class Axiom:
    layer: int
    conditions: tuple[Literal, ...]
    variable: int
    value: int


class SasTask:
    """A task read from `text`. Raises SasError where that is not SAS+ version 3."""

    def __init__(self, text: str):
        try:
            self._read(iter(text.split("\n")))
        except (StopIteration, ValueError, IndexError) as error:
            raise SasError(f"not a SAS+ task of version 3: {error}") from error
        self._tree = _grow(list(enumerate(op.conditions for op in self.operators)), 0)
        self.initial = self._derive(bytearray(self._start))

    def _read(self, lines: Iterator[str]) -> None:
        def expect(word: str) -> None:
            if (line := next(lines)) != word:
                raise SasError(f"{word} expected, {line!r} found")

        def literals(count: int) -> list[Literal]:
            return [tuple(map(int, next(lines).split())) for _ in range(count)]

        expect("begin_version")
        if next(lines) != "3":
            raise SasError("another version")
        expect("end_version")
        expect("begin_metric")
        next(lines)
        expect("end_metric")
        layers, self.atoms = [], []
        for _ in range(int(next(lines))):
            expect("begin_variable")
            next(lines)
            layers.append(int(next(lines)))
            self.atoms.append([next(lines) for _ in range(int(next(lines)))])
            expect("end_variable")
        for _ in range(int(next(lines))):
            expect("begin_mutex_group")
            literals(int(next(lines)))
            expect("end_mutex_group")
        expect("begin_state")
        self._start = bytes(int(next(lines)) for _ in layers)
        expect("end_state")
        expect("begin_goal")
        self.goal = tuple(literals(int(next(lines))))
        expect("end_goal")
        self.operators = [self._operator(lines, expect, literals) for _ in range(int(next(lines)))]
        axioms = []
        for _ in range(int(next(lines))):
            expect("begin_rule")
            conditions = literals(int(next(lines)))
            variable, before, value = map(int, next(lines).split())
            conditions += [(variable, before)] if before >= 0 else []
            axioms.append(Axiom(layers[variable], tuple(conditions), variable, value))
            expect("end_rule")
        self._derived = [v for v, layer in enumerate(layers) if layer >= 0]
        depths = sorted({axiom.layer for axiom in axioms})
        self._layers = [[axiom for axiom in axioms if axiom.layer == depth] for depth in depths]

    def _operator(self, lines, expect, literals) -> Operator:
        expect("begin_operator")
        name = next(lines)
        conditions, effects = literals(int(next(lines))), []
        for _ in range(int(next(lines))):
            numbers = [int(n) for n in next(lines).split()]
            when = tuple((numbers[1 + 2 * i], numbers[2 + 2 * i]) for i in range(numbers[0]))
            variable, before, value = numbers[1 + 2 * numbers[0] :]
            effects.append((when, variable, value))
            conditions += [(variable, before)] if before >= 0 else []
        next(lines)  # cost
        expect("end_operator")
        facts = tuple(self.atoms[variable][value] for _, variable, value in effects)
        return Operator(name, tuple(sorted(set(conditions))), tuple(effects), facts)

    def applicable(self, state: bytes) -> list[int]:
        """Numbers of the operators whose conditions hold in `state`."""
        found: list[int] = []
        todo = [self._tree]
        while todo:
            here, switches = todo.pop()
            found += here
            todo += [child for variable, children in switches if (child := children.get(state[variable]))]
        return found

    def apply(self, state: bytes, number: int) -> bytes:
        """The state after an operator; its conditions are not checked again."""
        after = bytearray(state)
        for when, variable, value in self.operators[number].effects:
            if all(state[v] == x for v, x in when):
                after[variable] = value
        return self._derive(after)

    def reached(self, state: bytes) -> bool:
        """Does the goal hold?"""
        return all(state[v] == x for v, x in self.goal)

    def true_atoms(self, state: bytes) -> list[str]:
        """The positive atoms of a state ("Atom p(a, b)"), by variable."""
        named = (atoms[value] for atoms, value in zip(self.atoms, state, strict=True))
        return [name for name in named if name.startswith("Atom ")]

    def _derive(self, state: bytearray) -> bytes:
        """Derived variables from the others: their defaults, then each layer's rules until nothing changes."""
        for variable in self._derived:
            state[variable] = self._start[variable]
        for rules in self._layers:
            changed = True
            while changed:
                changed = False
                for rule in rules:
                    if state[rule.variable] != rule.value and all(state[v] == x for v, x in rule.conditions):
                        state[rule.variable], changed = rule.value, True
        return bytes(state)


def _grow(rows: list[tuple[int, tuple[Literal, ...]]], depth: int):
    """A decision tree over conditions: (operators without further ones, switches, reversed for a stack)."""
    here = [number for number, conditions in rows if len(conditions) == depth]
    split: dict[int, dict[int, list]] = {}
    for row in rows:
        if len(row[1]) > depth:
            variable, value = row[1][depth]
            split.setdefault(variable, {}).setdefault(value, []).append(row)
    switches = [
        (variable, {value: _grow(some, depth + 1) for value, some in split[variable].items()})
        for variable in sorted(split, reverse=True)
    ]
    return here, switches
