"""ALFWorld games as files and as immutable machines: find them, check them, name them by a hash, start and step them.

A game is one file, `<split>/<task_type>-<object>-<movable>-<target>-<scene>/<trial>/game.tw-pddl`: JSON with the PDDL,
the grammar, a walkthrough. Official splits: train 3,553, valid_seen 140 (the papers' ID), valid_unseen 134 (OOD).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from text_agents import alfworld_sas, alfworld_text, alfworld_translate
from vla_wmrl.errors import UserError, nearest, require

SPLITS = {"train": 3553, "valid_seen": 140, "valid_unseen": 134, "valid_train": 200}  # games of the official release
TASK_TYPES = (
    "pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep", "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep", "pick_two_obj_and_place",
)  # fmt: skip
FILE_NAME = "game.tw-pddl"
DATA_VARIABLE = "ALFWORLD_DATA"
FOLDERS = ("", "json_2.1.3", "json_2.1.2", "json_2.1.1")  # where releases keep their splits
NOTHING_HAPPENS = "Nothing happens."
KEYS = ("pddl_domain", "pddl_problem", "grammar")
OLD_GRAMMAR = 'template :: "put {o} in/on {r}"'  # of releases before alfworld 0.4: "put X in/on Y" for "move X to Y"


@dataclass(frozen=True)
class GameState:
    """A point in a game. Never changed, so that any number of continuations may start from it."""

    values: bytes  # the planner's state
    facts: alfworld_text.Facts  # the text's view of it
    commands: dict[str, int]  # admissible command -> operator

    @property
    def admissible(self) -> list[str]:
        return sorted(self.commands)


@dataclass(frozen=True)
class Game:
    """One game. The tables are read when first needed, from memory or the disk cache."""

    path: Path
    name: str  # folder and trial, the name within its split
    task_type: str
    digest: str  # sha256 of the file

    @cached_property
    def data(self) -> dict:
        return read_game_file(self.path)

    @property
    def walkthrough(self) -> list[str]:
        return list(self.data.get("walkthrough") or [])

    @cached_property
    def task(self) -> str:
        """The task in words ("put a watch in coffeetable.")."""
        found = alfworld_text.TASK_RULE.search(self.data["grammar"])
        return json.loads(found[2], strict=False).removeprefix("Your task is to:").strip() if found else ""

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.data)

    def release(self) -> None:
        """Let go of the tables (megabytes a game); they are read again when needed. States that exist stay usable."""
        for name in ("machine", "data"):
            self.__dict__.pop(name, None)

    def start(self) -> tuple[GameState, str]:
        """The first state and the text that opens the game."""
        return self.machine.start()

    def step(self, state: GameState, command: str) -> tuple[GameState, str]:
        """The next state and what is said; a command that is not admissible changes nothing: "Nothing happens."."""
        return self.machine.step(state, command)

    def won(self, state: GameState) -> bool:
        return self.machine.sas.reached(state.values)


class Machine:
    """What runs a game: its planning task, its text, its start."""

    def __init__(self, data: dict, folder: Path | None = None):
        tables = alfworld_translate.tables_of(data["pddl_domain"], data["pddl_problem"], folder)
        self.sas = alfworld_sas.SasTask(tables.sas)
        self.grammar = alfworld_text.read_grammar(data["grammar"])
        self._facts = alfworld_text.Facts(tables.objects, tables.facts)
        self.entities = alfworld_text.entities_of(self._facts.entities(), tables.objects)
        self._writer = alfworld_text.Writer(self.grammar, self.entities, tables.types)
        self._parameters = {name: [tuple(p) for p in some] for name, some in tables.actions.items()}
        self._commands: dict[int, str] = {}
        self._names = {i: entity.name for i, entity in self.entities.items()}
        effects = (fact for op in self.sas.operators for fact in op.facts)
        self._changing = {alfworld_translate.parse_atom(fact)[0].removeprefix("not_") for fact in effects}

    def start(self) -> tuple[GameState, str]:
        facts = self._facts.copy()
        text = self._writer.write("#intro#", facts, {})
        return GameState(self.sas.initial, facts, self._admissible(self.sas.initial, facts)), text

    def step(self, state: GameState, command: str) -> tuple[GameState, str]:
        number = state.commands.get(command.strip())
        if number is None:
            return state, NOTHING_HAPPENS
        operator, facts = self.sas.operators[number], state.facts.copy()
        values = self.sas.apply(state.values, number)
        for fact in operator.facts:
            facts.assert_fact(*alfworld_translate.parse_atom(fact))
        text = self._writer.write(self.grammar.feedback[operator.name.split()[0]], facts, self._mapping(operator.name))
        return GameState(values, facts, self._admissible(values, facts)), text

    def _mapping(self, operator: str) -> alfworld_text.Mapping:
        action, *arguments = operator.split()  # parameters that the translator made of quantifiers have no argument
        return dict(zip(self._parameters[action], arguments, strict=False))

    def _admissible(self, values: bytes, facts: alfworld_text.Facts) -> dict[str, int]:
        commands: dict[str, int] = {}
        for number in self.sas.applicable(values):
            commands.setdefault(self._command(number, facts), number)
        return commands

    def _command(self, number: int, facts: alfworld_text.Facts) -> str:
        """An operator's command; kept, unless its template asks for facts that change."""
        if number in self._commands:
            return self._commands[number]
        name = self.sas.operators[number].name
        template = self.grammar.templates[name.split()[0]]
        text = self._writer.write(template, facts, self._mapping(name))
        if "{" in text:  # TextWorld fills in what the grammar left in braces
            text = text.format(**self._names)
        asked = alfworld_text.predicates_asked(alfworld_text.parse_symbols(template))
        if asked is not None and not asked & self._changing:
            self._commands[number] = text
        return text


