"""Rotation conventions and the way from state vectors to scenes and back."""

import numpy as np
import pytest
import torch

from tests.world_model.toy_world import make_trace
from vla_wmrl.world_model import features, latent
from vla_wmrl.world_model.dynamics import Dynamics, Scene
from vla_wmrl.world_model.geometry import axis_angle, matrix, quaternion, rot6, turn
from vla_wmrl.world_model.scene import Context, Scenes, proprioception


def rotation(vector):
    from scipy.spatial.transform import Rotation

    return torch.from_numpy(Rotation.from_rotvec(vector).as_matrix()).float()


def hand_to_site(hand):
    """The grip site's axes for a hand's: the inverse of what proprioception undoes."""
    return torch.stack([-hand[..., :, 1], hand[..., :, 0], hand[..., :, 2]], dim=-1)


def test_an_angle_beyond_pi_keeps_its_axis():
    """3.2 rad about x must stay [3.2, 0, 0]: the policy was normalised on values around pi, without a flip of sign."""
    for angle in (2.9, 3.1, 3.2, 3.3):
        robot = torch.zeros(1, 16)
        robot[:, 3:9] = rot6(hand_to_site(rotation([angle, 0, 0])))
        np.testing.assert_allclose(proprioception(robot)[0, 3:6], [angle, 0, 0], atol=2e-3)


def test_axis_angle_is_the_simulators():
    from sim.protocol import axis_angle as reference

    rng = np.random.default_rng(0)
    for _ in range(50):
        vector = np.array([3.14, 0, 0]) + rng.normal(0, 0.3, 3)
        quat = quaternion(rotation(vector))
        quat = quat * (-1 if quat[0] < 0 else 1)
        np.testing.assert_allclose(axis_angle(quat).numpy(), reference(quat.double().numpy()), atol=2e-3)


