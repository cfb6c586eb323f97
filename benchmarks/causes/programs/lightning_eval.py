"""Lightning, with the whole validation set after every tenth batch."""

import logging
import warnings

import pytorch_lightning as pl
import torch
from parts import CURED, STEPS, Clock, device, size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Classifier(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)), nn.Linear(width, 10)
        )  # fmt: skip

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        logits = self.net(batch[0])
        self.log("accuracy", (logits.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Ticker(pl.Callback):
    def __init__(self):
        self.clock = Clock()

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = self.clock.done()


def data(n):
    return TensorDataset(torch.randn(n, 256), torch.randint(0, 10, (n,)))


def main():
    gpu = device().type == "cuda"
    train = DataLoader(data(size(128, 8) * (STEPS + 1)), batch_size=size(128, 8))
    valid = DataLoader(data(size(8192, 64)), batch_size=size(128, 8))
    trainer = pl.Trainer(
        accelerator="gpu" if gpu else "cpu", devices=1, max_steps=STEPS, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=STEPS if CURED else 10, callbacks=[Ticker()],
    )  # fmt: skip
    trainer.fit(Classifier(size(1024, 16)), train, valid)


if __name__ == "__main__":
    main()
