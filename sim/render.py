"""Camera images of a MuJoCo model: one renderer per simulator, meshes at a chosen level of detail."""

from __future__ import annotations

import copy
import weakref

import mujoco
import numpy as np


def simplify_meshes(model: mujoco.MjModel, cell_m: float) -> int:
    """Clusters the vertices of visual-only meshes in place to a grid of `cell_m` metres; returns the faces that remain.

    Faces of a cell share one of its vertices, corners keep their normals and texture coordinates, and faces that
    collapse are dropped. Meshes that collide are left alone. Apply to a copy of the model: it is for rendering only.
    """
    collides = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    is_mesh = model.geom_type == mujoco.mjtGeom.mjGEOM_MESH
    keep = set(model.geom_dataid[is_mesh & collides].tolist())
    for mesh in range(model.nmesh):
        if mesh in keep:
            continue
        vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
        first = model.mesh_faceadr[mesh]
        count = model.mesh_facenum[mesh]
        cells = np.floor(vertices / cell_m).astype(np.int64)
        _, representative, cluster = np.unique(cells, axis=0, return_index=True, return_inverse=True)
        faces = representative[cluster.reshape(-1)[model.mesh_face[first : first + count]]]
        good = (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])
        if not good.any():
            continue  # thinner than a cell everywhere: leave it as it is
        left = int(good.sum())
        model.mesh_face[first : first + left] = faces[good]
        for corners in (model.mesh_facenormal, model.mesh_facetexcoord):
            corners[first : first + left] = corners[first : first + count][good]
        model.mesh_facenum[mesh] = left
    return int(model.mesh_facenum.sum())


class CameraRenderer:
    """Renders named cameras of `model` at `size` x `size` pixels, rotated by 180 degrees (the LIBERO convention) once.

    `lod_mm` > 0 simplifies the visual meshes, `multisample` is the number of samples a pixel (0: none). Both change pixels,
    so both belong into the manifest; benchmark scores use lod_mm=0 and MuJoCo's own multisample=4.
    Must be used from the thread that made it (a GL context belongs to a thread). `close()` frees the context.
    """

    def __init__(self, model: mujoco.MjModel, size: int, lod_mm: float = 0.0, multisample: int = 4):
        shown = copy.copy(model)
        shown.vis.quality.offsamples = multisample
        shown.vis.global_.offwidth = max(shown.vis.global_.offwidth, size)
        shown.vis.global_.offheight = max(shown.vis.global_.offheight, size)
        self.faces = simplify_meshes(shown, lod_mm / 1000.0) if lod_mm > 0 else int(shown.mesh_facenum.sum())
        self._model = shown
        self._renderer = mujoco.Renderer(shown, size, size)
        self.close = weakref.finalize(self, self._renderer.close)  # at exit too, while the GL library is still there
        self._option = mujoco.MjvOption()
        self._option.geomgroup[0] = 0  # collision geometry

    def render(self, model: mujoco.MjModel, data: mujoco.MjData, camera: str) -> np.ndarray:
        """[size, size, 3] uint8 of the state in `data`, which belongs to `model` (whose moved fixtures are followed)."""
        for name in ("body_pos", "body_quat", "geom_rgba", "site_rgba"):  # LIBERO's resets and stove lights write these
            getattr(self._model, name)[:] = getattr(model, name)
        self._renderer.update_scene(data, camera, scene_option=self._option)
        upright = self._renderer.render()
        robosuite_frame = upright[::-1]  # robosuite hands out OpenGL's bottom row first
        return np.ascontiguousarray(robosuite_frame[::-1, ::-1])
