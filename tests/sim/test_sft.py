"""`vla-wmrl sft` on a made-up data set: no simulator, a tiny policy."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from sim import demo_data, sft, vision
from sim.demos import Demonstration, SceneWriter, Writer
from sim.protocol import CAMERAS, STATE_KEY
from vla_wmrl.config_commands import SftConfig, SftDatasetConfig, SftPolicyConfig
from vla_wmrl.errors import UserError
from vla_wmrl.policies import checkpoint_io, nano
from vla_wmrl.policies.flow import FROZEN, FlowPolicy

SIZE = 32


def demonstration(rng, index, steps):
    """A bright square whose place is the scene's only object; the action points at it."""
    place = rng.uniform(-0.3, 0.3, 2)
    row, column = ((place + 0.3) / 0.6 * (SIZE - 8)).astype(int)
    image = np.zeros((steps, SIZE, SIZE, 3), np.uint8)
    image[:, row : row + 8, column : column + 8] = 255
    states = np.zeros((steps + 1, 6), np.float32)
    states[:, 3:5] = place
    actions = np.tile(np.array([*place, 0, 0, 0, 0, index % 2 * 2 - 1], np.float32), (steps, 1))
    return Demonstration(
        task_id=index % 2,
        init_id=index,
        task=("put it here", "put it there")[index % 2],
        success=True,
        frames={**dict.fromkeys(CAMERAS, image), STATE_KEY: rng.normal(size=(steps, 8)).astype(np.float32)},
        labels=actions + np.arange(steps, dtype=np.float32)[:, None] * 1e-3,
        actions=actions,
        states=states,
        layout={"robot/eef_pos": (0, 3), "ball_1/pos": (3, 6)},
    )


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("demos"), np.random.default_rng(0)
    found = []
    for name, lengths in (("a", (9, 20)), ("b", (12, 5, 7))):
        writer = Writer(folder / name, SIZE)
        for index, steps in enumerate(lengths):
            writer.add(demonstration(rng, index, steps))
        writer.close()
        found.append(str(folder / name))
    return found


def config(roots, out, **changes):
    policy = SftPolicyConfig(layers=1, width=48, image_size=SIZE, num_steps=2)
    defaults = {"steps": 4, "save_every": 2, "batch_size": 8, "vision_warmup_steps": 2}
    data = SftDatasetConfig(root=list(roots))
    return SftConfig(output_dir=str(out), device="cpu", dataset=data, policy=policy, **{**defaults, **changes})


def test_joined_data_keeps_episodes_apart(roots):
    data = demo_data.load(roots, stride=2)
    assert len(data.state) == 53 and data.tasks == ("put it here", "put it there")
    assert np.bincount(data.episode).tolist() == [9, 20, 12, 5, 7]
    actions, padded = data.chunks(np.arange(len(data.looks)), 16)
    for look, frame in enumerate(data.looks):
        left = data.end[frame] - frame
        assert padded[look].sum() == max(0, 16 - left)
        assert np.array_equal(actions[look][: min(16, left)], data.action[frame : frame + min(16, left)])
        assert np.all(actions[look][min(16, left) :] == data.action[data.end[frame] - 1])


def test_few_imitated_episodes_are_the_first_of_every_task(roots):
    data = demo_data.load(roots, stride=1)
    assert np.array_equal(sft.imitated(data, None), np.arange(len(data.looks)))
    for episodes in (1, 2):
        rows = sft.imitated(data, episodes)
        for task in (0, 1):
            taught = np.unique(data.episode[data.looks[rows]][data.task[data.looks[rows]] == task])
            assert taught.tolist() == np.unique(data.episode[data.task == task])[:episodes].tolist()


def test_images_and_scene_belong_to_their_frame(roots):
    data = demo_data.load(roots, stride=1)
    for look in (0, 15, 40, 52):
        rows, columns = np.nonzero(data.images[look, 0, :, :, 0])
        expected = ((data.scene[data.looks[look], 3:5] + 0.3) / 0.6 * (SIZE - 8)).astype(int)
        assert (rows.min(), columns.min()) == tuple(expected)
    assert data.scene_names == (("robot/eef_pos", "ball_1/pos"),) * 2


