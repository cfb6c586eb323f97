# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "torch==2.13.0", "numpy>=2", "transformers==5.24.0", "accelerate>=1.1",
#   "pytorch-lightning==2.6.6",
# ]
# ///
"""Trains a small transformer with a library's own loop: transformers' Trainer, or Lightning's.

    python torch_trainers.py --trainer transformers
    python torch_trainers.py --trainer lightning --gpus 2    # DDP
    python torch_trainers.py --trainer plain --clocks        # a loop of its own

With several devices it starts torchrun itself. With `--device cpu`, ranks of gloo stand in for
GPUs. The last line on stdout is the result, as JSON: the steps that were run, by the library's own
callback at their ends, and the groups of ranks with their roles. With `--clocks` it has the mean
seconds of each phase of the steps after the warm-up too, by clocks around the calls.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOKENS, WIDTH, LENGTH = 96, 64, 32


def main():
    options = parse()
    if options.gpus > 1 and "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.gpus}"]
        os.execv(sys.executable, [sys.executable, *run, *sys.argv])
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if options.device == "cpu":
        torch.set_num_threads(1)  # More of them cost a model of this size more than they save.
    torch.manual_seed(0)
    ends, losses = [], []
    clocks = Clocks(options.clocks)
    trainers = {"transformers": with_transformers, "lightning": with_lightning, "plain": plainly}

    def step_ended():
        ends.append(time.perf_counter())
        clocks.step_ended()

    version = trainers[options.trainer](
        options, Model(options.layers), step_ended, losses, clocks.timed
    )
    steady = ends[options.warmup :]
    seconds = max(steady[-1] - steady[0], 1e-9) if len(steady) > 1 else 1e-9
    result = {
        "framework": options.trainer,
        "model": "transformer",
        "version": version,
        **{name: getattr(options, name) for name in ("update", "device", "batch", "warmup")},
        "gpus": world,
        "steps": len(ends),
        "groups": [{"role": "data", "ranks": list(range(world))}] if world > 1 else [],
        "tokens_per_step": options.batch * world * LENGTH,
        "samples_per_second": options.batch * world * (len(steady) - 1) / seconds,
        "loss_first": float(losses[0]) if losses else None,
        "loss_last": float(losses[-1]) if losses else None,
    }
    if options.clocks:
        result["phases"] = clocks.means(options.warmup)
        result["step"] = seconds / max(len(steady) - 1, 1)
    if rank == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trainer", choices=["transformers", "lightning", "plain"], default="transformers")
    add("--update", choices=["single", "ddp"], help="default: ddp, of several devices")
    add("--batch", type=int, default=8, help="sequences per device and step")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
    add("--layers", type=int, default=4, help="of the transformer")
    add("--clocks", action="store_true", help="time the phases of steps")
    add("--gpus", type=int, help="devices on this machine; default: 1, and 2 of ddp")
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    options = parser.parse_args()
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.gpus is None:
        options.gpus = 2 if options.update == "ddp" else 1
    if options.update is None:
        options.update = "ddp" if options.gpus > 1 else "single"
    if (options.gpus > 1) != (options.update == "ddp"):
        parser.error("--gpus: ddp needs two devices or more, and single is on one")
    if not 0 <= options.warmup < options.steps:
        parser.error("--warmup must be less than --steps")
    if options.batch < 1:
        parser.error("--batch must be 1 or more")
    return options


class Clocks:
    """Seconds of phases, step by step; what lies within another phase counts for itself alone."""

    def __init__(self, are_wanted):
        self.are_wanted = are_wanted
        self.steps, self.now, self.within = [], {}, []
        if are_wanted:
            base = torch.utils.data.dataloader._BaseDataLoaderIter
            base.__next__ = self.timed("data", base.__next__)

    def timed(self, name, function):
        """Return a function that counts for a phase; itself if none are counted."""
        if not self.are_wanted:
            return function

        def call(*args, **keywords):
            began = time.perf_counter()
            self.within.append(0.0)
            try:
                return function(*args, **keywords)
            finally:
                took = time.perf_counter() - began
                self.now[name] = self.now.get(name, 0.0) + took - self.within.pop()
                if self.within:
                    self.within[-1] += took

        return call

    def step_ended(self):
        self.steps.append(self.now)
        self.now = {}

    def means(self, warmup):
        steps = self.steps[warmup:]
        names = dict.fromkeys(name for step in steps for name in step)
        return {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names}


class Data(torch.utils.data.Dataset):
    """Rising sequences of tokens, that a network learns at once."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"tokens": (index % TOKENS + torch.arange(LENGTH)) % TOKENS}


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        scores = self.head(self.layers(self.embed(tokens), mask, is_causal=True))
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss}


def with_transformers(options, model, step_ended, losses, timed):
    """Train, and return the library's version."""
    import transformers

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, *_args, optimizer, **_keywords):
            optimizer.step = timed("optimizer", optimizer.step)

        def on_step_end(self, *_args, **_keywords):
            step_ended()

        def on_log(self, _args, _state, _control, logs=None, **_keywords):
            if logs and "loss" in logs:
                losses.append(logs["loss"])

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            use_cpu=options.device == "cpu",
            ddp_backend="gloo" if options.device == "cpu" and options.gpus > 1 else None,
            dataloader_pin_memory=options.device != "cpu",
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Data(options.steps * options.batch * options.gpus)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Steps()])
        trainer.compute_loss = timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = timed("backward", trainer.accelerator.backward)
        clips = trainer if hasattr(trainer, "_clip_grad_norm") else trainer.accelerator
        name = "_clip_grad_norm" if clips is trainer else "clip_grad_norm_"
        setattr(clips, name, timed("gradient clipping", getattr(clips, name)))
        # What it logs it also prints.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return transformers.__version__


def with_lightning(options, model, step_ended, losses, timed):
    """Train, and return the library's version."""
    import pytorch_lightning as pl

    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _index):
            loss = self.model(**batch)["loss"]
            losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *_args):
            step_ended()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    data = Data(options.steps * options.batch * options.gpus)
    trainer = pl.Trainer(
        accelerator="cpu" if options.device == "cpu" else "gpu",
        devices=options.gpus,
        strategy="ddp" if options.gpus > 1 else "auto",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0 if options.clocks else None,
    )
    strategy, precision = trainer.strategy, trainer.strategy.precision_plugin
    optimizer_step = timed("optimizer", strategy.optimizer_step)
    strategy.training_step = timed("forward", strategy.training_step)
    strategy.backward = timed("backward", strategy.backward)
    precision.clip_gradients = timed("gradient clipping", precision.clip_gradients)
    # The closure has the passes, and what else is in it is of no phase.
    strategy.optimizer_step = lambda optimizer, closure, *args, **keywords: optimizer_step(
        optimizer, timed("other", closure), *args, **keywords
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, options.batch))
    return pl.__version__


def plainly(options, model, step_ended, losses, timed):
    """Train in a loop of its own, and return PyTorch's version."""
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    model = model.to(device)
    if options.gpus > 1:
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    forward = timed("forward", model.__call__)
    backward = timed("backward", torch.Tensor.backward)
    clip = timed("gradient clipping", nn.utils.clip_grad_norm_)
    update = timed("optimizer", optimizer.step)
    for batch in torch.utils.data.DataLoader(Data(options.steps * options.batch), options.batch):
        loss = forward(batch["tokens"].to(device))["loss"]
        backward(loss)
        clip(model.parameters(), 1.0)
        update()
        step_ended()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.__version__


if __name__ == "__main__":
    main()
