"""Training steps: of ``hstree train`` beside a bare loop over the same model; of whole models."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import hstree
from benchmarks.contest import Build, Contestant, Size
from hstree.lm.config import TrainConfig, preset
from hstree.lm.data import Corpus, Vocabulary
from hstree.lm.model import LanguageModel, detach
from hstree.lm.train import Trainer, build_model
from hstree.optim import AdamW

TRAINER_SIZE = Size(700, 200, 10_000, 200)
COLUMNS = 20


def endless_steps(trainer: Trainer) -> Iterator[Any]:
    """Make steps, epoch after epoch, without validation."""
    while True:
        yield from trainer.steps()
        trainer.note_validation(0.0)


def random_corpus(classes: int, words: int = 50_000) -> Corpus:
    """Random words, by Zipf's law."""
    frequencies = 1.0 / np.arange(1, classes + 1)
    random = np.random.default_rng(0)
    tokens = random.choice(classes, words, p=frequencies / frequencies.sum()).astype(np.int32)
    names = ["<unk>", "<eos>", *map(str, range(2, classes))]
    counts = np.bincount(tokens, minlength=classes)
    return Corpus("random", Vocabulary(names, counts), tokens, tokens[:1000], tokens[:1000])


def _model(size: Size) -> tuple[TrainConfig, Corpus, LanguageModel]:
    corpus = random_corpus(size.classes)
    config = TrainConfig(
        embedding_size=size.features,
        hidden_size=size.features,
        layers=1,
        batch_size=COLUMNS,
        bptt=size.rows // COLUMNS,
        optimizer="adamw",
        learning_rate=1e-3,
        head="trees",
        recipe="huffman",
    )
    return config, corpus, build_model(config, size.classes, corpus.statistics())


def _train(size: Size, device: str) -> Contestant:
    config, corpus, model = _model(size)
    steps = endless_steps(Trainer(model, corpus, config))
    return Contestant(lambda: next(steps))


