"""Checkpoints from which a run continues bit-equal: nested state in, folder out, and back. No pickle.

A checkpoint is `<output_dir>/checkpoints/<step>/` with `state.json` (structure, scalars), `tensors.safetensors` (torch)
and `arrays.safetensors` (numpy). It appears by one rename, so a killed save leaves the previous checkpoint as it was.

State may hold dicts (any hashable keys), lists, tuples, numpy arrays and scalars (no objects), torch tensors, Python
numbers, strings, bytes and None. Tensors come back on the CPU.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from vla_wmrl.errors import UserError

FORMAT = 1
NATIVE = "?bhilqBHILQefd"  # numpy type codes that safetensors stores as they are


def save(output_dir: str | Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    """Write `state` as the checkpoint of `step` and drop all but the newest `keep`. Returns its folder.

    Raises OSError (ENOSPC on a full disk; earlier checkpoints stay), TypeError for what cannot be stored.
    """
    root = Path(output_dir) / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale)
    draft = root / f".tmp-{step:08d}"
    draft.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    tree = _encode(state, tensors, arrays)
    try:
        save_tensors(tensors, draft / "tensors.safetensors")
        save_arrays(arrays, draft / "arrays.safetensors")
    except SafetensorError as error:  # the library hides the errno in its text
        if "code: 28" in str(error) or "StorageFull" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(draft)) from error
        raise
    (draft / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, "state": tree}), encoding="utf-8")
    for path in [*draft.iterdir(), draft]:
        _fsync(path)
    final = root / f"{step:08d}"
    if final.exists():
        _remove(final)
    draft.rename(final)
    _fsync(root)
    for old in steps(output_dir)[:-keep]:
        _remove(root / f"{old:08d}")
    return final


def load(path: str | Path) -> dict[str, Any]:
    """State of the checkpoint folder `path`. Raises UserError when it is missing or damaged."""
    path = Path(path)
    if not (path / "state.json").is_file():
        raise UserError(f"{path} is no checkpoint: name a folder with state.json")
    try:
        content = json.loads((path / "state.json").read_text(encoding="utf-8"))
        tensors = load_tensors(path / "tensors.safetensors")
        arrays = load_arrays(path / "arrays.safetensors")
    except (ValueError, FileNotFoundError, SafetensorError) as error:
        raise UserError(f"checkpoint {path} is damaged ({error}): remove it to continue from the one before") from error
    if content["format"] != FORMAT:
        raise UserError(f"checkpoint {path} has format {content['format']}, this version reads {FORMAT}")
    return _decode(content["state"], tensors, arrays)


def steps(output_dir: str | Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    root = Path(output_dir) / "checkpoints"
    return sorted(int(p.name) for p in root.glob("[0-9]*") if p.name.isdigit() and (p / "state.json").is_file())


def latest(output_dir: str | Path) -> Path | None:
    """Folder of the newest checkpoint, None without any."""
    found = steps(output_dir)
    return Path(output_dir) / "checkpoints" / f"{found[-1]:08d}" if found else None


def rng_state() -> dict[str, Any]:
    """State of Python's, numpy's (global) and torch's generators, CUDA's where there is one."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Inverse of `rng_state`. CUDA's part is skipped where the number of devices differs."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _encode(value: Any, tensors: dict, arrays: dict) -> Any:
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return value
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach().cpu().clone().contiguous()
        return {"__tensor__": key}
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(np.asarray(value), isinstance(value, np.generic), arrays)
    if isinstance(value, bytes):
        return {"__bytes__": value.hex()}
    if isinstance(value, (list, tuple)):
        items = [_encode(v, tensors, arrays) for v in value]
        return items if isinstance(value, list) else {"__tuple__": items}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: _encode(v, tensors, arrays) for k, v in value.items()}
        pairs = [[_encode(k, tensors, arrays), _encode(v, tensors, arrays)] for k, v in value.items()]
        return {"__items__": pairs}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def _encode_array(value: np.ndarray, scalar: bool, arrays: dict) -> dict:
    if value.dtype.hasobject:
        raise TypeError("a checkpoint cannot hold an array of objects")
    key, note = str(len(arrays)), {"scalar": scalar}
    if value.dtype.isnative and value.dtype.char in NATIVE:
        arrays[key] = value.copy(order="C")
    else:  # strings, dates, records: their bytes
        note |= {"dtype": np.lib.format.dtype_to_descr(value.dtype), "shape": list(value.shape)}
        arrays[key] = np.frombuffer(value.tobytes(), np.uint8)
    return {"__array__": key, **note}


def _decode(node: Any, tensors: dict, arrays: dict) -> Any:
    if isinstance(node, list):
        return [_decode(v, tensors, arrays) for v in node]
    if not isinstance(node, dict):
        return node
    if "__tensor__" in node:
        return tensors[node["__tensor__"]]
    if "__array__" in node:
        array = arrays[node["__array__"]]
        if "dtype" in node:
            descr = node["dtype"]
            descr = [tuple(d) for d in descr] if isinstance(descr, list) else descr
            array = np.frombuffer(array.tobytes(), np.lib.format.descr_to_dtype(descr)).reshape(node["shape"]).copy()
        return array[()] if node["scalar"] else array
    if "__bytes__" in node:
        return bytes.fromhex(node["__bytes__"])
    if "__tuple__" in node:
        return tuple(_decode(v, tensors, arrays) for v in node["__tuple__"])
    if "__items__" in node:
        return {_decode(k, tensors, arrays): _decode(v, tensors, arrays) for k, v in node["__items__"]}
    return {k: _decode(v, tensors, arrays) for k, v in node.items()}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves no half one under its name."""
    doomed = folder.with_name(f".tmp-removed-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)
