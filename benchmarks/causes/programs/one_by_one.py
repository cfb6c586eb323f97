"""Lightning with batches of one and sixteen accumulated, from a time on a smaller card."""

import logging
import warnings

import pytorch_lightning as pl
import torch
from parts import CURED, STEPS, Clock, device, encoder, size
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
ROWS, WORDS, LENGTH = size(16, 4), size(8192, 64), size(129, 9)


class Texts(Dataset):
    def __init__(self):
        self.ids = torch.randint(0, WORDS, (4096, LENGTH))

    def __len__(self):
        return 10**6

    def __getitem__(self, i):
        return self.ids[i % len(self.ids)]


class Writer(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = encoder(size(512, 16), size(8, 1), size(8, 2), WORDS)

    def training_step(self, ids, _):
        logits = self.model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-4)


class Ticker(pl.Callback):
    def __init__(self):
        self.clock, self.steps = Clock(), 0

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            trainer.should_stop = self.clock.done()


def main():
    gpu = device().type == "cuda"
    rows = ROWS if CURED else 1
    trainer = pl.Trainer(
        accelerator="gpu" if gpu else "cpu", devices=1, precision="bf16-mixed", max_steps=STEPS,
        accumulate_grad_batches=ROWS // rows, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Ticker()],
    )  # fmt: skip
    loader = DataLoader(Texts(), batch_size=rows, num_workers=2, pin_memory=gpu)
    trainer.fit(Writer(), loader)


if __name__ == "__main__":
    main()
