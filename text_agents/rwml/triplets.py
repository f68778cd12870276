"""Triplets (history, action, next state) for next-state prediction: parquet files, and a card that says where from.

RWML (arXiv 2602.05842, s2.2): from the model's own rollouts, 90 % to train and 10 % to validate, split by task so that
no task is on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vla_wmrl.errors import UserError, require
from vla_wmrl.tracking import write_json

VERSION = 1


@dataclass(frozen=True)
class Triplet:
    """One transition, with all that a prompt needs."""

    env: str  # alfworld, or tau2 and a domain
    task_id: str
    task: str  # the task in words (tau2: what is known of who the user is; what the user wants is left out)
    rollout: int
    step: int
    history: str  # JSON list of [action, observation] before this step, oldest first
    observation: str  # the current one
    action: str
    next_state: str
    kind: str  # alfworld, user or tool: which reward scores it
    valid_action: bool

    @property
    def id(self) -> str:
        """A name by content."""
        text = "\0".join((self.env, self.task_id, self.history, self.observation, self.action, self.next_state))
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    @property
    def turns(self) -> list[tuple[str, str]]:
        return [tuple(turn) for turn in json.loads(self.history)]


def from_episode(
    env: str,
    task_id: str,
    task: str,
    rollout: int,
    commands: Sequence[str],
    observations: Sequence[str],
    kinds: Sequence[str] | None = None,
    valid: Sequence[bool] | None = None,
) -> list[Triplet]:
    """Triplets of one episode: observations [n + 1] around n commands; kinds and valid [n]."""
    require(len(observations) == len(commands) + 1, "an episode has one observation more than commands")
    turns, rows = [], []
    for i, (action, after) in enumerate(zip(commands, observations[1:], strict=True)):
        rows.append(
            Triplet(
                env, task_id, task, rollout, i, json.dumps(turns), observations[i], action, after,
                kinds[i] if kinds else env, bool(valid[i]) if valid else True,
            )
        )  # fmt: skip
        turns = [*turns, [action, observations[i]]]
    return rows


def without_duplicates(triplets: Sequence[Triplet]) -> list[Triplet]:
    """The first of each content: N rollouts of one task begin alike."""
    return list({t.id: t for t in reversed(triplets)}.values())[::-1]


def drop_invalid(triplets: Sequence[Triplet], keep: float, seed: int = 0) -> list[Triplet]:
    """Valid actions and a share `keep` of the others (RWML removes "some"), drawn by (seed, id)."""
    from text_agents.rwml.easy import keep as draw

    kept = draw([t.id for t in triplets], [not t.valid_action for t in triplets], keep, seed)
    return [t for t, k in zip(triplets, kept, strict=True) if k]


def split_by_task(triplets: Sequence[Triplet], val: float = 0.1, seed: int = 0) -> tuple[list[Triplet], list[Triplet]]:
    """(train, val), whole tasks on one side. Raises UserError where a side would be empty."""
    tasks = sorted({(t.env, t.task_id) for t in triplets}, key=lambda k: hashlib.sha256(f"{seed} {k}".encode()).hexdigest())
    held = set(tasks[: max(1, round(val * len(tasks)))])
    train = [t for t in triplets if (t.env, t.task_id) not in held]
    rest = [t for t in triplets if (t.env, t.task_id) in held]
    require(bool(train) and bool(rest), f"{len(tasks)} tasks cannot be split into train and val: collect more of them")
    return train, rest


def write(folder: str | Path, splits: dict[str, Sequence[Triplet]], source: dict) -> dict:
    """<split>.parquet for each split, and card.json; returns the card. Raises UserError for an empty split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    card = {"version": VERSION, "source": source, "splits": {}}
    for name, triplets in splits.items():
        require(len(triplets) > 0, f"no triplets for split {name}: collect more rollouts")
        pq.write_table(pa.Table.from_pylist([asdict(t) for t in triplets]), folder / f"{name}.parquet")
        card["splits"][name] = {
            "triplets": len(triplets), "tasks": len({(t.env, t.task_id) for t in triplets}),
            "kinds": dict(Counter(t.kind for t in triplets)), "envs": dict(Counter(t.env for t in triplets)),
            "valid_actions": sum(t.valid_action for t in triplets) / len(triplets),
            "duplicates": len(triplets) - len({t.id for t in triplets}),
            "digest": hashlib.sha256("\n".join(t.id for t in triplets).encode()).hexdigest()[:16],
        }  # fmt: skip
    write_json(folder / "card.json", card)
    return card


def read(folder: str | Path, split: str) -> list[Triplet]:
    """Triplets of a split. Raises UserError where there are none or they are of another version."""
    import pyarrow.parquet as pq

    path = Path(folder) / f"{split}.parquet"
    require(path.is_file(), f"no triplets at {path}: collect some with `vla-wmrl text triplets`")
    rows = pq.read_table(path).to_pylist()
    names = {f.name for f in fields(Triplet)}
    if not rows or set(rows[0]) != names:
        raise UserError(f"{path} does not hold triplets of version {VERSION}: collect them again")
    return [Triplet(**row) for row in rows]


def read_all(folder: str | Path) -> list[Triplet]:
    """Triplets of all splits in a folder. Raises UserError where there are none."""
    names = sorted(path.stem for path in Path(folder).glob("*.parquet"))
    require(bool(names), f"no triplets at {folder}: collect some with `vla-wmrl text triplets`")
    return [triplet for name in names for triplet in read(folder, name)]
