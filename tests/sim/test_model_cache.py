"""Failures of compiled models on disk, on a toy scene and on a real task."""

import multiprocessing
import os

import mujoco
import numpy as np
import pytest

from sim import mjb, model_cache, parts
from vla_wmrl.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(model_cache.FOLDER, str(tmp_path))
    return tmp_path / "compiled"


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*.npz"))


def test_a_saved_model_is_taken_apart_and_put_together_without_loss(toy):
    model = mujoco.MjModel.from_xml_string(toy)
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    binary = mjb.Binary(buffer)
    assert binary.pack() == buffer.tobytes()
    np.testing.assert_array_equal(binary.arrays["geom_size"], model.geom_size)


def test_a_form_of_saved_models_that_is_not_known_is_refused(toy):
    model = mujoco.MjModel.from_xml_string(toy)
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    buffer[:20].view(np.int32)[4] += 1  # another number of arrays than the header file has
    with pytest.raises(mjb.UnknownFormat):
        mjb.Binary(buffer)


def test_physics_without_pictures_falls_and_collides_with_the_same_bits(folder, toy):
    full = mujoco.MjModel.from_xml_string(toy)
    light, _ = model_cache.compiled(toy)
    assert light.ntexdata < 10 < full.ntexdata
    assert light.nmeshvert == 4 and full.nmeshvert == 8
    runs = []
    for model in (full, light):
        data = mujoco.MjData(model)
        data.qvel[3:] = [1.0, 2.0, 3.0]
        contacts = 0
        for _ in range(400):
            mujoco.mj_step(model, data)
            contacts += data.ncon
        runs.append((data.qpos.copy(), data.qvel.copy(), contacts))
    assert runs[0][2] > 0
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_polygons_of_a_mesh_that_stays_still_belong_to_it(toy):
    """mesh_polymap counts polygons from the mesh's first, or cutting others away would point into nothing."""
    binary = mjb.save(mujoco.MjModel.from_xml_string(toy))
    parts.strip(binary)
    a = binary.arrays
    assert a["mesh_polynum"][:, 0].tolist() == [4, 0]
    assert a["mesh_polymap"].max() < 4 and a["mesh_polyvert"].max() < 4
    assert mjb.load(binary.pack()).nmesh == 2


def test_only_what_pictures_show_is_kept_for_them(folder, toy):
    _, pictures = model_cache.compiled(toy)
    assert [bool(name) for name in pictures.meshes] == [False, True]
    assert [bool(name) for name in pictures.textures] == [True, False]
    assert pictures.texture(0)["pixels"].shape == (32, 64, 3)


def test_a_second_construction_does_not_compile(folder, monkeypatch, toy):
    model_cache.compiled(toy)
    monkeypatch.setattr(model_cache.subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert model_cache.compiled(toy)[0].nbody == 2


def test_pictures_are_stored_once_for_all_tasks_that_show_them(folder, toy):
    model_cache.compiled(toy)
    one = files(folder)
    model_cache.compiled(toy.replace('pos="0 0 .3"', 'pos="0 0 .4"'))
    assert len(files(folder)) == len(one) + 1  # another model, no other mesh or texture


@pytest.mark.parametrize("damage", [b"", b"not a zip file", None], ids=["empty", "garbage", "flipped"])
def test_a_damaged_file_is_made_again_not_loaded(folder, damage, toy):
    model_cache.compiled(toy)
    want = model_cache.compiled(toy)[1].mesh(1)["vert"]
    for path in folder.rglob("*.npz"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data if damage is None else damage)
    model, pictures = model_cache.compiled(toy)
    assert model.nbody == 2
    np.testing.assert_array_equal(pictures.mesh(1)["vert"], want)
    assert pictures.texture(0)["pixels"].any()


def test_a_picture_that_vanished_while_a_worker_ran_is_made_again(folder, toy):
    _, pictures = model_cache.compiled(toy)
    for path in (folder / "textures").iterdir():
        path.unlink()
    assert pictures.texture(0)["pixels"].any()


def test_an_asset_that_changed_is_compiled_again(tmp_path):
    file = tmp_path / "part.stl"
    file.write_bytes(b"one")
    xml = f'<mesh file="{file}"/>'
    before = model_cache.key_of(xml)
    assert model_cache.key_of(xml) == before
    file.write_bytes(b"other")
    assert model_cache.key_of(xml) != before


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(tmp_path, monkeypatch, toy):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv(model_cache.FOLDER, str(file))
    with pytest.raises(UserError, match=model_cache.FOLDER):
        model_cache.compiled(toy)


def test_a_model_that_does_not_compile_says_why(folder):
    with pytest.raises(UserError, match="wrong"):
        model_cache.compiled("<mujoco><wrong/></mujoco>")


def _build(toy: str, folder: str, start, results) -> None:
    os.environ[model_cache.FOLDER] = folder
    start.wait()
    results.put(model_cache.compiled(toy)[0].nbody)


@pytest.mark.slow
def test_processes_that_build_at_once_all_get_the_model(folder, toy):
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(3), spawn.Queue()
    workers = [spawn.Process(target=_build, args=(toy, str(folder.parent), start, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=300) for _ in workers] == [2, 2, 2]
    for worker in workers:
        worker.join(60)
    assert not list(folder.rglob("*.tmp"))
    assert len(list((folder / "models").iterdir())) == 1
