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

With several devices it starts torchrun itself. With `--device cpu`, ranks of gloo stand in for
GPUs. The last line on stdout is the result, as JSON: the steps that were run, by the library's own
callback at their ends, and the groups of ranks with their roles.
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

TOKENS, WIDTH, LAYERS, LENGTH = 96, 64, 4, 32


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
    train = with_transformers if options.trainer == "transformers" else with_lightning
    version = train(options, Model(), lambda: ends.append(time.perf_counter()), losses)
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
    if rank == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trainer", choices=["transformers", "lightning"], default="transformers")
    add("--update", choices=["single", "ddp"], help="default: ddp, of several devices")
    add("--batch", type=int, default=8, help="sequences per device and step")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=5, help="steps left out of the figures")
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


class Data(torch.utils.data.Dataset):
    """Rising sequences of tokens, that a network learns at once."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"tokens": (index % TOKENS + torch.arange(LENGTH)) % TOKENS}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        scores = self.head(self.layers(self.embed(tokens), mask, is_causal=True))
        loss = F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss}


def with_transformers(options, model, step_ended, losses):
    """Train, and return the library's version."""
    import transformers

    class Steps(transformers.TrainerCallback):
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
        # What it logs it also prints.
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return transformers.__version__


def with_lightning(options, model, step_ended, losses):
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
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, options.batch))
    return pl.__version__


if __name__ == "__main__":
    main()
