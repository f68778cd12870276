"""Camera images of a MuJoCo model: one GL context a thread, textures in it once, meshes at a chosen level of detail."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import weakref

import mujoco
import numpy as np

from sim import mjb, parts
from sim.model_cache import Pictures

GL_VARIABLES = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID")
_OFFSCREEN = mujoco.mjtFramebuffer.mjFB_OFFSCREEN
_HIDDEN_GROUP = 0  # of geoms: collision geometry
_MAX_GEOMS = 10_000


class _Screen:
    """The GL context of one thread, and the textures in it by (content, type), which its tasks share."""

    def __init__(self):
        try:
            self._context = mujoco.gl_context.GLContext(64, 64)  # images are drawn in buffers of their own
        except Exception as error:  # every backend has errors of its own
            chosen = " ".join(f"{name}={os.environ[name]}" for name in GL_VARIABLES if name in os.environ)
            raise RuntimeError(f"OpenGL makes no context here ({chosen}): run `vla-wmrl doctor`") from error
        self.textures: dict[tuple[str, int], list[int]] = {}  # [GL name, users]
        self.drawing: dict[int, mujoco.MjrContext] = {}
        self.open = True
        atexit.register(self._close)  # registered after the GL library's own end, hence called before it

    def make_current(self) -> None:
        self._context.make_current()

    def _close(self) -> None:
        self.open = False
        with contextlib.suppress(Exception):  # another renderer of the process (robosuite's) may have ended OpenGL already
            self.make_current()
            for context in self.drawing.values():
                context.free()
            self._context.free()
        self.drawing.clear()


_screens = threading.local()


def _screen() -> _Screen:
    if not hasattr(_screens, "screen"):
        _screens.screen = _Screen()
    return _screens.screen


def give_back_memory() -> None:
    """Returns what was freed to the system: glibc keeps the holes that large temporary arrays leave."""
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


class CameraRenderer:
    """Renders named cameras at any size, rotated by 180 degrees (the LIBERO convention) once.

    `lod_mm` > 0 simplifies the visual meshes, `multisample` is the number of samples a pixel (0: none). Both change pixels,
    so both belong into the manifest; benchmark scores use lod_mm=0 and MuJoCo's own multisample=4.
    Must be used from the thread that made it (a GL context belongs to a thread). `close()` frees its part of the context.
    """

    def __init__(self, model: mujoco.MjModel, pictures: Pictures, lod_mm: float = 0.0, multisample: int = 4):
        self._screen = _screen()
        self._screen.make_current()
        meshes = {i: pictures.mesh(i, lod_mm / 1000.0) for i, name in enumerate(pictures.meshes) if name}
        self.faces = sum(len(mesh["face"]) for mesh in meshes.values())
        drawn = mjb.save(model)
        parts.join(drawn, meshes, {})
        upload = mjb.load(drawn.pack())
        upload.vis.quality.offsamples = multisample
        upload.vis.global_.offwidth = upload.vis.global_.offheight = 64
        if not upload.light_castshadow.any():
            upload.vis.quality.shadowsize = 0  # else 64 MB of shadows that no light casts
        self._context = mujoco.MjrContext(upload, mujoco.mjtFontScale.mjFONTSCALE_150)
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self._camera, self._option = mujoco.MjvCamera(), mujoco.MjvOption()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._option.geomgroup[_HIDDEN_GROUP] = 0
        del meshes, drawn, upload
        self._screen.drawing[id(self._context)] = self._context
        used = self._share_textures(model, pictures)
        self.close = weakref.finalize(self, _release, self._screen, self._context, used)
        give_back_memory()

    def _share_textures(self, model: mujoco.MjModel, pictures: Pictures) -> dict[int, tuple[str, int]]:
        """Puts textures into the context that the thread has not got yet; {index: key} of all that this model uses."""
        used = {}
        for i, name in enumerate(pictures.textures):
            if not name:
                continue
            key = used[i] = (name, int(model.tex_type[i]))
            if key not in self._screen.textures:
                single = mjb.save(model)
                parts.set_textures(single.arrays, {i: pictures.texture(i)})
                mujoco.mjr_uploadTexture(mjb.load(single.pack()), self._context, i)
                self._screen.textures[key] = [int(self._context.texture[i]), 0]
            self._context.texture[i] = self._screen.textures[key][0]
            self._screen.textures[key][1] += 1
        return used

    def render(self, model: mujoco.MjModel, data: mujoco.MjData, camera: str, size: int) -> np.ndarray:
        """[size, size, 3] uint8 of the state in `data`, which belongs to `model`."""
        context = self._context
        self._screen.make_current()
        if max(size - context.offWidth, size - context.offHeight) > 0:
            mujoco.mjr_resizeOffscreen(size, size, context)
        mujoco.mjr_setBuffer(_OFFSCREEN, context)
        self._camera.fixedcamid = model.camera(camera).id
        mujoco.mjv_updateScene(
            model, data, self._option, None, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )  # fmt: skip
        view, frame = mujoco.MjrRect(0, 0, size, size), np.empty((size, size, 3), dtype=np.uint8)
        mujoco.mjr_render(view, self._scene, context)
        mujoco.mjr_readPixels(frame, None, view, context)  # OpenGL's bottom row first, as robosuite hands it out
        return np.ascontiguousarray(frame[::-1, ::-1])


def _release(screen: _Screen, context: mujoco.MjrContext, used: dict[int, tuple[str, int]]) -> None:
    """Frees `context`, and with it those textures that no other renderer of the thread uses."""
    if not screen.open:  # at exit
        return
    screen.make_current()
    del screen.drawing[id(context)]
    for i, key in used.items():
        entry = screen.textures[key]
        entry[1] -= 1
        if entry[1] == 0:
            del screen.textures[key]
        else:
            context.texture[i] = 0
    context.free()
    give_back_memory()