def test_turning_re_orthonormalises():
    r = rot6(rotation([0.3, -2.0, 1.0]))
    for _ in range(200):
        r = turn(r, torch.tensor([0.1, -0.05, 0.08]))
    m = matrix(r)
    torch.testing.assert_close(m.T @ m, torch.eye(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(rot6(m), r, atol=1e-5, rtol=0)


def test_turning_is_a_rotation_in_the_world_frame():
    start, omega = rotation([0.3, -2.0, 1.0]), np.array([0.02, -0.03, 0.05])
    torch.testing.assert_close(
        matrix(turn(rot6(start), torch.tensor(omega).float())), rotation(omega) @ start, atol=1e-3, rtol=0
    )


def test_writing_a_scene_back_changes_nothing(tasks):
    scenes = Scenes(list(tasks.values()))
    for task in tasks.values():
        states = make_trace(task, 1).states[:3].copy()
        first, last = task.layout[f"{task.objects[0]}/angvel"]
        states[:, first:last] = [0.1, -0.2, 0.3]
        robot, bodies = scenes.read(task.task_id, states)
        np.testing.assert_allclose(scenes.write(task.task_id, states, robot, bodies), states, atol=1e-6)


def test_padding_is_nobodys_neighbour(tasks):
    scenes = Scenes(list(tasks.values()))
    context = scenes.context(3, make_trace(tasks[3], 0).states[:2], {})
    assert context.present.tolist() == [[1, 0], [1, 0]]
    assert (context.blocked[:, 0, 1] > 0).all()


def test_the_goal_of_an_object_is_the_basket_that_owns_the_region(tasks):
    assert tasks[0].targets() == {"soup_1": "basket_1", "sauce_1": "basket_1"}
    assert tasks[0].body("basket_1_contain_region") == "basket_1" and tasks[0].body("table_region") is None


def test_the_dynamics_see_and_are_charged_for_a_hand_that_is_turned_by_half_a_degree():
    """At a unit of three degrees it was a degree off, and policies that read degrees off the hand were imagined wrong."""

    def seen(angle):
        robot = torch.zeros(1, 16)
        robot[:, 3:9] = rot6(hand_to_site(rotation([np.pi + angle, 0, 0])))
        return features.robot_features(features.Parts(robot, torch.zeros(1, 1, 15)))

    half = np.radians(0.5)
    assert float((seen(half) - seen(0.0)).abs().max()) > 0.1
    assert half > latent.EEF_TURN_UNIT  # where the loss is linear


def test_five_millimetres_decide_whether_fingers_land_on_a_can_and_the_dynamics_see_them():
    """Four centimetres above its centre fingers land on its rim; features that were flat there let the hand sink in."""

    def seen(above, beside=0.0):
        robot, bodies = torch.zeros(1, 16), torch.zeros(1, 1, 15)
        robot[:, 3:9] = rot6(hand_to_site(rotation([np.pi, 0, 0])))
        robot[:, 2], robot[:, 0] = above, beside
        p = features.Parts(robot, bodies)
        return features.touch_features(p.away, p.frame)

    assert seen(0.04).shape == (1, 1, features.TOUCH_FEATURES)
    for above in (0.02, 0.04, 0.06):
        assert float((seen(above) - seen(above + 0.005)).abs().max()) > 0.5
    assert float((seen(0.04, 0.007) - seen(0.04, 0.012)).abs().max()) > 0.5


def reach(x, y, z=0.0, yaw=0.0, fingers=(0.04, -0.04)):
    """[2, 3 points, 2 axes, OUTLINE] of a thing at (x, y, z) from a hand that points down and opens along x at yaw 0."""
    robot = torch.zeros(1, 16)
    hand = rotation([0, 0, yaw]) @ torch.tensor([[-1.0, 0, 0], [0, 1, 0], [0, 0, -1]])
    robot[:, 3:9], robot[:, 9:11] = rot6(hand), torch.tensor(fingers)
    p = features.Parts(robot, torch.zeros(1, 1, 15))
    seen = features.reach_features(p, torch.tensor([[[x, y, z]]]))
    assert seen.shape == (1, 1, 2, features.REACH_FEATURES)
    return seen[0, 0, :, : 2 * 3 * len(features.OUTLINE)].unflatten(-1, (3, 2, len(features.OUTLINE)))


def over(x, y, **more):
    """Which points of the hand are over a box of 1 cm half-width there: (finger, end, half-way) of either side."""
    return (reach(x, y, **more)[..., 0] < 0).all(-1).int().tolist()


def test_the_hands_body_stands_on_what_the_fingers_pass_beside():
    """It is 20 cm wide: it stood on a basket's rim while the fingers reached for a can, and the dynamics, which saw
    distances from the fingers' middle only, let the hand sink through (docs/open-questions.md)."""
    assert over(0.04, 0.0) == [[1, 0, 0], [0, 0, 0]]  # the first finger is where the simulator has it, at -x of the hand's axes
    assert over(-0.1, 0.0) == [[0, 0, 0], [0, 1, 0]]
    assert over(0.052, 0.0) == [[0, 0, 1], [0, 0, 0]]
    assert over(0.0, 0.1) == [[0, 0, 0], [0, 0, 0]]
    assert over(0.0, 0.1, yaw=np.pi / 2) == [[0, 1, 0], [0, 0, 0]]
    assert over(0.01, 0.0, fingers=(0.0, -0.04)) == [[0, 0, 0], [0, 0, 0]] and over(0.0, 0.0, fingers=(0.0, 0.0))[0][0] == 1


DOWN = torch.tensor([[0.0, 0, -1, 0, 0, 0, -1]])


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Dynamics(types=2, other_types=2, tasks=1)


def moved(net, other=10.0, kind=0):
    """[3] how far the hand goes down beside a body, with something of a kind `other` m below it."""
    robot, bodies = torch.zeros(1, 16), torch.zeros(1, 1, 15)
    robot[:, 3:9], bodies[..., 3], bodies[..., 7] = rot6(hand_to_site(rotation([np.pi, 0, 0]))), 1.0, 1.0
    none = torch.zeros(1, 1, dtype=torch.int64)
    context = Context(none, none[0], torch.ones(1, 1), none, torch.zeros(1, 1), torch.tensor([[[0.0, 0.0, -other]]]),
                      torch.full((1, 1), kind), torch.zeros(1, 1, 2))  # fmt: skip
    with torch.no_grad():
        return net.step(Scene(robot, bodies), context, DOWN, DOWN)[0].robot[0, :3]


def test_a_stopped_hand_stays_and_a_free_one_moves(net):
    assert float(moved(net).norm()) > 0.005
    with torch.no_grad():
        net.robot_out.bias[-3:] = 20.0
    assert float(moved(net).norm()) < 1e-6


def test_what_is_wanted_nowhere_can_stop_a_hand_too(net):
    """A hand came down through a milk carton that no goal names, and grasped what stood behind it."""
    with torch.no_grad():
        net.robot_out.weight.mul_(100)
    here, above = moved(net, 0.07, kind=1), moved(net, 0.075, kind=1)
    assert not torch.allclose(here, above)
    torch.testing.assert_close(moved(net, 0.07), moved(net, 0.075))  # padding is nowhere


def test_padding_and_what_lies_there_are_told_apart(tasks):
    scenes = Scenes(list(tasks.values()))
    for task_id, task in tasks.items():
        context = scenes.context(task_id, np.zeros((2, task.size), dtype=np.float32), {})
        known = [scenes.other_types[k] for k in context.other_kind[0]]
        still = scenes.still(task)
        assert [k for k in known if k != "nothing"] == [n.rsplit("_", 1)[0] for n in still]
        assert not set(still) & set(scenes.names[task_id])
