"""What goes wrong in workers, on a fake environment with the interface of a real one, and on real LIBERO where it must be."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from sim.rollout import begin
from sim.user_env import UserSpec
from sim.workers import Context, Pool, WorkerError
from vla_wmrl.types import Start


class Faulty:
    """A point that actions push about. `fault` happens once: where `marker` is there, all goes well."""

    def __init__(self, fault: str = "", marker: str = ""):
        self.fault, self.marker = fault, marker
        self.state, self.steps = np.zeros(8), 0

    def _now(self, fault: str) -> bool:
        if self.fault != fault or os.path.exists(self.marker):
            return False
        Path(self.marker).touch()
        return True

    def reset(self, init_id, seed):
        if self._now("hangs in reset"):
            time.sleep(3600)
        if self.fault == "raises in reset":
            raise RuntimeError("no such table")
        self.state = np.random.default_rng([init_id, seed]).normal(0, 0.1, 8)

    def step(self, action):
        self.state[:7] += 0.01 * np.asarray(action)
        self.steps += 1
        if self.steps == 9 and self._now("is killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def look(self):
        grey = np.full((32, 32, 3), int(100 + 50 * self.state[0]) % 256, np.uint8)
        images = {"observation.images.image": grey, "observation.images.image2": grey}
        return {**images, "observation.state": self.state.astype(np.float32)}

    def save(self):
        return {"state": self.state.copy()}

    def load(self, state):
        self.state = state["state"].copy()

    def close(self):
        pass


SPEC = UserSpec(f"{__name__}:Faulty", language="push", max_steps=20)


def faulty(fault: str, marker) -> UserSpec:
    return replace(SPEC, arguments={"fault": fault, "marker": str(marker)})


@dataclass(frozen=True)
class Resets:
    """Starts an episode; returns its state."""

    spec: UserSpec
    affinity: tuple = ()

    def run(self, context):
        env = context.keep(("env", self.spec), self.spec.build)
        begin(env, Start(0, 4))
        return env.measure()[0]


@dataclass(frozen=True)
class Walks:
    """An episode of keyed actions; returns the states on its way."""

    spec: UserSpec
    affinity: tuple = ()

    def run(self, context):
        env, rng = context.keep(("env", self.spec), self.spec.build), np.random.default_rng(3)
        begin(env, Start(0, 2))
        states = []
        while env.steps < env.max_steps:
            env.step(rng.normal(0, 1, 7))
            states.append(env.measure()[0])
        return np.stack(states)


@dataclass(frozen=True)
class NeedsMemory:
    affinity: tuple = ()

    def run(self, context):
        import resource

        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, size + 2**28))
        return np.ones(2**28)


@dataclass(frozen=True)
class Says:
    word: str
    affinity: tuple = ()

    def run(self, context):
        return self.word, os.getpid()


def test_a_worker_hung_in_reset_is_replaced_and_the_episode_begins_as_it_would_have(tmp_path):
    with Pool(1, timeout_s=20.0, rebuilds=3) as pool:
        state = pool.map([Resets(faulty("hangs in reset", tmp_path / "hung"))])[0]
    env = SPEC.build()
    begin(env, Start(0, 4))
    np.testing.assert_array_equal(state, env.measure()[0])
    assert (tmp_path / "hung").exists() and not multiprocessing.active_children()


def test_a_worker_killed_in_mid_episode_is_replaced_and_its_episode_is_the_same(tmp_path):
    with Pool(1, rebuilds=1) as pool:
        again = pool.map([Walks(faulty("is killed", tmp_path / "killed"))])[0]
    np.testing.assert_array_equal(again, Walks(SPEC).run(Context(0)))
    assert (tmp_path / "killed").exists()


def test_failures_that_would_repeat_end_the_run_with_their_own_words_and_leave_no_process(tmp_path):
    pool = Pool(1, rebuilds=0)
    with pytest.raises(WorkerError, match=r"(?s)worker 0 failed.*no such table"):
        pool.map([Resets(faulty("raises in reset", tmp_path))])
    with pytest.raises(WorkerError, match=r"(?s)worker 0 failed.*MemoryError"):
        pool.map([NeedsMemory()])
    with pytest.raises(WorkerError, match=r"died \(exit code -9; out of memory\?\).*Walks.*no rebuilds left"):
        pool.map([Walks(faulty("is killed", tmp_path / "killed"))])
    assert not pool._workers and not multiprocessing.active_children()


def test_two_pools_in_one_process_do_not_disturb_each_other():
    with Pool(1) as first, Pool(1) as second:
        ours, theirs = first.run([Says("a"), Says("b")]), second.run([Says("c"), Says("d")])
        mixed = [next(theirs), next(ours), next(theirs)]
        first.close()  # in the middle of its jobs
        assert [word for _, (word, _) in mixed] == ["c", "a", "d"]
        assert len({pid for _, (_, pid) in mixed}) == 2
        assert second.map([Says("e")])[0][0] == "e"
    assert not multiprocessing.active_children()


def test_a_hung_worker_does_not_outlive_a_parent_that_was_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\nfrom dataclasses import dataclass\nfrom sim.workers import Pool\n"
        "@dataclass(frozen=True)\nclass Hangs:\n    path: str\n    affinity: tuple = ()\n"
        "    def run(self, context):\n        open(self.path, 'w').write(f'{os.getpid()} ')\n        time.sleep(600)\n"
        "if __name__ == '__main__':\n    Pool(1).map([Hangs(sys.argv[1])])\n"
    )
    named = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, str(script), str(named)], env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )
    wait_until(lambda: named.exists() and named.read_text().endswith(" "))
    worker = Path(f"/proc/{int(named.read_text())}")
    assert worker.exists()
    parent.kill()
    parent.wait()
    wait_until(lambda: not worker.exists() or "State:\tZ" in (worker / "status").read_text())


def wait_until(holds, timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "still waiting"
        time.sleep(0.1)


def test_opengl_that_fails_for_ever_says_so_at_every_look_and_physics_goes_on(env, monkeypatch):
    import mujoco

    from sim import render

    def broken(width, height):
        raise OSError("eglInitialize failed")

    env.close_renderer()
    monkeypatch.setattr(render, "_screens", threading.local())
    monkeypatch.setattr(mujoco.gl_context, "GLContext", broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"OpenGL makes no context here.*vla-wmrl doctor"):
            env.render(size=32)
    blind = replace(env.spec, image_size=0)
    monkeypatch.setattr(env, "spec", blind)
    env.reset(env.official_states[0])
    env.step(np.zeros(7), sample=True)
    assert list(env.look()) == ["observation.state"]
