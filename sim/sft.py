"""`vla-wmrl sft`: trains a policy on demonstrations, by lerobot's training step, optimiser, scheduler, checkpoints.

`lerobot-train` reads the same data sets and policies; the loop here differs from its own in the data (kept in memory:
see `sim.demo_data`) and in the vision warm-up of new policies (see `sim.vision`). The folder:
`init/` (a new policy, after the warm-up), `checkpoints/<step>/` (lerobot's, `--resume` continues from the last) and
`policy/`, the result: an ordinary lerobot checkpoint that carries all that it needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from lerobot.common.train_utils import load_training_state, save_checkpoint, update_last_checkpoint
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.optim.factory import make_optimizer_and_scheduler
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.processor import PolicyProcessorPipeline
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.constants import (
    CHECKPOINTS_DIR,
    LAST_CHECKPOINT_LINK,
    OBS_LANGUAGE_ATTENTION_MASK,
    OBS_LANGUAGE_TOKENS,
    PRETRAINED_MODEL_DIR,
)
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
from torch import Tensor, nn

from sim import demo_data, vision
from sim.demo_data import DemoData
from sim.protocol import CAMERAS, STATE_KEY
from sim.suites import suite_tasks
from vla_wmrl.config_commands import SftConfig
from vla_wmrl.errors import UserError
from vla_wmrl.policies import checkpoint_io, nano
from vla_wmrl.policies.flow import FROZEN, FlowPolicy
from vla_wmrl.policies.noise import generator
from vla_wmrl.progress import Progress
from vla_wmrl.tracking import JsonLines

SUITES_OF_SENTENCES = ("libero_10",)  # a new policy's tokenizer knows these tasks' words besides the data's own
GRAD_CLIP, WEIGHT_DECAY, FINAL_LR = 1.0, 1e-4, 0.02  # FINAL_LR: share of the peak
STATE_NOISE = 0.02  # of the normalised robot state, so that the policy looks at the images
# A hand that always points down tilts by a degree as it moves; normalised, that is several standard deviations, and a
# policy then tells the phase of the task from it: brittle for real, and no world model foretells tenths of a degree.
TURN_NOISE, TURN, LIBERO_STATE = 0.03, slice(3, 6), 8  # rad, of the axis-angle in LIBERO's state of 8 numbers
LOG_EVERY = 20
Processors = tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]


def main(cfg: SftConfig) -> int:
    """Trains as `cfg` says; the result is `cfg.output_dir`/policy.

    A checkpoint to start from keeps its own normalisation: more data (a DAgger round) does not shift its actions.
    """
    out = Path(cfg.output_dir)
    device = _device(cfg.device)
    data = demo_data.load(cfg.dataset.root)
    print(f"{data.episode.max() + 1} episodes, {len(data.state)} frames, {len(data.tasks)} tasks")
    last = out / CHECKPOINTS_DIR / LAST_CHECKPOINT_LINK
    resume = last if cfg.resume and last.exists() else None
    source = resume / PRETRAINED_MODEL_DIR if resume else Path(cfg.policy.path) if cfg.policy.path else out / "init"
    if source == out / "init" and not (source / "config.json").is_file():
        make_policy(cfg, data, source, device)
    policy, *processors = checkpoint_io.load(source, device)
    check(policy, data, source)
    train(cfg, policy, tuple(processors), data, resume)
    result = out / "policy"
    if result.exists():
        shutil.rmtree(result)
    checkpoint_io.save(result, policy.eval(), *processors)
    print(f"policy in {result}")
    return 0


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_policy(cfg: SftConfig, data: DemoData, folder: Path, device: str) -> None:
    """Writes a new, very small SmolVLA to `folder`, its vision warmed up where the data says where things are."""
    sizes = cfg.policy
    spec = nano.NanoSpec(
        image_size=sizes.image_size,
        patch_size=sizes.patch_size,
        pixel_shuffle=sizes.pixel_shuffle,
        vision_width=sizes.vision_width,
        vision_layers=sizes.vision_layers,
        width=sizes.width,
        layers=sizes.layers,
        chunk_size=sizes.chunk_size,
        n_action_steps=sizes.n_action_steps,
        denoising_steps=sizes.num_steps,
    )
    sentences = [*data.tasks, *(t.language for suite in SUITES_OF_SENTENCES for t in suite_tasks(suite))]
    draft = folder.with_name(folder.name + ".draft")
    nano.build_policy(draft, spec, sentences, data.statistics(), cfg.seed)
    policy, *processors = checkpoint_io.load(draft, device)
    check(policy, data, draft)
    if sizes.vision_path is not None:
        take_vision(policy, sizes.vision_path)
    elif cfg.vision_warmup_steps and data.scene is None:
        print("the data sets hold no traces/ of where things are: no vision warm-up")
    elif cfg.vision_warmup_steps:
        shown = demo_data.load(cfg.dataset.root, cfg.dataset.scenes) if cfg.dataset.scenes else data
        error = vision.warm_up(policy, shown, cfg.vision_warmup_steps, cfg.batch_size, cfg.lr, cfg.seed)
        print(f"vision warm-up: positions on held-out episodes to {100 * error:.2f} cm")
    checkpoint_io.save(draft, policy, *processors)
    draft.rename(folder)


def take_vision(policy: SmolVLAPolicy, source: str) -> None:
    """Copies vision encoder and connector of the checkpoint `source` into `policy`: a world model's decoder of its features
    then serves both. Raises UserError where their sizes differ."""
    other, *_ = checkpoint_io.load(source, "cpu")
    seen, own = ({k: v for k, v in p.state_dict().items() if any(part in k for part in FROZEN)} for p in (other, policy))
    if {name: value.shape for name, value in seen.items()} != {name: value.shape for name, value in own.items()}:
        raise UserError(
            f"policy.vision_path: the vision of {source} has other sizes than the new policy: set policy.image_size, "
            "patch_size, pixel_shuffle, vision_width, vision_layers and width as its training did"
        )
    policy.load_state_dict(seen, strict=False)


def check(policy: SmolVLAPolicy, data: DemoData, source: Path) -> None:
    """Raises UserError where the policy's features are not the data's."""
    wanted = set(policy.config.image_features)
    if wanted != set(CAMERAS):
        raise UserError(f"{source} looks through {sorted(wanted)}, the data sets hold {sorted(CAMERAS)}")
    size = data.images.shape[2:4]
    for name in wanted:
        if policy.config.image_features[name].shape[1:] != size:
            have, want = "x".join(map(str, size)), policy.config.image_features[name].shape[1]
            raise UserError(f"the data sets' images have {have} pixels, {source} wants {want}: set image_size alike")
    for name, have in ((STATE_KEY, data.state.shape[1]), ("action", data.action.shape[1])):
        feature = policy.config.action_feature if name == "action" else policy.config.robot_state_feature
        if feature.shape[0] != have:
            raise UserError(f"{source} expects {name} of {feature.shape[0]} numbers, the data sets hold {have}")


class OnFeatures(nn.Module):
    """SmolVLA's training loss on vision features that were computed once: what lerobot's step trains, vision frozen."""

    def __init__(self, policy: SmolVLAPolicy, processors: Processors):
        super().__init__()
        self.policy, self.flow = policy, FlowPolicy(policy, *processors, eta=0.0)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        actions = self.policy.prepare_action(batch)
        inputs = {"features": batch["features"], "state": batch[STATE_KEY], "lang_tokens": batch[OBS_LANGUAGE_TOKENS],
                  "lang_masks": batch[OBS_LANGUAGE_ATTENTION_MASK]}  # fmt: skip
        noise = self.policy.model.sample_noise(actions.shape, actions.device)
        time = self.policy.model.sample_time(len(actions), actions.device)
        loss = self.flow.flow_matching_loss(inputs, actions, batch["action_is_pad"], noise, time)
        return loss, {"loss": loss.item()}

    def features(self, data: DemoData) -> Tensor:
        """[L, n_tokens, D] float16 of all looks in `data`."""
        parts = []
        with Progress(len(data.looks), "vision features") as bar:
            for rows in np.array_split(np.arange(len(data.looks)), max(1, len(data.looks) // 256)):
                images = {name: torch.from_numpy(data.images[rows, camera]) for camera, name in enumerate(CAMERAS)}
                frames = data.looks[rows]
                inputs = self.flow.encode(images, torch.from_numpy(data.state[frames]), [data.tasks[0]] * len(rows))
                parts.append(inputs["features"].half())
                bar.update(len(rows))
        return torch.cat(parts)


def train(cfg: SftConfig, policy: SmolVLAPolicy, processors: Processors, data: DemoData, resume: Path | None) -> None:
    """The loop: lerobot's `update_policy` on batches that are a function of (seed, step)."""
    out, before = Path(cfg.output_dir), processors[0]
    torch.manual_seed(cfg.seed)
    settings = _settings(cfg, policy)
    optimiser, scheduler = make_optimizer_and_scheduler(settings, policy)
    done = 0
    if resume is not None:
        done, optimiser, scheduler = load_training_state(resume, optimiser, scheduler)
    accelerator = Accelerator(step_scheduler_with_optimizer=False, cpu=policy.config.device == "cpu")
    frozen = cfg.vision == "frozen"
    module = OnFeatures(policy, processors) if frozen else policy
    features = module.features(data) if frozen else None
    prepared, optimiser, scheduler = accelerator.prepare(module, optimiser, scheduler)
    names = ("loss", "grad_norm", "lr", "update_s", *(("gpu_mem_gb",) if torch.cuda.is_available() else ()))
    tracker = MetricsTracker(
        cfg.batch_size, len(data.state), int(data.episode.max()) + 1, {n: AverageMeter(n) for n in names}, done
    )
    log = JsonLines(out / "metrics.jsonl", keep=lambda row: row["step"] <= done)
    with Progress(cfg.steps, "training", done=done) as bar:
        for step, (rows, batch) in enumerate(batches(cfg, policy, data, done), done + 1):
            batch = blurred(batch, before)
            if features is not None:
                batch["features"] = features[rows].to(torch.float32)
            update_policy(tracker, prepared, batch, optimiser, GRAD_CLIP, accelerator, scheduler)
            bar.update(1, f"loss {tracker.metrics['loss'].avg:.4f}")
            if step % LOG_EVERY == 0 or step == cfg.steps:
                log.write({"step": step, **{n: tracker.metrics[n].avg for n in ("loss", "grad_norm", "lr")}})
                tracker.reset_averages()
            if step % cfg.save_every == 0 or step == cfg.steps:
                folder = out / CHECKPOINTS_DIR / f"{step:06d}"
                save_checkpoint(folder, step, settings, policy, optimiser, scheduler, *processors)
                checkpoint_io.make_portable(folder / PRETRAINED_MODEL_DIR, policy.config.vlm_model_name)
                update_last_checkpoint(folder)
    log.close()