def read_game_file(path: Path) -> dict:
    """The JSON of a game. Raises UserError where it is none, or of a release with another grammar."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"no game at {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: the file is damaged, copy it again") from error
    missing = [key for key in KEYS if not isinstance(data, dict) or key not in data]
    require(not missing, f"{path} is no ALFWorld game: it has no {' and no '.join(missing)}")
    require(
        OLD_GRAMMAR not in data["grammar"],
        f"{path} has the grammar of alfworld before 0.4 (put X in/on Y): use games of json_2.1.2 or later",
    )
    return data


def data_folder(data: str | None) -> Path:
    """The folder that holds the splits, from a flag or $ALFWORLD_DATA. Raises UserError where there is none."""
    chosen = data or os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise UserError(
            f"no games: set {DATA_VARIABLE} or pass --data=FOLDER with splits of game.tw-pddl files, "
            "or make some with `vla-wmrl text games`"
        )
    base = Path(chosen).expanduser()
    require(base.is_dir(), f"{DATA_VARIABLE}: no folder {base}")
    for folder in FOLDERS:
        if any((base / folder / split).is_dir() for split in SPLITS):
            return base / folder
    raise UserError(f"{base} holds no split of ALFWorld ({', '.join(SPLITS)}): make some with `vla-wmrl text games`")


def find_games(
    split: str, data: str | None = None, task_types: Sequence[str] | None = None, limit: int | None = None
) -> list[Game]:
    """Games of a split, by name. Raises UserError for an unknown split or type and where none is left.

    limit: keep this many, spread evenly over the sorted list.
    """
    require(split in SPLITS, f"unknown split {split!r}{nearest(split, list(SPLITS))}")
    for kind in task_types or ():
        require(kind in TASK_TYPES, f"unknown task type {kind!r}{nearest(kind, TASK_TYPES)}")
    folder = data_folder(data) / split
    require(folder.is_dir(), f"split {split} is not in {folder.parent}")
    paths = sorted(folder.glob(f"*/*/{FILE_NAME}"))
    paths = [p for p in paths if not task_types or p.parts[-3].split("-")[0] in task_types]
    # scenes with sliced or movable receptacles are in no official split of the text games
    paths = [p for p in paths if "movable" not in p.parts[-3] and "Sliced" not in p.parts[-3]]
    require(len(paths) > 0, f"split {split} of {folder.parent} has no game" + (" of these types" if task_types else ""))
    if limit is not None and limit < len(paths):
        paths = [paths[i * len(paths) // limit] for i in range(limit)]
    return [open_game(path) for path in paths]


def open_game(path: str | Path) -> Game:
    """A game by the path of its file. Raises UserError where there is none."""
    path = Path(path)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"no game at {path}: {error.strerror}") from error
    return Game(path, "/".join(path.parts[-3:-1]), path.parts[-3].split("-")[0] if len(path.parts) > 2 else "", digest)


def games_hash(games: Sequence[Game]) -> str:
    """One hash for a set of games, whatever its order and folder: 16 hex digits of sha256."""
    lines = sorted(f"{game.name} {game.digest}" for game in games)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
