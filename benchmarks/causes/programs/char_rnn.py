"""A character model over an LSTM."""

import torch
from parts import CURED, Clock, device, size
from torch import nn


class CellByCell(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.cell = nn.LSTMCell(inputs, width)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.cell.hidden_size)
        c, outputs = h, []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(h)
        return torch.stack(outputs, 1), None


class CharModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.rnn = nn.LSTM(width, width, batch_first=True) if CURED else CellByCell(width, width)
        self.head = nn.Linear(width, 128)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


def train():
    dev = device()
    model = CharModel(size(512, 16)).to(dev)
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    clock = Clock()
    while True:
        text = torch.randint(0, 128, (64, size(257, 9)), device=dev)
        logits = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if clock.done():
            return


train()
