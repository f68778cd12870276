"""The choice of renderer, as a table: no GL library is touched."""

import pytest

from sim.gl import Backend, EglDevice, Probe, choose_backend, egl_id_for_cuda, robosuite_import_env, setup_gl
from vla_wmrl.errors import UserError

SOFT = EglDevice(2, software=True, usable=True)
GPU0 = EglDevice(0, software=False, usable=True, cuda_id=1, pci="0000:65:00.0")
GPU1 = EglDevice(1, software=False, usable=True, cuda_id=0, pci="0000:ca:00.0")
DEAD = EglDevice(0, software=False, usable=False, cuda_id=0)
ALL = Probe("linux", (GPU0, GPU1, SOFT), osmesa=True)


@pytest.mark.parametrize(
    ("env", "probe", "expected"),
    [
        ({}, ALL, Backend("egl", 0, False)),
        ({}, Probe("linux", (DEAD, SOFT)), Backend("egl", 2, True)),
        ({}, Probe("linux", (DEAD,), osmesa=True), Backend("osmesa", None, True)),
        ({"MUJOCO_GL": "osmesa"}, ALL, Backend("osmesa", None, True)),
        ({"MUJOCO_GL": "EGL"}, ALL, Backend("egl", 0, False)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ALL, Backend("egl", 1, False)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-abc"}, ALL, Backend("egl", 0, False)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ALL, Backend("egl", 2, True)),
        ({"MUJOCO_EGL_DEVICE_ID": "1"}, ALL, Backend("egl", 1, False)),
        ({}, Probe("darwin"), Backend("cgl", None, False)),
    ],
)
def test_backend_follows_the_machine_and_the_request(env, probe, expected):
    assert choose_backend(env, probe) == expected


@pytest.mark.parametrize(
    ("env", "probe", "words"),
    [
        ({}, Probe("linux"), "apt-get install -y libegl1"),
        ({"MUJOCO_GL": "osmesa"}, Probe("linux", (SOFT,)), "apt-get install -y libosmesa6"),
        ({"MUJOCO_GL": "egl"}, Probe("linux", osmesa=True), "apt-get install -y libegl1"),
        ({"MUJOCO_GL": "glfw"}, ALL, "without a display"),
        ({"MUJOCO_EGL_DEVICE_ID": "7"}, ALL, "usable: 0, 1, 2"),
    ],
)
def test_nothing_to_render_with_says_what_to_install(env, probe, words):
    with pytest.raises(UserError, match=words):
        choose_backend(env, probe)


def test_setup_is_idempotent_and_workers_do_not_probe_again():
    env = {}
    first = setup_gl(env, lambda: Probe("linux", (SOFT,)), modules={})
    assert env["MUJOCO_GL"] == "egl" and env["PYOPENGL_PLATFORM"] == "egl" and env["MUJOCO_EGL_DEVICE_ID"] == "2"

    def never():
        raise AssertionError("probed twice")

    assert setup_gl(env, never, modules={"mujoco": object()}) == first


def test_late_setup_is_an_error_not_a_silent_default():
    with pytest.raises(RuntimeError, match="before"):
        setup_gl({}, lambda: ALL, modules={"mujoco": object()})


def test_cuda_and_egl_orders_are_matched_by_pci_address():
    assert egl_id_for_cuda("00000000:CA:00.0", ALL.egl) == 1
    assert egl_id_for_cuda("65:00.0", ALL.egl) == 0
    assert egl_id_for_cuda("0000:01:00.0", ALL.egl) is None


def test_robosuite_does_not_see_cuda_devices_at_import():
    env = {"CUDA_VISIBLE_DEVICES": "3"}
    with robosuite_import_env(env):
        assert "CUDA_VISIBLE_DEVICES" not in env
    assert env == {"CUDA_VISIBLE_DEVICES": "3"}
