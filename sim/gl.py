"""Choose what renders, in one place and before the first import of mujoco: GPU EGL, software EGL, OSMesa, or an error.

Non-obvious behaviour
* MuJoCo and robosuite read MUJOCO_GL once, while they are imported, so `setup_gl` refuses to run after that.
* robosuite takes CUDA_VISIBLE_DEVICES for an EGL index and asserts on it at import: hence `robosuite_import_env`.
* The choice is left in VLA_WMRL_GL, so that worker processes inherit it and do not probe again.
* With CUDA_VISIBLE_DEVICES set but empty, GPUs are left alone and software renders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vla_wmrl.errors import UserError

CHOICE = "VLA_WMRL_GL"
INSTALL_EGL = "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0"
INSTALL_OSMESA = "apt-get install -y libosmesa6"
PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class EglDevice:
    """One EGL device. `index` is what MUJOCO_EGL_DEVICE_ID means; `pci` like "0000:65:00.0" or "" where unknown."""

    index: int
    software: bool
    usable: bool
    cuda_id: int | None = None
    pci: str = ""


@dataclass(frozen=True)
class Probe:
    """What the GL libraries of a machine offer."""

    platform: str = "linux"
    egl: tuple[EglDevice, ...] = ()
    osmesa: bool = False


@dataclass(frozen=True)
class Backend:
    """The choice: `name` is the value of MUJOCO_GL, `device` the EGL device index (None outside EGL)."""

    name: str
    device: int | None
    software: bool

    def __str__(self) -> str:
        kind = "software" if self.software else "GPU"
        return f"{self.name} ({kind}{'' if self.device is None else f', device {self.device}'})"


def probe_machine() -> Probe:
    """Probe in a separate process, since a broken driver can crash it. A crash counts as nothing found."""
    script = Path(__file__).with_name("egl_probe.py")
    done = subprocess.run(
        [sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        return Probe(platform=sys.platform)
    found = json.loads(done.stdout.splitlines()[-1])
    return Probe(found["platform"], tuple(EglDevice(**d) for d in found["egl"]), found["osmesa"])


def egl_id_for_cuda(pci: str, devices: tuple[EglDevice, ...]) -> int | None:
    """EGL index of the GPU at PCI address `pci` (short "65:00.0" accepted), None if EGL does not see it.

    The orders of CUDA and of EGL differ on machines with several GPUs; the PCI address is what both agree on.
    """
    wanted = pci.lower()
    wanted = wanted if wanted.count(":") == 2 else f"0000:{wanted}"
    wanted = wanted[-12:]  # CUDA writes the domain with eight digits, the kernel with four
    return next((d.index for d in devices if d.usable and d.pci and d.pci.lower()[-12:] == wanted), None)


def choose_backend(env: Mapping[str, str], probe: Probe) -> Backend:
    """Pick the backend. Pure. Raises UserError when nothing can render or the user asked for what is not there."""
    wanted = env.get("MUJOCO_GL", "").strip().lower()
    if probe.platform == "darwin":
        return Backend("cgl", None, software=False)
    if wanted not in ("", "egl", "osmesa"):
        raise UserError(f"MUJOCO_GL={wanted} cannot render without a display: unset it, or set it to egl or osmesa")
    usable = [d for d in probe.egl if d.usable]
    if wanted != "osmesa":
        device = _choose_device(env, usable)
        if device is not None:
            return Backend("egl", device.index, device.software)
        if wanted == "egl":
            raise UserError(f"MUJOCO_GL=egl, but no EGL device works here: run `{INSTALL_EGL}`, or unset MUJOCO_GL")
    if probe.osmesa:
        return Backend("osmesa", None, software=True)
    if wanted == "osmesa":
        raise UserError(f"MUJOCO_GL=osmesa, but libOSMesa is missing: run `{INSTALL_OSMESA}`, or unset MUJOCO_GL")
    raise UserError(f"nothing here can render (no EGL device, no OSMesa): run `{INSTALL_EGL}` or `{INSTALL_OSMESA}`")


def _choose_device(env: Mapping[str, str], usable: list[EglDevice]) -> EglDevice | None:
    asked = env.get("MUJOCO_EGL_DEVICE_ID", "").strip()
    if asked:
        match = [d for d in usable if str(d.index) == asked]
        if not match:
            listed = ", ".join(str(d.index) for d in usable) or "none"
            raise UserError(f"MUJOCO_EGL_DEVICE_ID={asked} is no usable EGL device (usable: {listed}): unset it")
        return match[0]
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpus = [d for d in usable if not d.software]
    if visible is not None and visible.strip() in ("", "-1"):
        gpus = [d for d in gpus if d.cuda_id is None]
    elif visible is not None:
        ids = [part.strip() for part in visible.split(",")]
        gpus.sort(key=lambda d: ids.index(str(d.cuda_id)) if str(d.cuda_id) in ids else len(ids))
    software = [d for d in usable if d.software]
    return next(iter(gpus + software), None)


def setup_gl(
    env: MutableMapping[str, str] | None = None, probe: Callable[[], Probe] = probe_machine, modules=sys.modules
) -> Backend:
    """Write the choice into `env` (default `os.environ`); the second call returns the first one's choice.

    Raises RuntimeError if mujoco was imported before the first call, UserError as `choose_backend`.
    """
    env = os.environ if env is None else env
    if env.get(CHOICE):
        name, device, software = env[CHOICE].split(":")
        backend = Backend(name, int(device) if device else None, software == "1")
    else:
        if "mujoco" in modules and env.get("MUJOCO_GL", "") not in ("egl", "osmesa"):
            raise RuntimeError("mujoco was imported before sim.gl.setup_gl(): call setup_gl() first")
        backend = choose_backend(env, probe())
        device = "" if backend.device is None else str(backend.device)
        env[CHOICE] = f"{backend.name}:{device}:{int(backend.software)}"
    env["MUJOCO_GL"] = backend.name
    if backend.name != "cgl":
        env["PYOPENGL_PLATFORM"] = backend.name
    if backend.device is not None:
        env["MUJOCO_EGL_DEVICE_ID"] = str(backend.device)
    return backend


@contextmanager
def robosuite_import_env(env: MutableMapping[str, str] | None = None) -> Iterator[None]:
    """Hide CUDA_VISIBLE_DEVICES while robosuite is imported: it would assert that our EGL index is listed in it."""
    env = os.environ if env is None else env
    hidden = env.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if hidden is not None:
            env["CUDA_VISIBLE_DEVICES"] = hidden
