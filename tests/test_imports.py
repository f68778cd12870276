"""Imports go one way, so that each part can be read, tested and replaced without the parts above it.

types <- pure math <- fitted state <- world_model, policies <- train <- cli; sim and text_agents use vla_wmrl, never the
reverse and never each other. Read from the sources with ast: nothing is imported here.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("vla_wmrl", "sim", "text_agents")

# Layer of each module of the core; a module may import its own layer and lower ones.
LAYERS = {
    "errors": 0, "types": 0,
    "arms": 1, "config": 1, "config_commands": 1, "stats": 1, "advantage": 1, "grpo": 1, "anchors": 1,
    "arguments": 2, "debias": 2, "fusion": 2, "progress": 2, "checkpoint": 2,
    "tracking": 3, "streams": 3, "report_plots": 3, "report_html": 3, "report": 4,
    "world_model": 4, "policies": 4,
    "learner": 5, "late": 5, "train": 5, "cli": 6,
}  # fmt: skip
PURE = ("types", "stats", "advantage", "grpo", "anchors", "debias", "fusion")  # arrays in, arrays out
PURE_MAY_NOT = (
    "vla_wmrl.config",
    "vla_wmrl.config_commands",
    "vla_wmrl.tracking",
    "vla_wmrl.checkpoint",
    "vla_wmrl.arguments",
    "logging",
    "argparse",
)


def sources():
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, top_level_only: bool = False):
    """Dotted names that a file imports; `from a import b` counts as a.b, relative imports are resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def layer_of(dotted: str) -> int | None:
    parts = dotted.split(".")
    return LAYERS.get(parts[1]) if parts[0] == "vla_wmrl" and len(parts) > 1 else None


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_packages_do_not_import_upwards_or_sideways(path):
    package = path.relative_to(ROOT).parts[0]
    banned = {"vla_wmrl": ("sim", "text_agents"), "sim": ("text_agents",), "text_agents": ("sim",)}[package]
    wrong = [name for name in imports_of(path) if name.split(".")[0] in (*banned, "tests", "benchmarks")]
    assert not wrong, f"{module_of(path)} imports {wrong}"


@pytest.mark.parametrize("path", [p for p in sources() if p.parts[len(ROOT.parts)] == "vla_wmrl"], ids=module_of)
def test_the_core_imports_its_own_layer_or_lower(path):
    module = module_of(path)
    if module == "vla_wmrl":
        assert not list(imports_of(path)), "vla_wmrl/__init__.py stays empty"
        return
    mine = layer_of(module)
    assert mine is not None, f"{module} has no layer: add it to LAYERS"
    for name in imports_of(path):
        theirs = layer_of(name)
        assert theirs is None or theirs <= mine, f"{module} (layer {mine}) imports {name} (layer {theirs})"


@pytest.mark.parametrize("name", PURE)
def test_the_maths_knows_no_config_device_or_log(name):
    path = ROOT / "vla_wmrl" / f"{name}.py"
    wrong = [i for i in imports_of(path) if i.startswith(PURE_MAY_NOT)]
    assert not wrong, f"{name} imports {wrong}"


def test_only_one_file_imports_libero():
    """Elsewhere LIBERO's conventions would leak (doctor asks for its version through importlib.metadata)."""
    users = [module_of(p) for p in sources() if any(i.split(".")[0] in ("libero",) for i in imports_of(p))]
    assert set(users) <= {"sim.suites"}


def test_mujoco_is_never_imported_before_the_renderer_is_chosen():
    """A module that imports mujoco or robosuite at its top must not be what the command line starts from."""
    for name in (
        "vla_wmrl.cli",
        "vla_wmrl.config",
        "vla_wmrl.arguments",
        "vla_wmrl.arms",
        "sim.gl",
        "sim.doctor",
        "sim.info",
    ):
        path = ROOT / (name.replace(".", "/") + ".py")
        heads = {i.split(".")[0] for i in imports_of(path, top_level_only=True)}
        assert not heads & {"mujoco", "robosuite", "libero", "torch", "lerobot"}, name
