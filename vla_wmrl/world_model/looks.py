"""Looks of demonstrations: the states at their frames, and the features that a policy's frozen vision gives there."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 64
SCENES = "scenes"  # folder of single frames in a folder that `vla-wmrl demos --kind=scenes` made
Looks = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]  # task -> inits [n], states [n, S], features [n, n_tokens, D]


def rendered_every(folder: str | Path) -> int:
    """Frames between two that were rendered; those between repeat an image, which is not what was seen there."""
    first = Path(folder) / "traces" / "episode_000000.npz"
    if not first.is_file():
        return 1
    with np.load(first) as trace:
        return int(trace["render_every"]) if "render_every" in trace else 1


def demonstration_looks(folder: str | Path, policy: Any, every: int = 4) -> Looks:
    """Every `every`-th frame of the demonstrations in `folder` (a LeRobotDataset with `traces/`), seen by `policy`.

    Where not all frames were rendered: every n-th, n the least common multiple of both.
    """
    import pyarrow.parquet as pq
    from PIL import Image

    folder = Path(folder)
    every = math.lcm(every, rendered_every(folder))
    cameras = list(policy.cameras)
    columns = [*cameras, "observation.state", "episode_index", "frame_index"]
    traces: dict[int, Any] = {}
    found: dict[int, list] = {}
    for file in sorted((folder / "data").rglob("*.parquet")):
        for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH * every, columns=columns):
            rows = [r for r in batch.to_pylist() if r["frame_index"] % every == 0]
            if not rows:
                continue
            picture = lambda cell: np.asarray(Image.open(io.BytesIO(cell["bytes"])))  # noqa: E731
            images = {c: torch.from_numpy(np.stack([picture(r[c]) for r in rows])) for c in cameras}
            proprio = torch.tensor([r["observation.state"] for r in rows])
            seen = policy.encode(images, proprio, [""] * len(rows))["features"].numpy()
            for row, features in zip(rows, seen, strict=True):
                episode = row["episode_index"]
                if episode not in traces:
                    data = np.load(folder / "traces" / f"episode_{episode:06d}.npz")
                    traces[episode] = (int(data["task_id"]), int(data["init_id"]), data["states"])
                task_id, init_id, states = traces[episode]
                found.setdefault(task_id, []).append((init_id, states[row["frame_index"]], features))
    return {t: tuple(np.stack(column) for column in zip(*looks, strict=True)) for t, looks in found.items()}


def scene_looks(folder: str | Path, policy: Any) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Task, inits [n], states [n, S] and features [n, n_tokens, D] of each episode of single frames in `folder`."""
    for file in sorted((Path(folder) / SCENES).glob("*.npz")):
        with np.load(file) as frames:
            images = {c: torch.from_numpy(frames["images"][:, i]) for i, c in enumerate(policy.cameras)}
            proprio = torch.from_numpy(frames["state"])
            seen = policy.encode(images, proprio, [""] * len(proprio))["features"].numpy()
            yield int(frames["task_id"]), np.full(len(seen), int(frames["init_id"])), frames["states"], seen
