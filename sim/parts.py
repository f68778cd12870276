"""A compiled model in parts: the physics on one side, what only pictures need (visual meshes, textures) on the other.

Of a kitchen table's 300 MB the physics needs a few: worlds without pictures load fast, and tasks share their pictures. All
functions work on models in MuJoCo's saved form (sim.mjb). Meshes and textures are dicts of arrays:
mesh {"vert" [V, 3], "normal" [N, 3], "texcoord" [T, 2] float32, "face", "facenormal", "facetexcoord" [F, 3] int32},
texture {"pixels" [height, width, channels] uint8}.
"""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np

from sim.mjb import Binary

Arrays = dict[str, np.ndarray]

# What a mesh has rows in: (array of first rows, array of numbers of rows, arrays that have the rows).
_ROWS = (
    ("mesh_vertadr", "mesh_vertnum", ("mesh_vert", "mesh_polymapadr", "mesh_polymapnum")),
    ("mesh_normaladr", "mesh_normalnum", ("mesh_normal",)),
    ("mesh_texcoordadr", "mesh_texcoordnum", ("mesh_texcoord",)),
    ("mesh_faceadr", "mesh_facenum", ("mesh_face", "mesh_facenormal", "mesh_facetexcoord")),
)
_POLYGONS = (("mesh_polyadr", "mesh_polynum", ("mesh_polynormal", "mesh_polyvertadr", "mesh_polyvertnum")),)
# The same of a vertex or polygon, once those of other meshes are gone.
_NESTED = (("mesh_polymapadr", "mesh_polymapnum", "mesh_polymap"), ("mesh_polyvertadr", "mesh_polyvertnum", "mesh_polyvert"))
_BVH = ("bvh_depth", "bvh_child", "bvh_nodeid", "bvh_aabb")
_BVH_OWNERS = ("body_bvhadr", "mesh_bvhadr", "flex_bvhadr")
MESH_FIELDS = ("vert", "normal", "texcoord", "face", "facenormal", "facetexcoord")


def _meshes_of(binary: Binary, geoms: np.ndarray) -> np.ndarray:
    """[nmesh] bool: the meshes that the chosen `geoms` ([ngeom] bool) refer to."""
    a = binary.arrays
    used = np.zeros(binary.sizes["nmesh"], dtype=bool)
    with_mesh = geoms & (a["geom_dataid"][:, 0] >= 0) & (a["geom_type"][:, 0] != mujoco.mjtGeom.mjGEOM_HFIELD)
    used[a["geom_dataid"][with_mesh, 0]] = True
    return used


def colliding(binary: Binary) -> np.ndarray:
    """[nmesh] bool: meshes that can touch something."""
    a = binary.arrays
    geoms = (a["geom_contype"][:, 0] != 0) | (a["geom_conaffinity"][:, 0] != 0)
    for pair in ("pair_geom1", "pair_geom2"):
        geoms[a[pair][:, 0]] = True
    return _meshes_of(binary, geoms)


def visible(binary: Binary, hidden_group: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[nmesh] and [ntex] bool: meshes and textures that pictures show when `hidden_group` of geoms is not drawn."""
    a = binary.arrays
    geoms = a["geom_group"][:, 0] != hidden_group
    others = (a[f"{kind}_matid"][:, 0] for kind in ("site", "tendon", "skin", "flex"))
    materials = np.concatenate([a["geom_matid"][geoms, 0], *others])
    textures = a["tex_type"][:, 0] == mujoco.mjtTexture.mjTEXTURE_SKYBOX
    ids = a["mat_texid"][np.unique(materials[materials >= 0])]
    textures[ids[ids >= 0]] = True
    return _meshes_of(binary, geoms), textures


def mesh(binary: Binary, index: int) -> Arrays:
    """Copies mesh `index` out of a full model."""
    found = {}
    for first, count, names in _ROWS:
        start, n = int(binary.arrays[first][index, 0]), int(binary.arrays[count][index, 0])
        for name in names:
            field = name.removeprefix("mesh_")
            if field in MESH_FIELDS:
                found[field] = binary.arrays[name][max(start, 0) :][:n].copy()
    return found


def texture(binary: Binary, index: int) -> Arrays:
    """Copies texture `index` out of a full model."""
    a = binary.arrays
    shape = tuple(int(a[f"tex_{k}"][index, 0]) for k in ("height", "width", "nchannel"))
    return {"pixels": a["tex_data"][a["tex_adr"][index, 0] :][: np.prod(shape)].reshape(shape).copy()}


def strip(binary: Binary) -> None:
    """Leaves `binary` the physics: meshes that do not collide lose their geometry, textures become one pixel. In place."""
    a, keep = binary.arrays, colliding(binary)
    for first, count, names in (*_ROWS, *_POLYGONS):
        counts = np.where(keep, a[count][:, 0], 0)
        index = _ranges(a[first][:, 0], counts)
        for name in names:
            a[name] = a[name][index]
        _set_rows(a, first, count, counts)
    for first, count, name in _NESTED:
        counts = a[count][:, 0]
        a[name] = a[name][_ranges(a[first][:, 0], counts)]
        _set_rows(a, first, count, counts)
    _drop_bvh(a, ~keep)
    set_textures(a, {})


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Indices of all rows in [start, start + count), one after the other."""
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - before, counts)


