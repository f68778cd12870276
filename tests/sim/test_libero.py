"""The LIBERO protocol on the real simulator."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from sim.libero import EnvSpec, LiberoEnv
from sim.protocol import MAX_STEPS, SETTLE_STEPS, axis_angle
from sim.rollout import begin
from sim.suites import libero_modules, suite_tasks
from vla_wmrl.errors import UserError
from vla_wmrl.types import Start

ACTIONS = np.random.default_rng(0).uniform(-1, 1, (30, 7))


def run(env, actions=ACTIONS):
    for action in actions:
        env.step(action)
    return env.data.qpos.copy(), env.data.qvel.copy()


def test_axis_angle_keeps_robosuites_convention_beyond_pi():
    angle = 3.2
    quat = np.array([np.sin(angle / 2), 0.0, 0.0, np.cos(angle / 2)])
    before = quat.copy()
    np.testing.assert_allclose(axis_angle(quat), [3.2, 0.0, 0.0], atol=1e-12)
    np.testing.assert_array_equal(quat, before)  # openpi's and OFT's helpers change their input


def test_limits_of_every_suite_are_the_benchmarks():
    limits = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
    assert limits == MAX_STEPS


def test_a_spec_pickles_and_an_unknown_name_suggests_the_nearest():
    spec = EnvSpec(task_id=3)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(UserError, match="libero_10"):
        EnvSpec(suite="libero_1O")
    with pytest.raises(UserError, match="tasks 0 to 9"):
        LiberoEnv(EnvSpec(task_id=10))


def test_libero_long_has_its_ten_tasks():
    assert len(suite_tasks("libero_10")) == 10
    assert suite_tasks("libero_10")[0].language == "put both the alphabet soup and the tomato sauce in the basket"


def test_a_restored_snapshot_replays_bit_equal(env):
    env.reset(env.official_states[0])
    run(env, ACTIONS[:5])
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    first = run(env)
    env.reset(env.official_states[1])
    env.restore(snapshot)
    again = run(env)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_episode_depends_on_its_state_and_key_not_on_what_ran_before(env):
    env.reset(env.official_states[2], key=(1, 2))
    first = run(env)
    env.reset(env.official_states[3], key=(4,))
    run(env, ACTIONS[:7])
    env.reset(env.official_states[2], key=(1, 2))
    for a, b in zip(first, run(env), strict=True):
        np.testing.assert_array_equal(a, b)


def test_settling_is_not_counted_and_precedes_the_first_look(env):
    env.reset(env.official_states[0])
    assert env.steps == 0
    assert env.data.time == pytest.approx(SETTLE_STEPS * 0.05, abs=1e-6)
    assert env.look()["observation.state"].shape == (8,)


def test_positive_gripper_actions_close_and_negative_ones_open(env):
    env.reset(env.official_states[0])
    wide = env.privileged().gripper_width
    for _ in range(12):
        env.step(np.array([0, 0, 0, 0, 0, 0, 1.0]))
    closed = env.privileged().gripper_width
    for _ in range(12):
        env.step(np.array([0, 0, 0, 0, 0, 0, -1.0]))
    assert closed < 0.2 * wide and env.privileged().gripper_width > 0.9 * wide


def test_images_are_rotated_by_180_degrees_exactly_once(env):
    import mujoco

    env.reset(env.official_states[0])
    shown = env.render("agentview")
    view = mujoco.MjrRect(0, 0, 32, 32)
    robosuite_frame = np.empty((32, 32, 3), np.uint8)  # what robosuite hands out for this state
    mujoco.mjr_readPixels(robosuite_frame, None, view, env._renderer._context)
    np.testing.assert_array_equal(shown, robosuite_frame[::-1, ::-1])


def test_images_show_no_marks_that_liberos_own_do_not(env):
    """robosuite hides the ball and the line at the grip site in `reset`, which native stepping never calls."""
    env.reset(env.official_states[0])
    _, _, control_env = libero_modules()
    own = control_env(bddl_file_name=env.task.bddl, use_camera_obs=False, has_renderer=False, has_offscreen_renderer=False)
    own.reset()
    np.testing.assert_array_equal(env.model.site_rgba, own.env.sim.model._model.site_rgba)
    own.close()
    marked = LiberoEnv(replace(env.spec, markers=True))
    marked.reset(marked.official_states[0])
    assert (marked.render(size=96) != env.render(size=96)).any()
    marked.close()


def test_training_states_are_keyed_and_are_none_of_the_official_ones(env):
    states = [env.sample_state(i) for i in range(8)]
    np.testing.assert_array_equal(states[3], env.sample_state(3))
    nearest = [np.abs(env.official_states - s).max(axis=1).min() for s in states]
    assert min(nearest) > 1e-4
    assert len({s.tobytes() for s in states}) == 8


def test_a_look_that_was_not_announced_is_refused(env):
    env.reset(env.official_states[0])
    env.step(np.zeros(7))
    with pytest.raises(RuntimeError, match="sample=True"):
        env.look()


def test_actions_that_are_not_finite_are_refused_with_the_step(env):
    env.reset(env.official_states[0])
    with pytest.raises(ValueError, match="control step 0"):
        env.step(np.array([0, 0, np.nan, 0, 0, 0, 0]))


@pytest.mark.parametrize("wrong", [np.zeros(6), np.zeros((7, 1)), np.float64(0), ["0"] * 7, [None] * 7, np.zeros(7, complex)])
def test_what_is_no_action_is_refused_with_the_step_and_moves_nothing(env, wrong):
    env.reset(env.official_states[0])
    before = env.snapshot().physics
    with pytest.raises(ValueError, match=r"control step 0 of libero_10 task 0 .*: an action"):
        env.step(wrong)
    np.testing.assert_array_equal(env.snapshot().physics, before)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"task_id": i} for i in (-1, "0", 1.5, None)), *({"image_size": i} for i in (-1, 63.5, "64")), {"multisample": -1},
        {"placements": 0}, {"lod_mm": float("nan")}, {"lod_mm": float("inf")}, {"lod_mm": -1.0}, {"suite": None},
    ],
)  # fmt: skip
def test_a_spec_that_means_nothing_is_refused_where_it_is_made(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        EnvSpec(**wrong)


def test_a_singular_arm_is_an_error_with_the_step_and_leaves_the_solver_as_it_was(env, monkeypatch):
    def singular(*_):
        raise np.linalg.LinAlgError("Matrix is singular to machine precision.")

    env.reset(env.official_states[0])
    own = env.model.opt.jacobian
    monkeypatch.setattr("sim.native.run", singular)
    with pytest.raises(FloatingPointError, match=r"singular.* at control step 0 of libero_10 task 0"):
        env.step(np.zeros(7))
    assert env.model.opt.jacobian == own


def test_liberos_folder_that_cannot_be_made_is_a_users_mistake(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "file" / "libero"))
    with pytest.raises(UserError, match="set LIBERO_CONFIG_PATH"):
        libero_modules.__wrapped__()


def test_errors_of_a_step_name_its_episode(env):
    env.reset(env.official_states[0], key=(0, 7, 2))
    env.step(np.zeros(7))
    with pytest.raises(ValueError, match=r"control step 1 of libero_10 task 0 .*episode \(0, 7, 2\)"):
        env.step(np.array([0, 0, np.inf, 0, 0, 0, 0]))


def test_actions_beyond_one_are_clipped_as_robosuite_does(env):
    ends = []
    for scale in (1.0, 50.0):
        env.reset(env.official_states[0])
        ends.append(run(env, scale * np.sign(ACTIONS[:5]))[0])
    np.testing.assert_array_equal(*ends)


def test_a_full_arena_is_an_error_not_a_warning_in_a_file(env):
    import mujoco

    env.reset(env.official_states[0])
    env.data.warning.number[int(mujoco.mjtWarning.mjWARN_CONTACTFULL)] = 1
    with pytest.raises(FloatingPointError, match="CONTACTFULL"):
        env.step(np.zeros(7))
    env.reset(env.official_states[0])
    env.step(np.zeros(7))


def test_states_of_another_model_are_refused(env):
    env.reset(env.official_states[0])
    snapshot, state = env.snapshot(), env.official_states[0]
    for wrong in (state[:-1], state[None], np.append(state, 0.0)):
        with pytest.raises(UserError, match="initial state"):
            env.reset(wrong)
    with pytest.raises(UserError, match="not finite"):
        env.reset(np.where(np.arange(len(state)) == 5, np.nan, state))
    with pytest.raises(UserError, match="beyond 1000"):  # finite, but MuJoCo's solver would end the process
        env.reset(np.full_like(state, 1e9))
    for wrong in (replace(snapshot, physics=snapshot.physics[:-1]), replace(snapshot, body_pos=snapshot.body_pos[:-1])):
        with pytest.raises(UserError, match="no state of"):
            env.restore(wrong)
    with pytest.raises(UserError, match="other bodies or joints"):  # of one size: libero_object's tasks differ in names alone
        env.restore(replace(snapshot, model=snapshot.model ^ 1))
    with pytest.raises(UserError, match="task 1 in a simulator of task 0"):
        begin(env, Start(1, 0))


def test_perturbed_suites_keep_the_limits_of_their_own_and_the_words_of_their_files():
    assert LiberoEnv(EnvSpec("libero_goal_swap", 0)).max_steps == MAX_STEPS["libero_goal"]
    plain, reworded, moved = (suite_tasks(f"libero_10{suffix}")[0].language for suffix in ("", "_lan", "_swap"))
    assert plain == moved and reworded != plain
    with pytest.raises(UserError, match="libero_10_swap"):
        suite_tasks("libero_10_swp")
    with pytest.raises(UserError, match="no file"):
        suite_tasks("libero_10_temp")  # named by LIBERO-PRO, and not in its distribution


def test_a_perturbed_suite_is_a_scene_of_its_own(env):
    swapped = LiberoEnv(EnvSpec("libero_10_swap", 0, image_size=0, stepping="fast"))
    for simulator in (env, swapped):
        simulator.reset(simulator.official_states[0])
        simulator.step(np.zeros(7))
    here, there = (e.privileged().objects["alphabet_soup_1"].pos for e in (env, swapped))
    assert np.abs(here - there).max() > 0.02
    swapped.close()


def test_a_diverged_state_is_an_error_not_a_silent_reset(env, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to the working directory
    env.reset(env.official_states[0])
    env.data.qvel[:] = 1e30
    with pytest.raises(FloatingPointError, match="control step"):
        run(env, ACTIONS[:3])


def test_the_state_vector_has_the_layout_it_declares(env):
    from sim.state import read_state, state_spec

    env.reset(env.official_states[0])
    spec, state, view = state_spec(env), read_state(env), env.privileged()
    assert state.shape == (spec.size,) and np.isfinite(state).all()
    np.testing.assert_allclose(state[spec.layout["robot/eef_pos"]], view.eef_pos, atol=1e-6)
    np.testing.assert_allclose(state[spec.layout["basket_1/pos"]], view.objects["basket_1"].pos, atol=1e-6)
    assert ("in", "alphabet_soup_1", "basket_1_contain_region") in spec.goal
