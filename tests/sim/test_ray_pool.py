"""Ray's actors do what processes do, and are lost and replaced as processes are."""

import os
import signal
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest

from sim import compose
from sim.libero import LiberoEnv
from sim.rollout import PolicyRef, RolloutJob, run
from sim.workers import Context, WorkerError, WorkerTimeout
from vla_wmrl import arguments, cli, config
from vla_wmrl.config_commands import EvalConfig
from vla_wmrl.errors import UserError
from vla_wmrl.types import Start


def test_without_ray_the_command_says_how_to_install_it_and_makes_no_folder(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    argv = ["eval", "--policy.path=p", "--workers.pool=ray", f"--output_dir={tmp_path / 'out'}"]
    assert cli.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "make env EXTRAS=dev,ray" in lines[0]
    assert not (tmp_path / "out").exists()


def test_settings_of_ray_without_ray_are_refused():
    with pytest.raises(UserError, match=r"are for workers\.pool=ray"):
        arguments.load(EvalConfig, ["--policy.path=p", "--workers.gpus=0.5"])


@dataclass(frozen=True)
class Echo:
    value: int
    affinity: tuple = ()

    def run(self, context):
        return self.value, context.worker, np.zeros(3)


@dataclass(frozen=True)
class Fails:
    kind: type
    affinity: tuple = ()

    def run(self, context):
        raise self.kind("the job's own words")


@dataclass(frozen=True)
class Hangs:
    affinity: tuple = ()

    def run(self, context):
        time.sleep(3600)


@dataclass(frozen=True)
class DiesInMidEpisode(RolloutJob):
    """Kills its process at the tenth control step, the first time."""

    marker: str = ""

    def run(self, context):
        if not os.path.exists(self.marker):
            original, count = LiberoEnv.step, iter(range(10**6))

            def step(env, action, sample=False):
                if next(count) == 10 + 10:  # settling comes first
                    open(self.marker, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(env, action, sample)

            LiberoEnv.step = step
        return super().run(context)


@pytest.fixture(scope="module")
def pool():
    ray = pytest.importorskip("ray", reason="needs Ray: make env EXTRAS=dev,ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import a test
    try:
        made = compose.make_pool(config.WorkersConfig(pool="ray", n=3, rebuilds=2, timeout_s=600))
    except UserError as error:
        if "does not start" not in str(error):
            raise
        pytest.skip(
            str(error)
        )  # Ray gives its own parts 20 s, which a loaded machine may not keep; nothing of ours is at fault
    with made:
        made.n = 2  # leaves a CPU to other pools
        yield made


def test_results_come_in_the_order_of_the_jobs_and_can_be_written_to(pool):
    results = pool.map([Echo(i) for i in range(5)])
    assert [value for value, _, _ in results] == list(range(5))
    results[0][2][0] = 1.0  # arrays in Ray's store are read-only


def test_an_actor_killed_in_mid_episode_is_replaced_and_its_rollout_is_the_same(pool, env, policy_folder, tmp_path):
    starts = [Start(0, i, split="official") for i in range(2)]
    base = RolloutJob(env.spec, (starts[0],), (0,), PolicyRef(str(policy_folder), eta=0.5), (3,), max_looks=2, width=1)
    jobs = [DiesInMidEpisode(**{**base.__dict__, "starts": (s,)}, marker=str(tmp_path / f"{s.init_id}")) for s in starts]
    (tmp_path / "1").touch()  # the other actor lives
    before = pool.rebuilds_left
    found = pool.map(jobs)
    assert (tmp_path / "0").exists() and pool.rebuilds_left == before - 1
    for start, recorded in zip(starts, found, strict=True):
        job = replace(base, starts=(start,))
        own = run(env, job.policy.load(Context(0)), job)[0].rollout
        for name in ("chain", "states", "executed"):
            np.testing.assert_array_equal(getattr(recorded[0].rollout, name), getattr(own, name))


def test_new_weights_reach_actors_that_share_no_disk(pool, env, policy_folder, tmp_path):
    """The actor's copy is its own: the driver's file is gone by the time another version is asked for."""
    from safetensors.torch import load_file, save_file

    ref = PolicyRef(str(policy_folder), eta=0.5)
    weights = {k: v + 0.1 for k, v in load_file(policy_folder / "model.safetensors").items() if "action_out_proj" in k}
    job = RolloutJob(env.spec, (Start(0, 0, split="official"),), (0,), ref, (3,), max_looks=1, width=1)
    chains = []
    for version, values in enumerate((weights, {k: v + 0.1 for k, v in weights.items()}), 1):
        file = tmp_path / "live.safetensors"
        save_file(values, file)
        live = replace(ref, weights=str(file), version=version)
        chains.append([pool.map([replace(job, policy=live)])[0][0].rollout.chain, live.load(Context(0))])
        own = run(env, chains[-1].pop(), job)[0].rollout.chain
        np.testing.assert_array_equal(chains[-1][0], own)
    assert not np.array_equal(chains[0][0], chains[1][0])


def test_errors_and_hangs_end_the_pool_as_they_do_with_processes(pool):
    from sim.ray_pool import RayPool

    for kind, seen, words in (
        (ValueError, WorkerError, "the job's own words"),
        (UserError, UserError, r"^the job's own words$"),
    ):
        with RayPool(1) as other, pytest.raises(seen, match=words):
            other.map([Fails(kind)])
    with RayPool(1, rebuilds=0) as other:
        other.map([Echo(0)])  # started
        other.timeout_s = 2.0
        with pytest.raises(WorkerTimeout, match="worker 0 silent for 2 s"):
            other.map([Hangs()])
    with pytest.raises(UserError, match="but Ray has 3 CPUs"):
        RayPool(99)
    assert pool.map([Echo(7)])[0][0] == 7  # a pool that others closed beside it goes on
