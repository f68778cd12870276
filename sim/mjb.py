"""MuJoCo's binary models taken apart into named arrays, and put together again with other ones.

mjModel cannot be edited in size through the bindings, so a model without its pictures (textures, visual meshes) is made in
its saved form: a header of 5 ints, the sizes, the structs opt, vis and stat, then every array in turn. Names, types and
order of sizes and arrays are read from the x-macros in the header file that the mujoco package itself carries.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import mujoco
import numpy as np

_TYPES = {"int": np.int32, "float": np.float32, "mjtNum": np.float64, "mjtByte": np.uint8, "char": np.uint8}
_HEADER = 5  # ints: magic number, bytes of mjtNum, how many int sizes, how many size_t sizes, how many arrays
_ALIGN = 64  # bytes, of every array in MuJoCo's one buffer


class UnknownFormat(Exception):
    """This version of MuJoCo saves models in a form that is not the one described above."""


@cache
def _layout() -> tuple[list[str], list[tuple[str, type, str, str]]]:
    """Names of the sizes; (name, type, size of rows, expression of columns) of the arrays."""
    include = Path(mujoco.__file__).parent / "include" / "mujoco"
    text = (include / "mjxmacro.h").read_text()

    def block(name: str) -> str:
        return re.search(rf"#define {name}[ \t]*\\\n((?:.*\\\n)*.*)", text).group(1)

    sizes = re.findall(r"X\w*\s*\(\s*(\w+)\s*\)", block("MJMODEL_INTS"))
    arrays = re.findall(r"X\w*\s*\(\s*(\w+),\s*(\w+),\s*(\w+),\s*(\S+)\s*\)", block("MJMODEL_POINTERS"))
    constants = dict(re.findall(r"#define\s+(mjN\w+)\s+(\d+)", (include / "mjmodel.h").read_text()))
    constants["mjNTEXROLE"] = str(int(mujoco.mjtTextureRole.mjNTEXROLE))
    return sizes, [
        (name, _TYPES[kind], rows, constants.get(columns, columns.replace("MJ_M", ""))) for kind, name, rows, columns in arrays
    ]


def _columns(expression: str, sizes: dict[str, int]) -> int:
    """Value of "3", "(nq)" or "(nmocap)*3"."""
    product = 1
    for factor in re.findall(r"\w+", expression):
        product *= int(factor) if factor.isdigit() else sizes[factor]
    return product


class Binary:
    """A saved model: `sizes` by name, `arrays` by name ([rows, columns], views of the bytes), and the rest verbatim.

    Raises UnknownFormat when the bytes are not what this version's header file promises.
    """

    def __init__(self, data: bytes | np.ndarray):
        raw = np.frombuffer(data, np.uint8)
        names, arrays = _layout()
        self.header = raw[: 4 * _HEADER].view(np.int32)
        _, _, n_ints, n_longs, n_arrays = self.header.tolist()
        if n_ints + n_longs != len(names) or n_arrays != len(arrays):
            raise UnknownFormat(f"{n_ints} + {n_longs} sizes, {n_arrays} arrays; header: {len(names)}, {len(arrays)}")
        at = 4 * _HEADER
        values = raw[at : at + 4 * n_ints].view(np.int32).tolist()
        at += 4 * n_ints
        values += raw[at : at + 8 * n_longs].copy().view(np.int64).tolist()
        at += 8 * n_longs
        self.n_ints, self.sizes = n_ints, dict(zip(names, values, strict=True))
        shapes = [(name, kind, self.sizes[rows], _columns(c, self.sizes)) for name, kind, rows, c in arrays]
        lengths = [rows * columns * np.dtype(kind).itemsize for _, kind, rows, columns in shapes]
        structs = len(raw) - at - sum(lengths)
        if structs <= 0 or _buffer_bytes(lengths) != self.sizes["nbuffer"]:
            raise UnknownFormat(f"{len(raw)} bytes for arrays of {sum(lengths)}")
        self.structs = raw[at : at + structs]
        at += structs
        self.arrays: dict[str, np.ndarray] = {}
        for (name, kind, rows, columns), length in zip(shapes, lengths, strict=True):
            part = raw[at : at + length]
            self.arrays[name] = np.frombuffer(part.tobytes(), kind).reshape(rows, columns)
            at += length

    def pack(self) -> bytes:
        """The bytes of a model with the present arrays; sizes follow from their rows."""
        names, arrays = _layout()
        for name, kind, rows, _ in arrays:
            array = self.arrays[name] = np.ascontiguousarray(self.arrays[name], kind)
            if array.shape[1]:
                self.sizes[rows] = len(array)
        self.sizes["nbuffer"] = _buffer_bytes([self.arrays[name].nbytes for name, *_ in arrays])
        values = [self.sizes[name] for name in names]
        ints, longs = np.array(values[: self.n_ints], np.int32), np.array(values[self.n_ints :], np.int64)
        parts = [self.header, ints, longs, self.structs]
        return b"".join(part.tobytes() for part in (*parts, *(self.arrays[name] for name, *_ in arrays)))


def _buffer_bytes(lengths: list[int]) -> int:
    end = 0
    for length in lengths:
        end = -(-end // _ALIGN) * _ALIGN + length
    return end


def save(model: mujoco.MjModel) -> Binary:
    """`model`, taken apart."""
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return Binary(buffer)


def load(data: bytes) -> mujoco.MjModel:
    """The model of `data`; MuJoCo checks every reference inside it and raises ValueError."""
    return mujoco.MjModel.from_binary_path("model.mjb", {"model.mjb": data})
