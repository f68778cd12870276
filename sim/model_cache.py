"""Compiled models on disk: each is compiled once, in a process of its own, and shared by all workers and tasks.

    models/<key>.npz                      a task's physics in MuJoCo's saved form, and the names of its meshes and textures
    meshes/<content>[_<cell>um].npz       shared by content; with a cell: simplified to it
    textures/<content>.npz                shared by content: LIBERO's 130 tasks have few different ones

Non-obvious behaviour
* The folder is VLA_WMRL_CACHE, else vla_wmrl in XDG_CACHE_HOME or ~/.cache. It may be deleted at any time.
* The key covers the task's whole XML, sizes and times of the files it names, and the version of MuJoCo.
* Files are written under another name and renamed, and carry checksums: what cannot be read is compiled again.
* MuJoCo keeps up to 500 MB of assets and the last XML's specification in a process that compiles (measured: 1.0 GB after
  one kitchen table). Hence the other process. A lock lets one compile at a time, so that 8 workers need not 8 times that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import mujoco
import numpy as np

from sim import mjb, parts
from sim.parts import Arrays
from vla_wmrl.errors import UserError

FORMAT = 1  # of the files; part of the key
FOLDER = "VLA_WMRL_CACHE"
_REPLACING = threading.RLock()


def cache_folder() -> Path:
    """Where compiled models are kept."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vla_wmrl"
    return Path(os.environ.get(FOLDER) or user) / "compiled"


def key_of(xml: str) -> str:
    """Name of the model that `xml` compiles to."""
    digest = hashlib.blake2b(f"{FORMAT} {mujoco.__version__} {xml}".encode(), digest_size=16)
    for file in sorted(set(re.findall(r'file\w*="([^"]+)"', xml))):
        with contextlib.suppress(OSError):
            stat = os.stat(file)
            digest.update(f"{stat.st_size} {stat.st_mtime_ns} ".encode())
    return digest.hexdigest()


def _read(path: Path) -> Arrays | None:
    """The arrays in `path`; None when it is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as file:  # whole members, so that their checksums are compared before they are parsed
            return {Path(name).stem: np.load(io.BytesIO(file.read(name))) for name in file.namelist()}
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, struct.error, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as draft:
        try:
            np.savez(draft, **arrays)
        except BaseException:  # a full disk, an interrupt
            os.unlink(draft.name)
            raise
    os.chmod(draft.name, 0o644)  # a cache may be shared; temporary files are their owner's
    os.replace(draft.name, path)


def _store(folder: Path, arrays: Arrays) -> str:
    """Writes `arrays` under a name that says what they hold, unless they are there and whole; returns the name."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.shape} ".encode() + np.ascontiguousarray(array).data)
    path = folder / f"{digest.hexdigest()}.npz"
    if _read(path) is None:
        _write(path, arrays)
    return path.stem


def build(xml: str, folder: Path, key: str) -> None:
    """Compiles `xml` and writes its parts below `folder`. Leaves much memory behind: meant for a process of its own."""
    binary = mjb.save(mujoco.MjModel.from_xml_string(xml))
    meshes, textures = parts.visible(binary)
    entry = {
        "coarse": ~parts.colliding(binary),  # what collides is shown as it collides
        "meshes": np.array([_store(folder / "meshes", parts.mesh(binary, i)) if m else "" for i, m in enumerate(meshes)], str),
        "textures": np.array(
            [_store(folder / "textures", parts.texture(binary, i)) if t else "" for i, t in enumerate(textures)], str
        ),
    }
    parts.strip(binary)
    _write(folder / "models" / f"{key}.npz", {**entry, "model": np.frombuffer(binary.pack(), np.uint8)})


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; a lock that its holder's death releases."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise UserError(f"cannot write compiled models to {folder} ({error.strerror}): set {FOLDER} to another") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _compile(xml: str, folder: Path, key: str) -> Arrays:
    """Runs `build` in its own process, alone on this machine; returns the entry. Raises UserError with its last line."""
    path = folder / "models" / f"{key}.npz"
    with _alone(folder):
        entry = _read(path)
        if entry is None:  # else another process has made it meanwhile
            paths = os.pathsep.join(path for path in sys.path if path)
            done = subprocess.run(
                [sys.executable, "-m", "sim.model_cache", str(folder), key], input=xml, text=True, capture_output=True,
                env={**os.environ, "PYTHONPATH": paths, "MUJOCO_GL": "disable"}, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
                raise UserError(f"compiling a task's model into {folder} failed: {last}")
            entry = _read(path)
    return entry


class Pictures:
    """Names of one model's visible meshes and textures ("" for what is not shown), and a way to read them. Holds no data."""

    def __init__(self, xml: str, folder: Path, key: str, entry: Arrays):
        self._xml, self._folder, self._key = xml, folder, key
        self.meshes = tuple(str(name) for name in entry["meshes"])
        self.textures = tuple(str(name) for name in entry["textures"])
        self._coarse = entry["coarse"]

    def mesh(self, index: int, cell_m: float = 0.0) -> Arrays:
        """Mesh `index` (see sim.parts), simplified to `cell_m` metres where that is allowed."""
        name = self.meshes[index]
        if cell_m <= 0 or not self._coarse[index]:
            return self._part("meshes", name)
        path = self._folder / "meshes" / f"{name}_{round(cell_m * 1e6)}um.npz"
        found = _read(path)
        if found is None:
            found = parts.simplify(self._part("meshes", name), cell_m)
            with contextlib.suppress(OSError):  # a cache that was filled before and is read-only now does
                _write(path, found)
        return found

    def texture(self, index: int) -> Arrays:
        """Texture `index` (see sim.parts)."""
        return self._part("textures", self.textures[index])

    def _part(self, kind: str, name: str) -> Arrays:
        path = self._folder / kind / f"{name}.npz"
        found = _read(path)
        if found is None:  # damaged, or swept away: compile once more
            for stale in (path, self._folder / "models" / f"{self._key}.npz"):
                stale.unlink(missing_ok=True)
            _compile(self._xml, self._folder, self._key)
            found = _read(path)
        if found is None:
            raise UserError(f"{path} cannot be read even after compiling again: delete {self._folder}")
        return found


def compiled(xml: str) -> tuple[mujoco.MjModel, Pictures]:
    """The model of `xml` without its pictures, from the cache where it is there, and what to draw it with.

    Raises UserError when the folder cannot be written or the XML does not compile.
    """
    folder, key = cache_folder(), key_of(xml)
    entry = _read(folder / "models" / f"{key}.npz") or _compile(xml, folder, key)
    return mjb.load(entry["model"].tobytes()), Pictures(xml, folder, key, entry)


@contextlib.contextmanager
def compiling_from_cache() -> Iterator[list[Pictures]]:
    """Inside the block, the simulators that robosuite makes have models from the cache; yields their pictures, in order.

    One thread at a time is inside: robosuite's function is replaced for the whole process.
    """
    from robosuite.utils.binding_utils import MjSim

    made: list[Pictures] = []

    def from_xml_string(cls, xml: str):
        model, pictures = compiled(xml)
        made.append(pictures)
        return cls(model)

    with _REPLACING:
        original = MjSim.__dict__["from_xml_string"]
        MjSim.from_xml_string = classmethod(from_xml_string)
        try:
            yield made
        finally:
            MjSim.from_xml_string = original


if __name__ == "__main__":
    build(sys.stdin.read(), Path(sys.argv[1]), sys.argv[2])
