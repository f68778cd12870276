"""benchmarks/episode_twins.py: real episodes beside imagined ones with the same noise keys."""

from argparse import Namespace

import numpy as np

from benchmarks import episode_twins
from vla_wmrl.types import Start
from vla_wmrl.world_model.base import OPEN_HAND


def save(folder, rollout):
    file = folder / f"t{rollout.start.task_id}_i{rollout.start.init_id}_eta0.npz"
    np.savez(file, states=rollout.states[:-1], task_id=rollout.start.task_id, init_id=rollout.start.init_id,
             success=rollout.success, trace_progress=rollout.progress)  # fmt: skip
    return file


def test_the_models_own_episodes_are_their_own_twins(make_model, policy, starts, tmp_path):
    """Another seed, member or start would compare rollouts that differ by their noise alone."""
    model, task_id = make_model(), 0
    mine = [Start(task_id, s.init_id, state=s.state, previous=OPEN_HAND) for s in starts if s.task_id == task_id]
    made = model.imagine(policy, mine, [0] * len(mine), (4, 7), 5, stochastic=False)
    files = [save(tmp_path, r) for r in made]
    row = episode_twins.compare(
        model, policy, task_id, files, Namespace(seed=4, looks=5, noise=True, look_noise=None, physics=False)
    )
    assert row["episodes"] == len(mine)
    assert row["real_success"] == row["imagined_success"]
    assert abs(row["real_best_progress"] - row["imagined_best_progress"]) < 1e-5
    assert all(row[f"hand_cm_{look}"] < 1e-3 for look in episode_twins.EARLY)
    assert all(row[f"turn_deg_{look}"] < 0.1 for look in episode_twins.EARLY)
    other = episode_twins.compare(
        model, policy, task_id, files, Namespace(seed=5, looks=5, noise=True, look_noise=None, physics=False)
    )
    assert other["hand_cm_1"] > 1e-3
    assert "| 0 | " in episode_twins.table([row])