def _set_rows(a: Arrays, first: str, count: str, counts: np.ndarray) -> None:
    """New numbers of rows; -1 as first row, which says that there are none, stays (the scene reads it of texcoords)."""
    starts = np.cumsum(counts) - counts
    a[first] = np.where(a[first][:, 0] < 0, -1, starts)[:, None].astype(np.int32)
    a[count] = counts[:, None].astype(np.int32)


def _drop_bvh(a: Arrays, meshes: np.ndarray) -> None:
    """Removes the bounding-volume trees of `meshes` [nmesh] bool, which only rays and collisions descend."""
    stays = np.ones(len(a["bvh_depth"]), dtype=bool)
    for start, n in zip(a["mesh_bvhadr"][meshes, 0], a["mesh_bvhnum"][meshes, 0], strict=True):
        stays[start : start + n] = False
    moved = np.cumsum(stays) - stays  # new place of each node; children are numbered within their tree
    for owner in _BVH_OWNERS:
        old = a[owner][:, 0]
        a[owner] = np.where(old < 0, -1, moved[np.clip(old, 0, max(len(moved) - 1, 0))] if len(moved) else -1)[:, None]
    a["mesh_bvhadr"][meshes], a["mesh_bvhnum"] = -1, np.where(meshes[:, None], 0, a["mesh_bvhnum"])
    for name in _BVH:
        a[name] = a[name][stays[: len(a[name])]]


def set_textures(a: Arrays, textures: Mapping[int, Arrays]) -> None:
    """Gives `a` these textures by index; all others get one black pixel."""
    parts = []
    for i, channels in enumerate(a["tex_nchannel"][:, 0]):
        pixels = textures[i]["pixels"] if i in textures else np.zeros((1, 1, channels), dtype=np.uint8)
        parts.append(pixels)
    ends = np.cumsum([p.size for p in parts], dtype=np.int64) if parts else np.zeros(0, dtype=np.int64)
    for axis, name in enumerate(("tex_height", "tex_width")):
        a[name] = np.array([p.shape[axis] for p in parts], dtype=np.int32).reshape(-1, 1)
    a["tex_adr"] = (ends - [p.size for p in parts]).astype(np.int32).reshape(-1, 1)
    a["tex_data"] = np.concatenate([p.reshape(-1, 1) for p in parts]) if parts else np.zeros((0, 1), dtype=np.uint8)


def join(binary: Binary, meshes: Mapping[int, Arrays], textures: Mapping[int, Arrays]) -> None:
    """Makes of a physics model one to upload to the renderer: only these meshes, only these textures. In place.

    What comes out is not for physics: convex hulls are gone, so that they are not uploaded.
    """
    a, n = binary.arrays, binary.sizes["nmesh"]
    for first, count, names in _ROWS:
        fields = [name.removeprefix("mesh_") for name in names]
        counts = np.array([len(meshes[i][fields[0]]) if i in meshes else 0 for i in range(n)], dtype=np.int64)
        for name, field in zip(names, fields, strict=True):
            columns, kind = a[name].shape[1], a[name].dtype
            if field in MESH_FIELDS:
                a[name] = np.concatenate([np.zeros((0, columns), kind), *(meshes[i][field] for i in sorted(meshes))])
            else:
                a[name] = np.zeros((int(counts.sum()), columns), kind)
        _set_rows(a, first, count, counts)
    a["mesh_graphadr"] = np.full((n, 1), -1, dtype=np.int32)
    set_textures(a, textures)


def simplify(mesh: Arrays, cell_m: float) -> Arrays:
    """`mesh` with its vertices clustered to a grid of `cell_m` metres.

    Faces of a cell share one of its vertices, corners keep their normals and texture coordinates, faces that collapse are
    dropped. A mesh that is thinner than a cell everywhere stays as it is.
    """
    if len(mesh["face"]) == 0:
        return mesh
    cells = np.floor(mesh["vert"] / cell_m).astype(np.int64)
    _, representative, cluster = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    faces = representative[cluster.reshape(-1)[mesh["face"]]].astype(np.int32)
    good = (faces[:, 0] != faces[:, 1]) & (faces[:, 1] != faces[:, 2]) & (faces[:, 0] != faces[:, 2])
    if not good.any():
        return mesh
    left = dict(mesh)
    for rows, corners in (("vert", faces), ("normal", mesh["facenormal"]), ("texcoord", mesh["facetexcoord"])):
        name = {"vert": "face", "normal": "facenormal", "texcoord": "facetexcoord"}[rows]
        if len(mesh[rows]) == 0:
            left[name] = corners[good]
            continue
        used, index = np.unique(corners[good], return_inverse=True)
        left[rows], left[name] = mesh[rows][used], index.reshape(-1, 3).astype(np.int32)
    return left
