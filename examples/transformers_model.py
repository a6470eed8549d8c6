"""Gives a model of transformers an ensemble of trees as its lm_head, trains it and generates text.

python examples/transformers_model.py               # half a minute, without a download
python examples/transformers_model.py --steps 10    # a quick look
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hstree
from hstree.lm.data import detokenize, load_corpus
from hstree.transformers import from_pretrained, replace_lm_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(0)

    corpus = load_corpus()  # the docstrings of this Python installation, as words
    n_classes = len(corpus.vocabulary)
    tokens = torch.tensor(corpus.train).long()
    end = corpus.vocabulary.end
    config = GPT2Config(
        vocab_size=n_classes,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=end,
        eos_token_id=end,
    )
    model = GPT2LMHeadModel(config)
    head = hstree.TreeEnsemble.from_tokens(config.n_embd, n_classes, tokens, ignore_index=-100)
    replace_lm_head(model, head)
    print(model.lm_head)

    optimizer = hstree.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(steps):
        begin = torch.randint(len(tokens) - 64, (16, 1))
        batch = tokens[begin + torch.arange(64)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:3d}: loss {loss.item():.2f}")

    with tempfile.TemporaryDirectory() as folder:  # save and load, as with any model
        model.save_pretrained(folder)
        model = from_pretrained(folder)
    model.eval()
    prompt = torch.tensor([corpus.vocabulary.encode(["return", "the"])])
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        top_p=0.9,
        min_new_tokens=15,
        max_new_tokens=30,
    )
    print(detokenize(corpus.vocabulary.decode(generated[0].tolist())))


if __name__ == "__main__":
    main()
