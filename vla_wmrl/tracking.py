"""What a run writes down as it goes: the run folder, metrics as JSON lines (and other sinks), and the step ledger.

Non-obvious behaviour
* JSON lines are flushed row by row; a row torn by a crash is dropped by whoever reads or resumes.
* NaN and infinities become null: JSON has none.
* `Ledger.phase` nests and counts exclusively: the seconds of an inner phase are not the outer one's, so they add up.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from vla_wmrl import arguments
from vla_wmrl.errors import UserError, require


def plain(value: Any) -> Any:
    """A value as JSON knows it: numpy and torch scalars and arrays to numbers and lists, NaN to None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON by one rename: a reader never sees half of it."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(json.dumps(plain(content), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)


def read_jsonl(path: str | Path) -> list[dict]:
    """Rows of a JSON-lines file, [] where there is none. A torn last row is dropped, a torn one before is an error."""
    path = Path(path)
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]  # what follows the last newline was not finished


class JsonLines:
    """Appends rows to a JSON-lines file, each on disk before `write` returns. `keep(row)`: what a resume keeps."""

    def __init__(self, path: str | Path, keep=None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            rows = [row for row in read_jsonl(self.path) if keep is None or keep(row)]
            draft = self.path.with_name(f".{self.path.name}.tmp")
            draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            draft.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: dict) -> None:
        self._file.write(json.dumps(plain(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def start_run(output_dir: str | Path, cfg: object, manifest: dict) -> Path:
    """Make a run folder with config.yaml and manifest.json; on a resume the manifest becomes one more of a list."""
    folder = Path(output_dir)
    once = dataclasses.replace(cfg, resume=False)  # so that the file starts a new run, too
    try:
        folder.mkdir(parents=True, exist_ok=True)
        arguments.save(once, folder / "config.yaml")
    except OSError as error:
        raise UserError(f"cannot write to output_dir {folder} ({error.strerror}): name another --output_dir") from error
    path = folder / "manifest.json"
    sessions = json.loads(path.read_text(encoding="utf-8"))["sessions"] if path.exists() else []
    write_json(path, {"sessions": [*sessions, {"started": time.strftime("%Y-%m-%d %H:%M:%S"), **manifest}]})
    return folder


class Sink(Protocol):
    def log(self, step: int, metrics: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """Scalars for TensorBoard, in `<output_dir>/tensorboard`. Steps from `purge_step` on are dropped (resume)."""

    def __init__(self, output_dir: str | Path, purge_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(output_dir) / "tensorboard"), purge_step=purge_step)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, offline unless the user's environment says otherwise. The run id is kept for resumes."""

    def __init__(self, output_dir: str | Path, project: str, config: dict | None = None):
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        note = Path(output_dir) / "wandb_id.txt"
        run_id = note.read_text().strip() if note.exists() else wandb.util.generate_id()
        note.write_text(run_id)
        self._run = wandb.init(project=project, config=config, dir=str(output_dir), id=run_id, resume="allow")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Tracker:
    """Metrics of a run: `metrics.jsonl` always, `sinks` besides. Names like "reward/env_mean"; one row a step.

    `resume_step`: rows after the checkpoint's step are dropped first, so a resumed file equals an uninterrupted one.
    Without it, an existing metrics.jsonl is a UserError.
    """

    def __init__(self, output_dir: str | Path, resume_step: int | None = None, sinks: tuple[Sink, ...] = ()):
        path = Path(output_dir) / "metrics.jsonl"
        require(resume_step is not None or not path.exists(), f"{path} exists: pass --resume, or name another folder")
        self._rows = JsonLines(path, keep=lambda row: row["step"] <= (resume_step or 0))
        self._sinks = sinks

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        values = plain(metrics)
        self._rows.write({"step": step, **values})
        for sink in self._sinks:
            sink.log(step, {k: v for k, v in values.items() if v is not None})

    def close(self) -> None:
        self._rows.close()
        for sink in self._sinks:
            sink.close()


class Ledger:
    """What a run has spent: real control steps by purpose, imagined steps by purpose, wall seconds by phase.

    Purposes in use: "anchors", "world_model", "starts", "evaluation", "rollouts". Of one thread.
    """

    def __init__(self) -> None:
        self.real_steps: dict[str, int] = {}
        self.imagined_steps: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.worker_seconds: dict[str, float] = {}  # summed over simulator processes, so it may exceed wall time
        self._stack: list[list] = []  # [phase, seconds of inner phases]

    def add_real(self, purpose: str, steps: int) -> None:
        self.real_steps[purpose] = self.real_steps.get(purpose, 0) + int(steps)

    def add_imagined(self, purpose: str, steps: int) -> None:
        self.imagined_steps[purpose] = self.imagined_steps.get(purpose, 0) + int(steps)

    def add_worker_seconds(self, phase: str, seconds: float) -> None:
        self.worker_seconds[phase] = self.worker_seconds.get(phase, 0.0) + float(seconds)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds of the block to `name`, less those of phases inside it."""
        start = time.perf_counter()
        self._stack.append([name, 0.0])
        try:
            yield
        finally:
            total = time.perf_counter() - start
            _, inner = self._stack.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + total - inner
            if self._stack:
                self._stack[-1][1] += total

    def metrics(self) -> dict[str, float]:
        """The ledger as metrics: "steps/real_anchors", "steps/imagined_rollouts", "time/render_s", totals."""
        out: dict[str, float] = {"steps/real": sum(self.real_steps.values())}
        out |= {"steps/imagined": sum(self.imagined_steps.values()), "time/total_s": sum(self.seconds.values())}
        out |= {f"steps/real_{k}": v for k, v in self.real_steps.items()}
        out |= {f"steps/imagined_{k}": v for k, v in self.imagined_steps.items()}
        out |= {f"time/{k}_s": v for k, v in self.seconds.items()}
        return out | {f"worker_time/{k}_s": v for k, v in self.worker_seconds.items()}

    def state_dict(self) -> dict[str, dict]:
        names = ("real_steps", "imagined_steps", "seconds", "worker_seconds")
        return {name: dict(getattr(self, name)) for name in names}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        for name in self.state_dict():
            setattr(self, name, dict(state[name]))
