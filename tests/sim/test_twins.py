"""Films of twins: a picture shows the state that it was made from."""

import numpy as np

from sim.state import read_state, state_spec
from sim.twins import SIZE, TwinJob, put_state
from sim.workers import Context
from vla_wmrl.types import Start


def moved(env):
    """A state some way from the start, with the hand turned and the gripper closing; and a snapshot of where it began."""
    env.reset(env.official_states[0])
    begun = env.snapshot()
    first = read_state(env)
    for _ in range(15):
        env.step(np.array([0.6, -0.4, -0.5, 0.2, 0.1, 0.3, 1.0]))
    return begun, first, read_state(env), env.render("agentview", 96)


def test_a_state_put_into_the_simulator_reads_and_looks_like_the_one_it_was_read_from(env):
    begun, _, state, picture = moved(env)
    layout = state_spec(env).layout
    env.restore(begun)
    blind = state.copy()
    blind[layout["robot/arm_qpos"]] = 0.0  # the world model does not step the arm's joints: they must not be needed
    put_state(env, blind)
    again = read_state(env)
    for name, part in layout.items():
        if not name.endswith(("vel", "arm_qpos")):
            np.testing.assert_allclose(again[part], state[part], atol=2e-3, err_msg=name)
    assert np.abs(env.render("agentview", 96).astype(int) - picture).mean() < 1.0


def test_a_film_shows_both_and_no_difference_where_they_agree(env):
    begun, first, state, _ = moved(env)
    job = TwinJob(env.spec, Start(0, 0, snapshot=begun), np.stack([first, state]), np.stack([first, state, first]))
    context = Context(0)
    context.keep(("env", env.spec), lambda: env)
    film = job.run(context)
    assert film.shape == (3, SIZE, 3 * SIZE, 3) and film.dtype == np.uint8
    error = film[:, :, 2 * SIZE :].mean((1, 2, 3))
    assert max(error[:2]) < 0.5 < error[2]
