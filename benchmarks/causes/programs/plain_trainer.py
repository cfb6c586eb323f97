"""Healthy: the Trainer of transformers as it comes, with a model that keeps the card busy."""

import tempfile

import torch
from parts import SEED, STEPS, Clock, device, size
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

LENGTH, WORDS = size(512, 16), size(30522, 64)


class Packed(Dataset):
    def __init__(self):
        self.ids = torch.randint(5, WORDS, (4096, LENGTH))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


class Ticker(TrainerCallback):
    def __init__(self):
        self.clock = Clock()

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = self.clock.done()


def main():
    dev = device()
    config = BertConfig(
        vocab_size=WORDS, hidden_size=size(1024, 32), num_hidden_layers=size(12, 1), num_attention_heads=size(16, 2),
        intermediate_size=size(4096, 64), max_position_embeddings=LENGTH,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=size(32, 4), max_steps=STEPS, bf16=dev.type == "cuda",
            use_cpu=dev.type == "cpu", dataloader_num_workers=size(4, 1), seed=SEED, report_to=[],
            save_strategy="no", logging_steps=10, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            BertForMaskedLM(config), args, train_dataset=Packed(), callbacks=[Ticker()]
        )
        trainer.train()


if __name__ == "__main__":
    main()