def test_an_image_that_repeats_an_older_one_teaches_nothing(tmp_path):
    """With render_every=2, frames between two rendered ones carry the image before them; episodes of odd length shift them."""
    rng = np.random.default_rng(0)
    writer = Writer(tmp_path / "d", SIZE)
    for index, steps in enumerate((5, 7, 4)):
        demo = dataclasses.replace(demonstration(rng, index, steps), render_every=2)
        writer.add(demo)
    writer.close()
    for stride, expected in ((1, [0, 2, 4]), (2, [0, 2, 4]), (3, [0])):  # 3: every sixth
        data = demo_data.load([str(tmp_path / "d")], stride=stride)
        assert data.looks[data.episode[data.looks] == 0].tolist() == expected
        assert data.looks[data.episode[data.looks] == 1][0] == 5


def test_scenes_teach_vision_and_nothing_else(roots, tmp_path, monkeypatch):
    rng, writer = np.random.default_rng(3), SceneWriter(tmp_path / "s")
    demos = [dataclasses.replace(demonstration(rng, i, 9), render_every=4) for i in range(6)]
    for demo in demos:
        writer.add(demo)
    data = demo_data.load(roots, [str(tmp_path / "s")], stride=1)
    assert len(data.images) == 53 + 6 * 3 and data.episode.max() == 4 + 6
    for look in range(53, 71):
        rows, columns = np.nonzero(data.images[look, 0, :, :, 0])
        expected = ((data.scene[data.looks[look], 3:5] + 0.3) / 0.6 * (SIZE - 8)).astype(int)
        assert (rows.min(), columns.min()) == tuple(expected)
    with pytest.raises(UserError, match="not a LeRobotDataset"):  # as a root its frames would be imitated, without a next one
        demo_data.load([str(tmp_path / "s")])
    seen = {}
    monkeypatch.setattr(vision, "warm_up", lambda policy, data, *rest: seen.update(looks=len(data.looks)) or 0.01)
    monkeypatch.setattr(sft, "train", lambda cfg, policy, processors, data, resume: seen.update(actions=len(data.looks)))
    cfg = config(roots, tmp_path / "out")
    cfg.dataset.scenes = [str(tmp_path / "s")]
    assert sft.main(cfg) == 0
    assert seen["looks"] - seen["actions"] == 18


def test_vision_of_another_checkpoint_is_taken_over_bit_for_bit_and_nothing_else_is(roots, tmp_path):
    first = tmp_path / "first"
    sft.main(config(roots, first, seed=1))
    taken = config(roots, tmp_path / "second")
    taken.policy.vision_path = str(first / "policy")
    sft.main(taken)
    states = [checkpoint_io.load(run / "policy")[0].state_dict() for run in (first, tmp_path / "second")]
    for name, value in states[0].items():
        same = torch.equal(value, states[1][name])
        if any(part in name for part in FROZEN):
            assert same, name
        elif "state_proj.weight" in name or "lm_expert.layers.0" in name:
            assert not same, name
    other = config(roots, tmp_path / "third")
    other.policy.vision_path, other.policy.vision_layers = str(first / "policy"), 2
    with pytest.raises(UserError, match="vision_layers"):
        sft.main(other)
    other.policy.path = other.policy.vision_path
    with pytest.raises(UserError, match="one of them"):
        other.validate()


def test_action_statistics_have_no_vanishing_std(roots):
    stats = demo_data.load(roots).statistics()
    assert stats["action"]["std"].min() >= demo_data.MINIMAL_STD and stats[STATE_KEY]["mean"].shape == (8,)


def test_warm_up_teaches_where_things_are(tmp_path):
    rng = np.random.default_rng(1)
    writer = Writer(tmp_path / "d", SIZE)
    for index in range(60):
        writer.add(demonstration(rng, index, 2))
    writer.close()
    data = demo_data.load([str(tmp_path / "d")])
    spec = nano.NanoSpec(image_size=SIZE, width=48, layers=1, heads=2, vision_width=32, vision_layers=1, vision_heads=2)
    nano.build_policy(tmp_path / "p", spec, data.tasks, data.statistics())
    policy, *_ = checkpoint_io.load(tmp_path / "p")
    spread = 100 * np.linalg.norm(data.scene[:, 3:5].std(0))
    assert 100 * vision.warm_up(policy, data, 300, 32, 2e-3, seed=0, held_out=0.2) < 0.5 * spread


