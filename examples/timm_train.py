"""A tiny ResNet of timm, trained as timm's own train.py trains, that comes back after a kill.

    python examples/timm_train.py --folder runs/timm --kill-at 17   # killed after step 17
    python examples/timm_train.py --folder runs/timm                # goes on, and ends at step 30

The launcher starts it again by itself: `cpsr run examples/timm_train.py --folder runs/timm --kill-at 17`.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import numpy
import torch
from PIL import Image
from timm.data import FastCollateMixup, create_dataset, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, random_seed

from cpsr import CPSRRecovery, TorchAdapter

EPOCHS, BATCHES, BATCH_SIZE, ACCUMULATED, CLASSES, SIZE = 3, 20, 4, 2, 4, 32


def make_images(folder: Path) -> None:
    """Noise, of another colour for each class."""
    numbers = numpy.random.default_rng(0)
    for image in range(BATCHES * BATCH_SIZE):
        kind = image % CLASSES
        pixels = numbers.integers(0, 256, (SIZE, SIZE, 3), numpy.uint8)
        pixels[..., kind % 3] //= 1 + kind
        path = folder / f"class {kind}" / f"{image}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def training_data(folder: Path, device: torch.device) -> object:
    """A batch is augmented in the workers, mixed where they collate it, and partly erased in this process."""
    return create_loader(
        create_dataset("", root=str(folder), is_training=True),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH_SIZE,
        is_training=True,
        auto_augment="rand-m3-mstd0.5-inc1",
        re_prob=0.3,
        re_mode="pixel",
        collate_fn=FastCollateMixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=CLASSES),
        num_workers=2,
        device=device,
    )


def crash(run_dir: Path) -> None:
    """End the first life as a crash would, once there is a checkpoint to come back to."""
    while not any(run_dir.glob("checkpoints/step-*/COMMIT")):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kill-at", type=int)
    options = parser.parse_args()
    run_dir, saved = options.folder / "cpsr", options.folder / "timm"
    saved.mkdir(parents=True, exist_ok=True)
    make_images(options.folder / "images")

    random_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = create_model("test_resnet", num_classes=CLASSES, drop_rate=0.2, drop_path_rate=0.1).to(device)
    loader = training_data(options.folder / "images", device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    average = ModelEmaV3(model, decay=0.9, use_warmup=True)
    schedule, epochs = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=EPOCHS,
        warmup_epochs=1,
        step_on_epochs=False,
        updates_per_epoch=BATCHES // ACCUMULATED,
    )
    saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=str(saved), max_history=EPOCHS)
    criterion = SoftTargetCrossEntropy()

    config = {"run_dir": str(run_dir), "mode": "exact", "checkpoint": {"interval_iterations": 5}}
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        recovery.register("average", average)
        recovery.register("schedule", schedule)
        recovery.register("saver", saver)
        for epoch in range(recovery.epoch, epochs):
            model.train()
            batches = recovery.resume(loader)
            for number, (images, targets) in enumerate(batches, start=recovery.batch):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = criterion(model(images), targets)
                recovery.log_loss(loss)
                (loss / ACCUMULATED).backward()
                if (number + 1) % ACCUMULATED:
                    continue
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                average.update(model, step=recovery.iteration)
                schedule.step_update(recovery.iteration)
                if recovery.iteration == options.kill_at and recovery.restored.restored_iteration == 0:
                    crash(run_dir)
            schedule.step(epoch + 1)
            saver.save_checkpoint(epoch)
            print(f"epoch {epoch}: loss {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
