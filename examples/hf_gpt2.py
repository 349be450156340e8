"""A small GPT-2 of Hugging Face's transformers, from random weights, on the sources of Python's standard library.

pip install -e '.[hf]'
python examples/hf_gpt2.py                                                   one process
holdfast run --workers 4 --fault kill:2.0@20:backward examples/hf_gpt2.py    four, of which one dies
holdfast run --workers 4 --set train.device=cuda examples/hf_gpt2.py         four, with a GPU each

With a folder behind it, it saves what it has trained there, as `from_pretrained` takes it. Nothing is downloaded.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup  # pip install -e '.[hf]'

import holdfast

CONTEXT, MOST_BYTES = 64, 1 << 20


class Bytes(Dataset[Tensor]):
    """Pieces of source files; each byte is a token."""

    def __init__(self) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in files)[:MOST_BYTES]
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self.tokens) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        """Returns a piece."""
        return self.tokens[index * CONTEXT : (index + 1) * CONTEXT].long()


def main() -> None:
    """Trains, tells the loss, and saves the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", help="where the model is saved")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    hf = holdfast.session(seed=0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config).to(hf.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=args.steps)
    model, optimizer = hf.prepare(model, optimizer, scheduler=scheduler, clip_norm=1.0)

    for step in hf.steps(Bytes(), microbatches=12, size=4, steps=args.steps, logs=("loss",)):
        for pieces in step:
            tokens = pieces.to(hf.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            step.backward(loss)
            step.log("loss", loss.detach())

        if step.number % 20 == 19 and hf.is_first:
            print(f"step {step.number + 1}: loss {step.logged['loss']:.4f}")

    if args.folder and hf.is_first:
        model.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
