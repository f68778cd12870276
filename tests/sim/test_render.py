"""Failures of drawing: other pixels than MuJoCo's own renderer, textures freed under another task's feet, memory kept."""

import mujoco
import numpy as np
import pytest

from sim import model_cache, parts, render


@pytest.fixture
def scenes(toy):
    """XML of two scenes that share a texture."""
    return toy, toy.replace('mesh="soft" group="1"', 'mesh="soft" group="1" quat="1 .3 0 0"')


@pytest.fixture
def toys(scenes, tmp_path, monkeypatch):
    """(model without pictures, pictures, data) of both."""
    monkeypatch.setenv(model_cache.FOLDER, str(tmp_path))
    made = []
    for xml in scenes:
        model, pictures = model_cache.compiled(xml)
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        made.append((model, pictures, data))
    return made


def mujocos_own(xml, size):
    """What `mujoco.Renderer` makes of the model with everything in it, rotated as LIBERO's images are."""
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    option = mujoco.MjvOption()
    option.geomgroup[0] = 0
    with mujoco.Renderer(model, size, size) as renderer:
        renderer.update_scene(data, "eye", scene_option=option)
        return renderer.render()[:, ::-1]


def test_images_are_those_of_the_whole_model_at_every_size_and_whatever_else_is_drawn(toys, scenes):
    renderers = [render.CameraRenderer(model, pictures) for model, pictures, _ in toys]
    for size in (32, 200, 64):
        for renderer, (model, _, data), xml in zip(renderers, toys, scenes, strict=True):
            shown = renderer.render(model, data, "eye", size)
            assert shown.std() > 10
            np.testing.assert_array_equal(shown, mujocos_own(xml, size))
    for renderer in renderers:
        renderer.close()


def test_closing_one_renderer_leaves_the_textures_that_another_shows(toys):
    first, second = (render.CameraRenderer(model, pictures) for model, pictures, _ in toys)
    model, _, data = toys[1]
    before = second.render(model, data, "eye", 64)
    held = len(render._screen().textures)
    first.close()
    assert len(render._screen().textures) == held
    np.testing.assert_array_equal(second.render(model, data, "eye", 64), before)
    second.close()
    assert len(render._screen().textures) == held - 1
    again = render.CameraRenderer(model, toys[1][1])
    np.testing.assert_array_equal(again.render(model, data, "eye", 64), before)
    again.close()


def test_clustering_keeps_corners_normals_and_texture_coordinates_together():
    rng = np.random.default_rng(0)
    face = rng.integers(0, 40, (60, 3)).astype(np.int32)
    mesh = {
        "vert": rng.uniform(0, 0.03, (40, 3)).astype(np.float32), "normal": rng.normal(size=(40, 3)).astype(np.float32),
        "texcoord": rng.uniform(size=(40, 2)).astype(np.float32), "face": face, "facenormal": face, "facetexcoord": face,
    }  # fmt: skip
    small = parts.simplify(mesh, 0.01)
    assert 0 < len(small["face"]) < len(face) and len(small["vert"]) <= 27
    kept = {tuple(row) for row in small["normal"][small["facenormal"]].reshape(-1, 9).round(5)}
    assert kept <= {tuple(row) for row in mesh["normal"][face].reshape(-1, 9).round(5)}
    np.testing.assert_array_equal(parts.simplify(mesh, 1.0)["face"], face)  # it all fits into one cell: left as it is
