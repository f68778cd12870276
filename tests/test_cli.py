"""The command line: help without heavy imports, mistakes as one line with exit code 2, earlier results untouched."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from vla_wmrl import arguments, cli
from vla_wmrl.config import TrainConfig
from vla_wmrl.errors import UserError

TRAIN = ["train", "--policy.path=p", "--world_model.path=w"]
HEAVY = ("torch", "mujoco", "lerobot", "libero", "robosuite", "transformers", "numpy", "matplotlib", "sklearn")


def heavy_imports_of(*argv):
    """Run the command in a new process; (exit code, stdout, stderr, heavy modules it imported)."""
    code = (
        "import sys; from vla_wmrl.cli import main; rc = main(sys.argv[1:]);"
        f"print('\\nHEAVY', *[m for m in {HEAVY!r} if m in sys.modules]); sys.exit(rc)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        check=False,
    )
    out, _, heavy = done.stdout.rpartition("HEAVY")
    return done.returncode, out, done.stderr, heavy.split()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_every_command_imports_nothing_heavy(command):
    rc, out, err, heavy = heavy_imports_of(command, "--help")
    assert (rc, heavy) == (0, []), err
    assert f"usage: vla-wmrl {command}" in out and "--" in out


def test_wrong_input_imports_nothing_heavy_and_exits_with_two():
    rc, _, err, heavy = heavy_imports_of("train", "--grpo.group_sise=8")
    assert (rc, heavy) == (2, [])
    assert err == "error: unknown key 'grpo.group_sise' in the command line (did you mean grpo.group_size?)\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "did you mean train"),
        (["train"], "--policy.path"),
        ([*TRAIN, "--resume"], "--output_dir"),
        ([*TRAIN, "--env.suite=libero_9"], "did you mean libero_90"),
        (["report", "--output_dir=no/such/run"], "no run folder"),
        (["info"], "--path or --suite"),
    ],
)
def test_mistakes_are_one_line_on_stderr(argv, words, capsys):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


def test_an_existing_run_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert cli.main([*TRAIN, f"--output_dir={tmp_path}"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        cli.read_config("train", [*TRAIN[1:], "--resume", f"--output_dir={tmp_path / 'new'}"])


def test_resume_takes_the_runs_own_config_and_refuses_another_run(tmp_path):
    arguments.save(arguments.load(TrainConfig, [*TRAIN[1:], "--seed=5", "--steps=2"]), tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    cfg = cli.read_config("train", ["--resume", f"--output_dir={tmp_path}", "--steps=4"])
    assert (cfg.seed, cfg.steps, cfg.resume, cfg.policy.path) == (5, 4, True, "p")
    with pytest.raises(UserError, match=r"grpo\.lr"):
        cli.read_config("train", ["--resume", f"--output_dir={tmp_path}", "--grpo.lr=0.1"])


def test_a_failed_start_does_not_block_the_next_one(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    cli.check_output_dir(str(tmp_path), resume=False)


def test_a_full_disk_is_one_line_and_other_errors_keep_their_traceback(monkeypatch, capsys):
    def full(argv):
        raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")

    monkeypatch.setattr(cli, "run", full)
    assert cli.main([]) == 2
    assert capsys.readouterr().err.startswith("error: the disk is full (run/metrics.jsonl)")

    def denied(argv):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(cli, "run", denied)
    with pytest.raises(PermissionError):
        cli.main([])


def test_a_reader_that_has_gone_leaves_no_traceback():
    """As in `vla-wmrl COMMAND --help | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from vla_wmrl.cli import main; import sys; sys.exit(main(['train', '--help']))"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 1
