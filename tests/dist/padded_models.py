"""Texts of several lengths, padded; and a module that is no list of layers, which is told where they end."""

import torch
from torch import nn
from torch.nn import functional

LENGTH, WORDS, CLASSES = 12, 40, 3


class Block(nn.Module):
    """Mixes what is no padding."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, hidden, mask):
        mixed = (hidden * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return hidden + functional.dropout(self.inner(self.norm(hidden + mixed)).relu(), 0.1, self.training)


class Net(nn.Module):
    """Says of which class a padded text is: ``tokens`` and ``mask`` of ``[batch, time]`` to ``[batch, classes]``."""

    def __init__(self, width, blocks):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens, mask):
        hidden, wide = self.words(tokens), mask[..., None].float()
        for block in self.blocks:
            hidden = block(hidden, wide)
        return self.head((hidden * wide).sum(1) / wide.sum(1))


def build(width=16, blocks=4):
    """Returns the module itself."""
    return Net(width, blocks)


class Texts:
    """Of a class are texts with more words of one third of all than of the others."""

    def __init__(self, samples, form):
        self.samples, self.form = samples, form

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, LENGTH + 1, (), generator=drawn))
        label = index % CLASSES
        words = torch.randint(1, WORDS // CLASSES, (length,), generator=drawn) + label * (WORDS // CLASSES)
        tokens = functional.pad(words, (0, LENGTH - length))
        return self.form(tokens, tokens.ne(0).long(), label)


def pairs(samples=120):
    """Inputs by the names of the module's arguments."""
    return Texts(samples, lambda tokens, mask, label: ({"tokens": tokens, "mask": mask}, label))


def labelled(samples=120):
    """As datasets of transformers have it: lists, and labels among them."""
    return Texts(
        samples,
        lambda tokens, mask, label: {
            "labels": label,
            "input_ids": tokens.tolist(),
            "attention_mask": mask.tolist(),
        },
    )


def continued(samples=120):
    """For causal language models: labels are the tokens, but for the padding."""
    return Texts(
        samples,
        lambda tokens, mask, _: {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": tokens.masked_fill(mask == 0, -100),
        },
    )


def right(output, target):
    """Returns how many are right."""
    return {"accuracy": (output.argmax(-1) == target).float().mean()}
