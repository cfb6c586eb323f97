"""Train a small GPT-2 with Hugging Face's Trainer, on text that is slow to prepare."""

import time

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    """4,096 texts of 32 tokens, each of which takes 15 ms to clean and split."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.015)
        random = torch.Generator().manual_seed(index)
        tokens = torch.randint(1000, (32,), generator=random)
        return {"input_ids": tokens, "labels": tokens}


def main():
    torch.set_num_threads(1)
    config = GPT2Config(vocab_size=1000, n_positions=32, n_embd=64, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts())
    trainer.train()
    trainer.save_model("out/last")


if __name__ == "__main__":
    main()
