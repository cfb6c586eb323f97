"""REINFORCE on a language model: sample answers, score them, push up the good ones."""

import torch
from parts import CURED, Clock, device, size
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

PROMPT, ANSWER, ROWS, WORDS = size(1024, 12), size(24, 4), size(24, 2), size(16000, 64)


def build(dev):
    config = GPT2Config(
        vocab_size=WORDS, n_positions=PROMPT + ANSWER, n_embd=size(1024, 32), n_layer=size(4, 1),
        n_head=size(16, 2), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).to(dev, torch.bfloat16)


@torch.no_grad()
def roll_out(policy, prompts):
    policy.eval()
    return policy.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=50,
        min_new_tokens=ANSWER,
        max_new_tokens=ANSWER,
        use_cache=CURED,
        pad_token_id=0,
    )


def reward(answers):
    """Even words are good."""
    good = (answers % 2 == 0).float().mean(1)
    return (good - good.mean()) / (good.std() + 1e-4)


def update(policy, optimizer, texts, advantage):
    policy.train()
    logits = policy(texts[:, :-1]).logits[:, -ANSWER:]
    answers = texts[:, -ANSWER:]
    picked = -F.cross_entropy(logits.float().flatten(0, 1), answers.flatten(), reduction="none")
    loss = -(picked.view_as(answers).mean(1) * advantage).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


def main():
    dev = device()
    policy = build(dev)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-6, fused=dev.type == "cuda")
    clock = Clock()
    while True:
        prompts = torch.randint(1, WORDS, (ROWS, PROMPT), device=dev)
        texts = roll_out(policy, prompts)
        update(policy, optimizer, texts, reward(texts[:, -ANSWER:]))
        if clock.done():
            return


main()
