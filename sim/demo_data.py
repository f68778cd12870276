"""Demonstrations in memory: what `vla-wmrl sft` trains on.

lerobot's own loader needs 23 ms of CPU for one frame with its chunk of actions (it decodes the images of every frame of
the chunk), three times what a training step of the small policy costs; the same data in memory costs nothing.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sim.protocol import CAMERAS, STATE_KEY
from sim.quiet import quiet_lerobot
from vla_wmrl.errors import UserError
from vla_wmrl.progress import Progress
from vla_wmrl.world_model.looks import SCENES, rendered_every

MINIMAL_STD = 0.02  # of an action: below it is the expert's jitter, which would be blown up to unit variance


@dataclass(frozen=True)
class DemoData:
    """F frames of all episodes in order; L of them, the looks, carry images."""

    looks: np.ndarray  # [L] int64, frame of each look
    images: np.ndarray  # [L, C, H, W, 3] uint8
    state: np.ndarray  # [F, 8] float32
    action: np.ndarray  # [F, 7] float32
    end: np.ndarray  # [F] int64, one past the last frame of the frame's episode
    episode: np.ndarray  # [F] int64
    task: np.ndarray  # [F] int64, index into `tasks`
    tasks: tuple[str, ...]
    scene: np.ndarray | None  # [F, M] float32, metres: where things are, NaN where a task has fewer; None: not recorded
    scene_names: tuple[tuple[str, ...], ...]  # per task, what the first columns of `scene` are ("<object>/pos", 3 each)

    def statistics(self) -> dict[str, dict[str, Tensor]]:
        """Mean and std of state and action, as lerobot's processors take them."""
        stats = {STATE_KEY: _moments(self.state, 1e-4), "action": _moments(self.action, MINIMAL_STD)}
        return {name: {k: torch.from_numpy(v) for k, v in values.items()} for name, values in stats.items()}

    def chunks(self, looks: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """Actions [B, horizon, 7] from each look on and what of them lies past the episode's end [B, horizon] bool."""
        frames = self.looks[looks][:, None] + np.arange(horizon)
        last = self.end[self.looks[looks]][:, None] - 1
        return self.action[np.minimum(frames, last)], frames > last


def _moments(x: np.ndarray, least: float) -> dict[str, np.ndarray]:
    return {"mean": x.mean(0), "std": np.maximum(x.std(0), least).astype(np.float32)}


def load(roots: Sequence[str], scenes: Sequence[str] = (), stride: int = 2) -> DemoData:
    """Joins the LeRobotDatasets in `roots`, with the images of every `stride`-th frame, and single frames in `scenes`.

    Single frames (`vla-wmrl demos --kind=scenes`) have no actions after them: not to be imitated. Raises UserError.
    """
    parts = [_load_one(Path(root), stride) for root in roots] + [_load_scenes(Path(root)) for root in scenes]
    tasks = tuple(sorted({t for part in parts for t in part["tasks"]}))
    sizes = {part["images"].shape[1:] for part in parts}
    if len(sizes) > 1:
        raise UserError(
            f"the data sets in {[*roots, *scenes]} have images of different sizes {sorted(sizes)}: record them alike"
        )
    frames = np.cumsum([0, *(len(part["state"]) for part in parts)])
    episodes = np.cumsum([0, *(part["episode"].max() + 1 for part in parts)])
    names: dict[int, tuple[str, ...]] = {}
    for part in parts:
        names |= {tasks.index(task): fields for task, fields in (part["scene_names"] or {}).items()}
    recorded = all(part["scene"] is not None for part in parts)
    return DemoData(
        looks=np.concatenate([part["looks"] + first for part, first in zip(parts, frames, strict=False)]),
        images=np.concatenate([part["images"] for part in parts]),
        state=np.concatenate([part["state"] for part in parts]),
        action=np.concatenate([part["action"] for part in parts]),
        end=np.concatenate([part["end"] + first for part, first in zip(parts, frames, strict=False)]),
        episode=np.concatenate([part["episode"] + first for part, first in zip(parts, episodes, strict=False)]),
        task=np.concatenate([[tasks.index(part["tasks"][i]) for i in part["task"]] for part in parts]).astype(np.int64),
        tasks=tasks,
        scene=_pad([part["scene"] for part in parts]) if recorded else None,
        scene_names=tuple(names.get(i, ()) for i in range(len(tasks))),
    )


def _pad(arrays: list[np.ndarray]) -> np.ndarray:
    width = max(a.shape[1] for a in arrays)
    return np.concatenate([np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=np.nan) for a in arrays])