def _bare_steps(config: TrainConfig, corpus: Corpus, model: LanguageModel) -> Iterator[None]:
    text = torch.from_numpy(corpus.train.astype(np.int64))
    text = text[: len(text) // COLUMNS * COLUMNS].view(COLUMNS, -1).t().contiguous()
    backbone = [{"params": list(model.backbone.parameters())}]
    rate, factor = config.learning_rate, config.head_learning_rate_factor
    optimizer = AdamW([*backbone, *model.head.parameter_groups(rate, factor=factor)], lr=rate)
    while True:
        state = None
        for begin in range(0, len(text) - config.bptt, config.bptt):
            window = text[begin : begin + config.bptt + 1]
            (_, loss), state, _ = model(window[:-1], window[1:], state)
            state = detach(state)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            yield


def _bare(size: Size, device: str) -> Contestant:
    steps = _bare_steps(*_model(size))
    return Contestant(lambda: next(steps))


TRAINER_CONTESTS: dict[str, dict[str, Build]] = {
    "trainer": {"a bare loop": _bare, "hstree train": _train}
}


# ---- whole models


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer and of a step of its training."""

    layers: int
    features: int
    classes: int
    windows: int  # of a step
    window: int = 1024  # tokens


MODELS = {
    "12-layers": Model(12, 768, 49_152, 16),
    "4-layers": Model(4, 2048, 128_256, 8),
    "tiny-layers": Model(1, 64, 300, 2, 20),
}
SHARES = {
    1: 4.6e-2,
    4: 4.5e-2,
    8: 2.2e-2,
    16: 1.1e-2,
    32: 4.6e-3,
    64: 1.3e-3,
    128: 5e-4,
    512: 1.5e-4,
    2048: 4.3e-5,
    8192: 6.8e-6,
    21_817: 6.5e-8,
}
"""Share of SmolLM2's subwords in a text, by their rank. The other 27,335 of 49,152 do not occur in
15 million."""
PENN_WORDS, PENN_CLASSES = 929_589, 10_000
"""Size of the training text of Penn Treebank."""


def made_up_text(classes: int, count: int = 2_000_000) -> Tensor:
    """Classes [count], most frequent first, that occur as often as subwords do."""
    rank = np.arange(1, min(classes, max(SHARES)) + 1)
    share = np.exp(np.interp(np.log(rank), np.log([*SHARES]), np.log([*SHARES.values()])))
    random = np.random.default_rng(0)
    return torch.from_numpy(random.choice(len(rank), count, p=share / share.sum()))


class Transformer(nn.Module):
    """A causal transformer, without an output layer."""

    def __init__(self, sizes: Model) -> None:
        super().__init__()
        width = sizes.features
        self.embedding = nn.Embedding(sizes.classes, width)
        self.position = nn.Embedding(sizes.window, width)
        for module in (self.embedding, self.position):
            nn.init.normal_(module.weight, std=0.02)
        options: Any = {"batch_first": True, "norm_first": True, "bias": False}
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, F.gelu, **options)
        norm = nn.LayerNorm(width)
        self.layers = nn.TransformerEncoder(layer, sizes.layers, norm, enable_nested_tensor=False)
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(sizes.window))

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden vectors [N, D]."""
        x = self.embedding(tokens) + self.position.weight
        hidden: Tensor = self.layers(x, self.mask, is_causal=True)
        return hidden.flatten(0, 1)


def tied_head(
    embedding: nn.Embedding, text: Tensor, rows: int, head: str, share: float = 0, **options: Any
) -> nn.Module:
    """A class of hstree as output layer; ``share``: negatives for each of the rows of a step."""
    kind = getattr(hstree, head)
    classes, width = embedding.weight.shape
    if share:
        options["negatives"] = int(share * rows)
    counts = torch.bincount(text, minlength=classes)
    of_text = hasattr(kind, "from_tokens")
    make, given = (kind.from_tokens, [text]) if of_text else (kind, [])
    made: nn.Module = make(
        width, classes, *given, embedding=embedding, frequencies=counts, **options
    )
    return made


def tied_loss(loss: Callable[..., Tensor], embedding: nn.Embedding, *_: Any) -> Any:
    return lambda hidden, target: loss(hidden, embedding.weight, target)


def model_steps(
    sizes: Model, output_layer: Callable[..., Any], file: Path | None, device: str
) -> Iterator[int]:
    """Train a transformer as users do, in bfloat16 autocast; the tokens of each step.

    Args:
        sizes: its sizes.
        output_layer: the loss of hidden vectors and targets, of the embedding, the text and the
            tokens of a step: a module if it has parameters of its own.
        file: classes of a text, .npy, most frequent first; None: a made-up text.
        device: ``"cuda"`` or ``"cpu"``.
    """
    torch.manual_seed(0)
    text = made_up_text(sizes.classes) if file is None else torch.from_numpy(np.load(file)).long()
    model, size = Transformer(sizes), sizes.windows * sizes.window
    layer = output_layer(model.embedding, text, size)
    own = [layer] if isinstance(layer, nn.Module) else []
    parameters = list(nn.ModuleList([model, *own]).to(device).parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
    text = text.to(device)
    while True:
        begin = torch.randint(len(text) - sizes.window, (sizes.windows, 1))
        part = text[(begin + torch.arange(sizes.window + 1)).to(device)]
        with torch.autocast(device, torch.bfloat16):
            found = layer(model(part[:, :-1]), part[:, 1:].flatten())
        getattr(found, "loss", found).backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield size


def timed_steps(steps: Iterator[int], warm_up: int, device: str) -> dict[str, Any]:
    """Seconds of steps, 20 on a GPU, and of a token, and the peak of the whole memory in bytes."""
    cuda, seconds, count = device != "cpu", [], 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for i in range(warm_up + (20 if cuda else 2)):
        begin, size = time.perf_counter(), next(steps)
        if cuda:
            torch.cuda.synchronize()
        if i >= warm_up:
            seconds.append(time.perf_counter() - begin)
            count += size
    peak = torch.cuda.max_memory_allocated() if cuda else None
    return {"seconds": {"both": seconds}, "token": sum(seconds) / count, "peak_bytes": peak}


def penn_steps(name: str, device: str) -> Iterator[int]:
    """Train a published model of Penn Treebank on a made-up text of its size; the words of each
    step. On a CPU a tiny one."""
    tiny = device == "cpu"
    sizes = {"embedding_size": 24, "hidden_size": 24, "context_size": 24} if tiny else {}
    config = preset(f"ptb-{name}", **sizes)
    corpus = random_corpus(2000) if tiny else random_corpus(PENN_CLASSES, PENN_WORDS)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics()).to(device)
    for step in endless_steps(Trainer(model, corpus, config)):
        yield step.tokens
