"""Scripted experts on the real simulator."""

from dataclasses import replace

import numpy as np
import pytest

from sim.expert import Expert
from sim.expert_skills import SHAPES, bounds, category, downward, rotation_vector
from sim.libero import EnvSpec, LiberoEnv
from sim.view import Pose
from vla_wmrl.errors import UserError


def run(env, expert, steps):
    """Acts for at most `steps` control steps; returns whether the goal was reached."""
    return any(env.step(expert.act(env.privileged())) for _ in range(steps))


@pytest.mark.parametrize("init_id", [0, 1])
def test_expert_solves_the_first_task(env, init_id):
    env.reset(env.official_states[init_id])
    assert run(env, Expert("libero_10", 0), 300)


def test_an_object_that_was_dropped_is_grasped_again(env):
    expert = Expert("libero_10", 0)
    env.reset(env.official_states[0])
    name = env.privileged().goal[0][1]
    start = env.privileged().objects[name].pos
    while env.privileged().objects[name].pos[2] < start[2] + 0.05:
        env.step(expert.act(env.privileged()))
        assert env.steps < 100
    adr = env.indices["movable"][name][0]
    env.data.qpos[adr : adr + 3] = start + np.array([0.06, 0.03, 0.0])  # out of the hand, upright, elsewhere
    env.derive()
    assert expert.act(env.privileged())[6] == -1  # opens for another try
    assert run(env, expert, 350)


def test_satisfied_subgoals_are_skipped(env):
    expert = Expert("libero_10", 0)
    env.reset(env.official_states[0])
    view = env.privileged()
    first, second = (" ".join(g) for g in view.goal)
    assert expert.stage(view) == first
    assert expert.stage(replace(view, satisfied=(True, False))) == second
    assert expert.stage(replace(view, satisfied=(True, True))) == "done"


def test_the_same_state_gives_the_same_label_whatever_came_before(env):
    env.reset(env.official_states[2])
    used, view = Expert("libero_10", 0), env.privileged()
    fresh_label = Expert("libero_10", 0).act(view)
    for _ in range(30):
        env.step(used.act(env.privileged()))
    np.testing.assert_array_equal(used.act(view), fresh_label)


@pytest.mark.parametrize("task_id", [2, 3, 9])
def test_labels_of_arbitrary_states_are_actions(task_id):
    """DAgger labels states that no expert reaches; fixtures' skills are the ones with angles and divisions in them."""
    env, rng = LiberoEnv(EnvSpec(task_id=task_id, image_size=0, stepping="fast")), np.random.default_rng(0)
    expert = Expert("libero_10", task_id)
    env.reset(env.official_states[0])
    drift = rng.normal(0, 0.6, (3, 7))
    for i in range(60):
        env.step(np.clip(drift[i // 20] + rng.normal(0, 0.3, 7), -1, 1))
        view = env.privileged()
        n = len(view.goal)
        for satisfied in ((False,) * n, (True, *(False,) * (n - 1)), (True,) * n):
            tumbled = {n: _tumbled(p, rng) if category(n) in SHAPES else p for n, p in view.objects.items()}
            for v in (view, replace(view, objects=tumbled)):
                action = expert.act(replace(v, satisfied=satisfied))
                assert action.shape == (7,) and action.dtype == np.float32
                assert np.isfinite(action).all() and np.abs(action).max() <= 1
    env.close()


def _tumbled(pose, rng):
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    mat = q * np.sign(np.diag(r))
    return Pose(pose.pos + rng.normal(0, 0.05, 3), pose.quat, mat * np.sign(np.linalg.det(mat)))


def test_tasks_without_a_plan_are_a_user_error():
    for suite, task_id in (("libero_goal", 0), ("libero_10", 10)):
        with pytest.raises(UserError, match="no scripted expert"):
            Expert(suite, task_id)


def test_rotation_vector_turns_the_current_frame_into_the_target():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = (_tumbled(Pose(np.zeros(3), np.zeros(4), np.eye(3)), rng).mat for _ in range(2))
        v = rotation_vector(a, b)
        angle = np.linalg.norm(v)
        k = np.cross(np.eye(3), v / angle)  # [v]x
        turn = np.eye(3) + np.sin(angle) * k + (1 - np.cos(angle)) * k @ k
        np.testing.assert_allclose(turn @ a, b, atol=1e-9)


def test_the_hand_turns_less_than_half_a_turn_from_rest(env):
    env.reset(env.official_states[0])
    view = env.privileged()
    for angle in np.linspace(0, 2 * np.pi, 17):
        mat = downward(view, np.array([np.cos(angle), np.sin(angle), 0.0]))
        np.testing.assert_allclose(mat.T @ mat, np.eye(3), atol=1e-12)
        assert np.linalg.det(mat) > 0 and mat[1, 0] > -1e-9


def test_the_table_of_shapes_holds_the_objects_of_the_task(env):
    """The sizes are constants measured from LIBERO's assets: another release of the assets must be noticed."""
    env.reset(env.official_states[0])
    view, m, d = env.privileged(), env.model, env.data
    signs = np.stack(np.meshgrid([-1, 1], [-1, 1], [-1, 1]), -1).reshape(-1, 3)
    for name, pose in view.objects.items():
        body = env.indices["objects"][name]
        geoms = [g for g in range(m.ngeom) if m.body_rootid[m.geom_bodyid[g]] == body and m.geom_contype[g]]
        points = [d.geom_xpos[g] + d.geom_xmat[g].reshape(3, 3) @ (m.geom_aabb[g, :3] + m.geom_aabb[g, 3:] * c)
                  for g in geoms for c in signs]  # fmt: skip
        lo, hi = bounds(pose, SHAPES[category(name)])
        np.testing.assert_allclose(np.min(points, 0), lo, atol=0.004)
        np.testing.assert_allclose(np.max(points, 0), hi, atol=0.004)