def test_training_writes_a_policy_that_loads_and_resumes_to_the_same_bits(roots, tmp_path):
    assert sft.main(config(roots, tmp_path / "whole")) == 0
    assert sft.main(config(roots, tmp_path / "parts", steps=4, save_every=2)) == 0
    checkpoints = tmp_path / "parts" / "checkpoints"
    (checkpoints / "last").unlink()
    (checkpoints / "last").symlink_to("000002")
    assert sft.main(config(roots, tmp_path / "parts", resume=True)) == 0
    whole, parts = (FlowPolicy.from_pretrained(tmp_path / n / "policy", eta=0.5) for n in ("whole", "parts"))
    ours, theirs = whole.policy.state_dict(), parts.policy.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = [json.loads(line)["step"] for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert rows == sorted(set(rows)) and rows[-1] == 4
    assert str(tmp_path) not in (tmp_path / "whole" / "policy" / "config.json").read_text()
    assert str(tmp_path) not in (tmp_path / "whole" / "policy" / "policy_preprocessor.json").read_text()


def test_a_checkpoint_to_start_from_needs_no_output_folder_made_before(roots, tmp_path):
    """A new policy's `init/` makes the folder; with --policy.path nothing did, and the run ended after the features."""
    assert sft.main(config(roots, tmp_path / "first", steps=1)) == 0
    cfg = config(roots, tmp_path / "second", steps=1)
    cfg.policy.path = str(tmp_path / "first" / "init")
    assert sft.main(cfg) == 0
    assert (tmp_path / "second" / "policy" / "config.json").is_file()


def test_a_folder_that_is_no_data_set_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="not a LeRobotDataset"):
        demo_data.load([str(tmp_path)])


def test_images_of_another_size_than_the_policy_are_refused(roots, tmp_path):
    cfg = config(roots, tmp_path / "x")
    cfg.policy.image_size = 64
    with pytest.raises(UserError, match="pixels"):
        sft.main(cfg)


def test_an_object_that_a_task_lacks_teaches_nothing_and_spoils_nothing(roots, tmp_path):
    data = demo_data.load(roots)
    scene = np.concatenate([data.scene, data.scene[:, 3:6] + 0.1], axis=1)
    scene[data.task == 0, 6:] = np.nan  # one task has a second object, the other has not
    data = dataclasses.replace(data, scene=scene)
    assert np.isfinite(vision.units(data)).all()
    spec = nano.NanoSpec(image_size=SIZE, width=48, layers=1, denoising_steps=2)
    nano.build_policy(tmp_path, spec, data.tasks, data.statistics())
    policy, *_ = checkpoint_io.load(tmp_path)
    assert np.isfinite(vision.warm_up(policy, data, steps=3, batch_size=8, lr=1e-3, seed=0))
    assert all(torch.isfinite(p).all() for p in policy.parameters())


def test_a_policy_cannot_read_the_phase_off_a_hand_that_tilts_by_a_degree():
    """Demonstrations tilt it by half a degree: normalised, a degree was two standard deviations, and policies acted on it."""
    still = torch.zeros(4000, 8)
    spread = sft.blurred({STATE_KEY: still}, lambda batch: {STATE_KEY: 10 * batch[STATE_KEY]})[STATE_KEY].std(0)
    assert torch.allclose(spread[3:6], torch.full((3,), 10 * sft.TURN_NOISE), rtol=0.1), spread  # rad, before normalisation
    assert (spread[[0, 1, 2, 6, 7]] < 1.2 * sft.STATE_NOISE).all()
    assert not still.any()  # the data stays as it is
    other = sft.blurred({STATE_KEY: torch.zeros(4000, 9)}, dict)[STATE_KEY].std(0)
    assert (other < 1.2 * sft.STATE_NOISE).all()  # whose numbers 3 to 5 may be anything
