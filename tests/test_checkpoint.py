"""Checkpoints: bit-equal round trips, and a killed or failed save that costs nothing."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_wmrl import checkpoint
from vla_wmrl.errors import UserError


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    elif isinstance(a, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype and np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    else:
        assert a == b or (a != a and b != b)


STATE = {
    "f64": np.array([[1.0, np.nan, -0.0], [np.inf, 1e-320, 0.1]]).T,
    "bool": np.array([True, False]),
    "scalar": np.float32(0.1),
    "zero_d": np.array(7),
    "empty": np.zeros((0, 3), np.float32),
    "names": np.array(["a", "bcd"]),
    "record": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "big_endian": np.arange(3, dtype=">f4"),
    "bf16": torch.tensor([1.0, 3e-5], dtype=torch.bfloat16),
    "view": torch.arange(6.0).reshape(2, 3).T,
    "nested": {0: (1, [2.5, None, "x"], {"__tensor__": True}), (1, "b"): b"\x00\xff", "": -(2**100)},
    "nan": float("nan"),
    "rng": np.random.default_rng(3).bit_generator.state,
}


def test_state_comes_back_bit_equal(tmp_path):
    assert_same(checkpoint.load(checkpoint.save(tmp_path, 3, STATE)), STATE)


def test_resumed_training_is_bit_equal_to_uninterrupted_training(tmp_path):
    def make():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        net = torch.nn.Linear(4, 2)
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)

    def train(net, opt, n):
        for _ in range(n):
            opt.zero_grad()
            x = torch.randn(8, 4) * random.random() + float(np.random.rand())
            net(x).square().mean().backward()
            opt.step()

    net, opt = make()
    train(net, opt, 6)
    other, other_opt = make()
    train(other, other_opt, 3)
    state = {"net": other.state_dict(), "opt": other_opt.state_dict(), "rng": checkpoint.rng_state()}
    checkpoint.save(tmp_path, 3, {**state, "net": dict(state["net"])})
    resumed, resumed_opt = make()
    train(resumed, resumed_opt, 5)  # leaves other weights and other generators behind
    state = checkpoint.load(checkpoint.latest(tmp_path))
    resumed.load_state_dict(state["net"])
    resumed_opt.load_state_dict(state["opt"])
    checkpoint.set_rng_state(state["rng"])
    train(resumed, resumed_opt, 3)
    assert torch.equal(resumed.weight, net.weight) and torch.equal(resumed.bias, net.bias)


def test_shared_memory_does_not_tie_what_is_loaded(tmp_path):
    t = torch.zeros(3)
    state = checkpoint.load(checkpoint.save(tmp_path, 1, {"a": t, "b": t}))
    state["a"] += 1
    assert torch.equal(state["b"], torch.zeros(3))


def test_only_the_newest_are_kept_and_latest_goes_by_number(tmp_path):
    for step in (9, 10, 11, 100):
        checkpoint.save(tmp_path, step, {"step": step}, keep=2)
    assert checkpoint.steps(tmp_path) == [11, 100]
    assert checkpoint.load(checkpoint.latest(tmp_path)) == {"step": 100}
    checkpoint.save(tmp_path, 100, {"step": "again"})
    assert checkpoint.load(checkpoint.latest(tmp_path)) == {"step": "again"}
    assert checkpoint.latest(tmp_path / "none") is None


def test_killed_in_the_middle_of_a_save_the_previous_checkpoint_loads(tmp_path):
    code = (
        "import sys, numpy as np; from vla_wmrl import checkpoint\n"
        "checkpoint.save(sys.argv[1], 1, {'x': np.arange(5)})\n"
        "def stop(path): print('writing', flush=True); import time; time.sleep(60)\n"
        "checkpoint._fsync = stop\n"
        "checkpoint.save(sys.argv[1], 2, {'x': np.zeros(5)})\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    )
    assert child.stdout.readline() == b"writing\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.load(checkpoint.latest(tmp_path))["x"].tolist() == [0, 1, 2, 3, 4]
    checkpoint.save(tmp_path, 2, {"x": 2})
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"x": 1})

    def full(*_):
        raise checkpoint.SafetensorError('I/O error: Os { code: 28, kind: StorageFull, message: "No space left" }')

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path, 2, {"x": 2})
    assert checkpoint.load(checkpoint.latest(tmp_path)) == {"x": 1}


def test_a_damaged_checkpoint_says_so(tmp_path):
    path = checkpoint.save(tmp_path, 1, {"x": np.arange(100)})
    (path / "arrays.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="damaged"):
        checkpoint.load(path)
    with pytest.raises(UserError, match="no checkpoint"):
        checkpoint.load(tmp_path)


def test_what_needs_pickle_is_refused(tmp_path):
    for bad in (object(), np.array([None]), {1, 2}):
        with pytest.raises(TypeError, match="cannot hold"):
            checkpoint.save(tmp_path, 1, {"bad": bad})
    assert checkpoint.steps(tmp_path) == []
