"""GRPO by TRL with a tiny model that is made here, and a verifier that takes its time.

python grpo.py [THREADS]: with threads, answers are verified at a time.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl import GRPOConfig, GRPOTrainer

THREADS = int(sys.argv[1]) if len(sys.argv) > 1 else 1


def tiny_model():
    """Return a network of two layers and a tokenizer of 64 words."""
    words = {word: id for id, word in enumerate(["<pad>", "<eos>", *map(str, range(62))])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, padding_side="left", **special)
    return AutoModelForCausalLM.from_config(config), tokenizer


def verify(answer):
    """Return the score of one answer, as a service would that runs it."""
    time.sleep(0.5)
    return float(len(set(answer.split())))


def reward(completions, **_):
    if THREADS == 1:
        return [verify(answer) for answer in completions]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(verify, completions))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = tiny_model()
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [f"{n % 60} {n % 7}" for n in range(200)]}),
        args=GRPOConfig(
            output_dir="out",
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=16,
            max_steps=12,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
