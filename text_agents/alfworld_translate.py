"""From PDDL to the tables a game runs on, translated once and kept: in memory, and on disk for every process.

Translating takes Fast Downward's translator 0.2-0.4 s a game, and stock TextWorld does it four times an episode. The
tables are plain JSON, compressed, with a digest in front: no pickle, and a torn or changed file is noticed and rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import warnings
import zlib
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from text_agents.alfworld_sas import SasTask
from vla_wmrl.errors import UserError

FORMAT = 1  # of the stored tables: raise it when their meaning changes
CACHE_VARIABLE = "VLA_WMRL_ALFWORLD_CACHE"


@dataclass(frozen=True)
class Tables:
    """What a game needs of its PDDL. Names are the translator's, in lower case."""

    sas: str  # the task in SAS+ form
    types: list[list]  # [name, [supertypes]], in order of declaration
    objects: dict[str, str]  # object -> type
    facts: list[list[str]]  # [predicate, arguments...] that hold at the start, static ones included
    actions: dict[str, list[list[str]]]  # action -> [[parameter, type], ...]


def cache_folder() -> Path:
    """Where translated games are kept: $VLA_WMRL_ALFWORLD_CACHE, or a folder under the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "vla_wmrl" / "alfworld"


def tables_of(domain: str, problem: str, folder: Path | None = None) -> Tables:
    """The tables of a PDDL problem, from the disk cache in `folder` (default `cache_folder()`) where it has them.

    Raises UserError where the translator refuses the PDDL.
    """
    folder = cache_folder() if folder is None else folder
    path = folder / f"{_key(domain, problem)}.tables"
    found = _read(path)
    if found is None:
        found = translate(domain, problem)
        _write(path, found)
    return found


@cache
def _versions() -> str:
    return f"{FORMAT} {version('fast-downward-textworld')}"


def _key(domain: str, problem: str) -> str:
    return hashlib.sha256("\0".join((_versions(), domain, problem)).encode()).hexdigest()[:40]


def _read(path: Path) -> Tables | None:
    """Stored tables, or None where there are none or the file is not what was written."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, packed = stored[:32], stored[32:]
    if hashlib.sha256(packed).digest() != digest:
        return None
    return Tables(**json.loads(zlib.decompress(packed)))


def _write(path: Path, tables: Tables) -> None:
    """By one rename, from a draft of its own: processes that write the same game at once each leave a whole file."""
    packed = zlib.compress(json.dumps(asdict(tables), separators=(",", ":")).encode(), 6)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as draft:
            draft.write(hashlib.sha256(packed).digest() + packed)
        os.replace(draft.name, path)
    except OSError as error:
        warnings.warn(f"translated games are not kept: {path.parent}: {error.strerror}", stacklevel=2)


def translate(domain: str, problem: str, optimize: bool = False) -> Tables:
    """Tables of a PDDL problem, translated now. Raises UserError where the translator refuses it.

    optimize: drop what no plan needs (for planning only: such a task has fewer commands).
    """
    import fast_downward

    before = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(domain, problem, optimize=optimize)
    except (Exception, SystemExit) as error:  # the translator asserts, exits and raises what its parsers raise
        raise UserError(f"the PDDL of a game does not translate: {type(error).__name__} {error}") from error
    finally:
        sys.argv = before  # the translator replaces it
    return Tables(
        sas=sas,
        types=[[t.name, list(t.supertype_names)] for t in task.types],
        objects={o.name: o.type_name for o in task.objects},
        facts=_initial_facts(task, sas),
        actions={a.name: [[p.name.strip("?"), p.type_name] for p in a.parameters] for a in task.actions},
    )


def _initial_facts(task, sas: str) -> list[list[str]]:
    """Facts at the start as TextWorld knows them: the problem's own and those of the first state, derived too."""
    facts = []
    for entry in task.init:
        if hasattr(entry, "fluent"):  # a numeric assignment: distances and costs, which the text does not mention
            if entry.fluent.symbol != "total-cost" and not str(entry.expression.value).isdigit():
                facts.append([str(entry.expression.value), *entry.fluent.args])
        elif entry.predicate != "=":
            facts.append([entry.predicate, *entry.args])
    machine = SasTask(sas)
    facts += [list(parse_atom(name)) for name in machine.true_atoms(machine.initial)]
    return sorted(map(list, {tuple(fact) for fact in facts}))


def parse_atom(name: str) -> tuple[str, ...]:
    """ "Atom p(a, b)" -> ("p", "a", "b"); a NegatedAtom's predicate gets TextWorld's prefix "not_"."""
    kind, _, rest = name.partition(" ")
    predicate, _, arguments = rest.partition("(")
    names = [argument for argument in arguments[:-1].split(", ") if argument]
    return (("not_" if kind == "NegatedAtom" else "") + predicate, *names)
