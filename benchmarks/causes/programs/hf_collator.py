"""Mask words for a BERT with the Trainer of transformers; the collator works word by word."""

import random
import tempfile

import torch
from parts import CURED, SEED, STEPS, Clock, device, size
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

LENGTH, WORDS = size(256, 16), 8000


class Sentences(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        words = random.Random(i)
        return {"ids": [words.randrange(5, WORDS) for _ in range(LENGTH)]}


def word_by_word(rows):
    ids, labels = [], []
    for row in rows:
        masked, wanted = [], []
        for word in row["ids"]:
            chance = random.random()
            hide = chance < 0.15
            masked.append(
                4 if hide and chance < 0.12 else random.randrange(5, WORDS) if hide else word
            )
            wanted.append(word if hide else -100)
        ids.append(masked)
        labels.append(wanted)
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


class Ticker(TrainerCallback):
    def __init__(self):
        self.clock = Clock()

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = self.clock.done()


def main():
    dev = device()
    config = BertConfig(
        vocab_size=WORDS, hidden_size=size(768, 32), num_hidden_layers=size(6, 1),
        num_attention_heads=size(12, 2), intermediate_size=size(3072, 64),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=size(32, 4), max_steps=STEPS, bf16=dev.type == "cuda",
            use_cpu=dev.type == "cpu", dataloader_num_workers=size(12, 2) if CURED else 0, seed=SEED,
            report_to=[], save_strategy="no", logging_steps=50, disable_tqdm=True,
            remove_unused_columns=False,
        )  # fmt: skip
        trainer = Trainer(
            BertForMaskedLM(config), args, train_dataset=Sentences(), data_collator=word_by_word,
            callbacks=[Ticker()],
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