def _load_one(root: Path, stride: int) -> dict:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    if not (root / "meta" / "info.json").is_file():
        raise UserError(f"{root} is not a LeRobotDataset (no meta/info.json): record one with `vla-wmrl demos`")
    quiet_lerobot()
    dataset = LeRobotDataset(f"local/{root.name}", root=root)
    missing = [name for name in (*CAMERAS, STATE_KEY, "action") if name not in dataset.meta.features]
    if missing:
        raise UserError(f"{root} lacks {missing}; `vla-wmrl sft` needs the features of lerobot's LIBERO data sets")
    table = dataset.hf_dataset.with_format("numpy", columns=[STATE_KEY, "action", "episode_index", "task_index"])[:]
    episode = np.asarray(table["episode_index"], dtype=np.int64)
    ends = np.asarray(dataset.meta.episodes["dataset_to_index"], dtype=np.int64)
    start = np.searchsorted(episode, episode)  # frames count from their episode's first
    looks = np.flatnonzero((np.arange(len(episode)) - start) % math.lcm(stride, rendered_every(root)) == 0)
    names = dataset.meta.tasks.index
    tasks = dict(zip(dataset.meta.tasks["task_index"], names, strict=True))
    task = np.asarray(table["task_index"], dtype=np.int64)
    fields, scene = _read_scene(root, episode, task, tasks)
    return {
        "looks": looks,
        "images": _decode(dataset, looks),
        "state": np.asarray(table[STATE_KEY], dtype=np.float32),
        "action": np.asarray(table["action"], dtype=np.float32),
        "end": ends[episode],
        "episode": episode,
        "task": task,
        "tasks": [tasks[i] for i in range(len(tasks))],
        "scene": scene,
        "scene_names": fields,
    }


def _decode(dataset, looks: np.ndarray) -> np.ndarray:
    """Images [L, C, H, W, 3] of the looks, straight from the stored PNGs."""
    from PIL import Image

    encoded = dataset.hf_dataset.with_format("arrow", columns=list(CAMERAS))
    out: np.ndarray | None = None
    with Progress(len(looks), f"reading {dataset.root.name}") as bar:
        for first in range(0, len(looks), 256):
            part = encoded[looks[first : first + 256].tolist()]
            for camera, name in enumerate(CAMERAS):
                for row, cell in enumerate(part[name].to_pylist()):
                    image = np.asarray(Image.open(io.BytesIO(cell["bytes"])))
                    if out is None:
                        out = np.empty((len(looks), len(CAMERAS), *image.shape), dtype=np.uint8)
                    out[first + row, camera] = image
            bar.update(len(part))
    return out


def _load_scenes(root: Path) -> dict:
    """Single frames, joined by episode; the columns of `_load_one`."""
    files = sorted((root / SCENES).glob("*.npz"))
    if not files:
        raise UserError(f"{root} holds no scenes: record some with `vla-wmrl demos --kind=scenes`")
    tasks: list[str] = []
    columns: dict[str, list[np.ndarray]] = {k: [] for k in ("images", "state", "action", "scene", "task", "episode")}
    fields = {}
    with Progress(len(files), f"reading {root.name}") as bar:
        for index, file in enumerate(files):
            with np.load(file) as frames:
                task, n = str(frames["task"]), len(frames["state"])
                if task not in tasks:
                    tasks.append(task)
                fields[task], scene = _positions(json.loads(str(frames["layout"])), frames["states"])
                found = (frames["images"], frames["state"], frames["labels"], scene,
                         np.full(n, tasks.index(task)), np.full(n, index))  # fmt: skip
                for column, value in zip(columns.values(), found, strict=True):
                    column.append(value)
            bar.update(1)
    scene = _pad(columns.pop("scene"))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    frames = np.arange(len(scene))
    return {**joined, "looks": frames, "end": frames + 1, "scene": scene, "tasks": tasks, "scene_names": fields}


def _positions(layout: dict[str, list[int]], states: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """Names and values [n, M] float32 (m) of the gripper's position and of everything else's, from states [n, S]."""
    wanted = ("robot/eef_pos", *(k for k in layout if k.endswith("/pos")))
    return wanted, np.concatenate([states[:, slice(*layout[k])] for k in wanted], axis=1).astype(np.float32)


def _read_scene(root: Path, episode: np.ndarray, task: np.ndarray, tasks: dict[int, str]):
    """Positions of the gripper and of everything else, per frame, from `traces/`; (None, None) where there are none."""
    files = sorted((root / "traces").glob("episode_*.npz"))
    if len(files) != episode.max() + 1:
        return None, None
    rows, fields = [], {}
    for index, file in enumerate(files):
        with np.load(file) as trace:
            states = trace["states"][: int((episode == index).sum())]
            wanted, positions = _positions(json.loads(str(trace["layout"])), states)
            rows.append(positions)
        fields[tasks[int(task[np.argmax(episode == index)])]] = wanted
    return fields, _pad(rows)