def blurred(batch: dict, before: PolicyProcessorPipeline) -> dict:
    """`batch` normalised by `before`, its robot state [B, 8] with noise: on the hand's rotation, then on everything."""
    state = batch[STATE_KEY].clone()
    if state.shape[1] == LIBERO_STATE:
        state[:, TURN] += TURN_NOISE * torch.randn_like(state[:, TURN])
    batch = before({**batch, STATE_KEY: state})
    batch[STATE_KEY] = batch[STATE_KEY] + STATE_NOISE * torch.randn_like(batch[STATE_KEY])
    return batch


def _settings(cfg: SftConfig, policy: SmolVLAPolicy) -> TrainPipelineConfig:
    """lerobot's own description of the training, which goes into its checkpoints."""
    config = policy.config
    config.optimizer_lr, config.optimizer_weight_decay = cfg.lr, WEIGHT_DECAY
    config.optimizer_grad_clip_norm = GRAD_CLIP
    config.scheduler_warmup_steps, config.scheduler_decay_steps = min(200, cfg.steps // 10 + 1), cfg.steps
    config.scheduler_decay_lr = FINAL_LR * cfg.lr
    return TrainPipelineConfig(
        dataset=DatasetConfig(repo_id="local/" + Path(cfg.dataset.root[0]).name),
        policy=config,
        seed=cfg.seed,
        batch_size=cfg.batch_size,
        steps=cfg.steps,
        save_freq=cfg.save_every,
        optimizer=config.get_optimizer_preset(),
        scheduler=config.get_scheduler_preset(),
    )


def batches(cfg: SftConfig, policy: SmolVLAPolicy, data: DemoData, done: int) -> Iterator[tuple[np.ndarray, dict]]:
    """Rows of `data` and lerobot batches for steps `done` + 1 to `cfg.steps`; without images where vision is frozen."""
    usable = imitated(data, cfg.dataset.action_episodes)
    for step in range(done, cfg.steps):
        rng = generator((cfg.seed, step), stream=20)
        rows = rng.choice(usable, min(cfg.batch_size, len(usable)), replace=False)
        yield rows, _batch(policy, data, rows, images=cfg.vision == "trained")


def imitated(data: DemoData, episodes: int | None) -> np.ndarray:
    """Rows of `data.looks` whose actions are imitated: those of the first `episodes` of every task (None: all)."""
    if episodes is None:
        return np.arange(len(data.looks))
    chosen = [np.unique(data.episode[data.task == task])[:episodes] for task in np.unique(data.task)]
    return np.flatnonzero(np.isin(data.episode[data.looks], np.concatenate(chosen)))


def _batch(policy: SmolVLAPolicy, data: DemoData, rows: np.ndarray, images: bool) -> dict[str, Tensor | list[str]]:
    frames = data.looks[rows]
    actions, padded = data.chunks(rows, policy.config.chunk_size)
    seen = {}
    if images:
        pixels = torch.from_numpy(data.images[rows]).permute(0, 1, 4, 2, 3).to(torch.float32) / 255.0
        seen = {name: pixels[:, camera] for camera, name in enumerate(CAMERAS)}
    return {
        **seen,
        STATE_KEY: torch.from_numpy(data.state[frames]),
        "action": torch.from_numpy(actions),
        "action_is_pad": torch.from_numpy(padded),
        "task": [data.tasks[i] for i in data.task[frames]],
    }
