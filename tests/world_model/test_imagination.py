"""Imagined rollouts: keyed, independent of their neighbours, and in the form that real ones have."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_wmrl.errors import UserError
from vla_wmrl.types import Start
from vla_wmrl.world_model import imagination
from vla_wmrl.world_model.decoder import JITTER
from vla_wmrl.world_model.latent import StateSpaceModel
from vla_wmrl.world_model.scene import proprioception


def arrays(rollout):
    return {"chain": rollout.chain, "states": rollout.states, "progress": rollout.progress, **rollout.inputs}


def test_the_same_keys_imagine_the_same(make_model, policy, starts):
    model = make_model()
    once, again = (model.imagine(policy, starts, [0] * 4, (5,), 3) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        for name, value in arrays(a).items():
            np.testing.assert_array_equal(value, arrays(b)[name], err_msg=name)


def test_a_rollout_does_not_depend_on_its_neighbours(make_model, policy, starts):
    model = make_model()
    together = model.imagine(policy, starts, [0, 1, 2, 3], (5,), 3)
    for i, rollout in enumerate(together):
        (alone,) = model.imagine(policy, [starts[i]], [i], (5,), 3)
        for name, value in arrays(rollout).items():
            np.testing.assert_allclose(value, arrays(alone)[name], atol=1e-5, err_msg=name)


def test_members_and_seeds_draw_other_noise(make_model, policy, starts):
    model = make_model()
    a, b, c = (model.imagine(policy, starts[:1], [m], (s,), 2)[0] for m, s in ((0, 5), (1, 5), (0, 6)))
    assert not np.allclose(a.chain[0, 0], b.chain[0, 0])
    assert not np.allclose(a.chain[0, 0], c.chain[0, 0])


def test_noise_is_that_of_the_real_twin(make_model, policy, starts):
    """The chain begins with noise keyed (seed, start, look, member), as sim.rollout keys it."""
    from vla_wmrl.policies.noise import noise

    rollout = make_model().imagine(policy, starts[:1], [3], (5, 6), 2, noisy=False)[0]
    for look in range(rollout.looks):
        np.testing.assert_array_equal(rollout.chain[look, 0], noise((5, 6, *starts[0].key, look, 3), (6, 7)))


def test_a_constant_world_model_has_no_spread(make_model, policy, starts):
    model = make_model()
    with torch.no_grad():
        for layer in (model.net.grade_there, model.net.grade_held, model.net.grade_all[-1]):
            layer.weight.zero_()
    rollouts = model.imagine(policy, [starts[0]] * 4, [0, 1, 2, 3], (5,), 2)
    assert len({r.p_success for r in rollouts}) == 1
    assert len({r.value for r in rollouts}) == 1
    assert len({tuple(r.progress) for r in rollouts}) == 1


def test_a_finished_rollout_stops_at_the_step_that_succeeded(make_model, policy, starts):
    model = make_model()
    (rollout,) = model.imagine(policy, starts[:1], [0], (5,), 3, threshold=-1.0)
    assert rollout.success and rollout.terminated and not rollout.truncated
    assert rollout.looks == 1 and rollout.steps == 1 and rollout.executed.sum() == 1
    assert rollout.progress[-1] == 1.0 and len(rollout.states) == 2


def test_shapes_are_those_of_a_real_rollout(make_model, policy, starts, tasks):
    (r,) = make_model().imagine(policy, starts[1:2], [0], (5,), 3, threshold=2.0)
    assert r.source == "imagined" and r.looks == 3 and r.steps == 3 * policy.n_action_steps
    assert r.executed.shape == (3, policy.horizon) and r.executed[:, : policy.n_action_steps].all()
    assert not r.executed[:, policy.n_action_steps :].any()
    assert r.states.shape == (4, tasks[r.start.task_id].size) and r.states.dtype == np.float32
    assert r.progress.shape == (4,) and r.inputs["features"].shape == (3, 4, 6) and r.inputs["state"].shape == (3, 8)
    np.testing.assert_array_equal(r.states[0], starts[1].state)


def test_proprioception_of_the_inputs_is_that_of_the_states(make_model, policy, starts):
    model = make_model()
    (r,) = model.imagine(policy, starts[:1], [0], (5,), 3, threshold=2.0)
    robot, _ = model.scenes.read(0, r.states[:-1])
    np.testing.assert_allclose(r.inputs["state"], proprioception(robot).numpy(), atol=1e-5)


def test_state_dict_round_trip_is_bit_equal(make_model, policy, starts, tasks, tmp_path):
    model = make_model()
    model.save(tmp_path)
    loaded = StateSpaceModel.from_pretrained(tmp_path, tasks)
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, loaded.net.state_dict()[name]), name
    for a, b in zip(
        model.imagine(policy, starts, [0] * 4, (5,), 2), loaded.imagine(policy, starts, [0] * 4, (5,), 2), strict=True
    ):
        np.testing.assert_array_equal(a.states, b.states)
        assert (a.p_success, a.value) == (b.p_success, b.value)


def test_a_model_of_another_layout_is_refused_in_one_line(make_model, tasks, tmp_path):
    make_model().save(tmp_path)
    other = {0: replace(tasks[0], layout={**tasks[0].layout, "robot/eef_pos": (1, 4)})}
    with pytest.raises(UserError, match="task 0"):
        StateSpaceModel.from_pretrained(tmp_path, other)
    with pytest.raises(UserError, match="no world model"):
        StateSpaceModel.from_pretrained(tmp_path / "nowhere", tasks)


def test_weights_of_other_dynamics_are_refused_in_one_line_instead_of_a_list_of_layers(make_model, tasks):
    model = make_model(updates=1)
    state = model.state_dict()
    state["net"]["robot_first.weight"] = state["net"]["robot_first.weight"][:, :-3]
    with pytest.raises(UserError, match="other dynamics: fit a new one"):
        model.load_state_dict(state)


def test_without_a_decoder_the_error_says_so(tasks, policy, starts):
    model = StateSpaceModel(tasks, width=16)
    with pytest.raises(UserError, match="feature decoder"):
        model.imagine(policy, [Start(0, 0, state=starts[0].state)], [0], (1,), 1)


def test_noise_of_looks_is_what_a_real_episode_had_that_the_decoder_leaves_out(make_model, policy, starts, tmp_path):
    """A policy can read places off decoded features that no image shows: see docs/open-questions.md, "Fingers that stay"."""
    model, task_id, first = make_model(), starts[0].task_id, 8

    def imagine(model, member=0, **more):
        start = replace(starts[0], look=first)
        return model.imagine(policy, [start], [member], (5,), 3, noisy=False, **more)[0].inputs["features"]

    with pytest.raises(UserError, match=f"no real look of task {task_id}"):
        imagine(model, look_noise=True)
    decoder = model.decoder
    for task, ((states, _), *_) in list(decoder.looks.items()):  # what is left out of look k is k, in every number
        decoder.looks[task] = [(states[:20], decoder(task, states[:20]).numpy() + np.arange(20)[:, None, None])]
    decoder.keep_residuals()
    plain, noisy, other = imagine(model), imagine(model, look_noise=True), imagine(model, 1, look_noise=True)
    shift = noisy[0] - plain[0] - first  # how far from its own place in the episode the residual was taken
    assert np.ptp(shift) < 0.05 and abs(shift.mean()) < JITTER + 0.05
    np.testing.assert_allclose(other[0], noisy[0], atol=1e-4)  # a group sees one world
    rollout = model.imagine(policy, [replace(starts[0], look=first)], [0], (5,), 3, noisy=False, look_noise=True)[0]
    for look in range(3):  # and a rollout keeps its episode: errors of seeing last
        left_out = noisy[look] - decoder(task_id, rollout.states[look][None])[0].numpy()
        np.testing.assert_allclose(left_out, first + look + shift.mean(), atol=0.05)
    model.save(tmp_path)  # workers imagine with a copy from disk
    again = imagine(StateSpaceModel.from_pretrained(tmp_path), look_noise=True)
    np.testing.assert_array_equal(again, noisy)


def test_a_rollout_ends_where_it_is_decided_without_counting_as_success(make_model, policy, starts):
    model, until = make_model(), lambda start, progress: start is starts[0]
    stopped, whole = model.imagine(policy, starts[:2], [0, 0], (5,), 3, threshold=2.0, until=until)
    _, alone = model.imagine(policy, starts[:2], [0, 0], (5,), 3, threshold=2.0)
    assert stopped.looks == 1 and stopped.truncated and not stopped.success and len(stopped.progress) == 2
    assert stopped.steps == int(stopped.executed.sum()) == policy.n_action_steps
    assert whole.looks == 3
    np.testing.assert_array_equal(whole.states, alone.states)


def test_a_rollout_that_takes_over_a_place_in_the_batch_is_the_same_as_alone(make_model, policy, starts):
    """More rollouts than places, ending at different looks: none may inherit its predecessor's scene, task or action."""
    n, model = imagination.WIDTH + 20, make_model()
    every, members = [starts[i % len(starts)] for i in range(n)], list(range(n))
    until = lambda start, progress: start is starts[1]  # noqa: E731
    together = model.imagine(policy, every, members, (5,), 3, threshold=2.0, until=until)
    assert {r.looks for r in together} == {1, 3} and [r.member for r in together] == members
    for i in range(imagination.WIDTH - 2, n):
        (alone,) = model.imagine(policy, [every[i]], [i], (5,), 3, threshold=2.0, until=until)
        for name, value in arrays(together[i]).items():
            np.testing.assert_allclose(value, arrays(alone)[name], atol=1e-5, err_msg=name)
