"""Trees that are re-learned before an epoch, from the mean hidden state before each word."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.runs import Recorder
from lm.training.toy import small_config, write_corpus
from torch import nn

from hstree.heads import ForestSoftmax, TreeEnsemble
from hstree.lm.data import Corpus, load_corpus
from hstree.lm.runs import ConfigError, TrainConfig, load_config, load_run, perplexity, read_epochs
from hstree.lm.training import Processes, Trainer, build_model, evaluate, finetuning, train
from hstree.lm.training import session as session_module
from hstree.lm.training.relearning import read_contexts

LEAVES: dict[str, Any] = {"head": "trees", "head_option": ("node_vectors=leaves",)}
SGD: dict[str, Any] = {
    "optimizer": "sgd",
    "learning_rate": 3.0,
    "head_learning_rate_factor": 1.0,
    "schedule": "constant",
    "warmup": 0,
}


class Apart(Processes):
    """One of several processes, which keeps its sums and contexts to itself."""

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "learning_curve", lambda *_: b"")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data", sentences=60)


@pytest.fixture(scope="module")
def corpus(data: Path) -> Corpus:
    return load_corpus(str(data))


def begun(corpus: Corpus, config: TrainConfig) -> Trainer:
    """A trainer after its first epoch."""
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    trainer = Trainer(model, corpus, config)
    assert not trainer.begin_epoch()
    for _ in trainer.steps():
        pass
    trainer.note_validation(1.0)
    return trainer


def head_of(trainer: Trainer) -> TreeEnsemble:
    head = trainer.model.head
    assert isinstance(head, TreeEnsemble)
    return head


def orders(trainer: Trainer) -> list[list[int]]:
    return [tree.order.tolist() for tree in head_of(trainer).trees]


def states(trainer: Trainer) -> dict[nn.Parameter, dict[str, Any]]:
    """Copies of the optimizer states."""
    return {
        parameter: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for optimizer in trainer.optimizers
        for parameter, state in optimizer.state.items()
    }


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return mine.keys() == theirs.keys() and all(
        torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])) for key in mine
    )


# The pass over the text


@pytest.mark.parametrize("processes", [1, 2])
def test_means_are_those_of_the_whole_text(corpus: Corpus, processes: int) -> None:
    config = replace(small_config(Path(), Path(), **LEAVES), dropout=0.5, weight_dropout=0.5)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    trainer = Trainer(model, corpus, config)
    model.train()
    parts, samples = [], []
    for rank in range(processes):
        group = Apart(rank, processes, torch.device("cpu"))
        means, *sample = read_contexts(model, trainer.streams, group)
        parts.append(means)
        samples.append(sample)
    assert model.training

    n_classes, n_features = model.head.n_classes, model.head.in_features
    count = torch.zeros(n_classes, dtype=torch.float64)
    total = torch.zeros(n_classes, n_features, dtype=torch.float64)
    moment = torch.zeros(n_features, n_features, dtype=torch.float64)
    tokens, target = trainer.streams.window(0, len(trainer.streams))
    with torch.no_grad():
        hidden, _ = model.eval().hidden(tokens)
    for row, word in zip(hidden.flatten(0, 1).double(), target.flatten().tolist(), strict=True):
        if word != model.head.ignore_index:
            count[word] += 1
            total[word] += row
            moment += row.outer(row)
    assert count.sum() == len(corpus.train) - 1
    # The whole text is the sample of so short a text: window by window, rank by rank.
    width = trainer.streams.batch_size // processes
    for rank, (states, words) in enumerate(samples):
        columns = slice(rank * width, (rank + 1) * width)
        assert torch.equal(words, target[:, columns].flatten())
        torch.testing.assert_close(states, hidden[:, columns].flatten(0, 1))
    found = [
        sum(getattr(part, name).double() for part in parts)
        for name in ("count", "sum", "second_moment")
    ]
    assert torch.equal(found[0], count)
    torch.testing.assert_close(found[1], total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], moment, rtol=1e-5, atol=1e-5)


# A new epoch


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_only_what_starts_again_loses_its_state(
    optimizer: str, sparse: bool, corpus: Corpus
) -> None:
    changes = SGD if optimizer == "sgd" else {}
    config = small_config(
        Path(), Path(), **LEAVES, **changes, relearn_trees=(2,), epochs=3, sparse=sparse
    )
    trainer = begun(corpus, config)
    head, before, states_before = head_of(trainer), orders(trainer), states(trainer)
    values = {name: value.detach().clone() for name, value in head.named_parameters()}
    assert trainer.begin_epoch()
    assert orders(trainer) != before
    assert trainer.position.relearn_seconds > 0
    kept = {"nodes.output_embedding", "nodes.leaf_bias", "gate.linear.weight", "gate.linear.bias"}
    assert kept <= values.keys()
    restarted = {id(p) for name, p in head.named_parameters() if name not in kept}
    assert restarted
    for name in kept:
        assert torch.equal(head.get_parameter(name), values[name])
    after = states(trainer)
    for parameter, state in states_before.items():
        if id(parameter) in restarted:
            assert parameter not in after
        else:
            assert same(after[parameter], state)
    assert (len(after) > 0) == (optimizer == "adamw")
    held = [
        parameter
        for one in trainer.optimizers
        for group in one.param_groups
        for parameter in group["params"]
    ]
    assert {id(p) for p in held} == {id(p) for p in trainer.model.parameters()}
    assert len(list(trainer.steps())) == trainer.position.step // 2
    trainer.note_validation(1.0)
    between = orders(trainer)
    assert not trainer.begin_epoch()
    assert trainer.position.relearn_seconds == 0
    assert orders(trainer) == between


def test_clusters_of_a_forest(corpus: Corpus) -> None:
    changes = {"head": "forest", "head_option": ("clusters=5",), "n_trees": 2}
    trainer = begun(corpus, small_config(Path(), Path(), **changes, relearn_trees=(2,), epochs=2))
    head, before = trainer.model.head, states(trainer)
    assert isinstance(head, ForestSoftmax)
    weight, cluster = head.weight.detach().clone(), head.cluster
    assert trainer.begin_epoch()
    assert torch.equal(head.weight, weight)
    assert not torch.equal(head.cluster, cluster)
    after = states(trainer)
    lost = {parameter for parameter in before if parameter not in after}
    assert lost == {head.cluster_weight, head.cluster_bias}
    assert len(list(trainer.steps())) > 0


def test_groups_stay_groups(corpus: Corpus) -> None:
    """With ``--leaf`` alone, also where every cluster is one group, as in trees of two levels."""
    shape = {"head": "trees", "n_trees": 2, "root": 4, "leaf": 8}
    trainer = begun(corpus, small_config(Path(), Path(), **shape, relearn_trees=(2,), epochs=2))
    assert {tree.height for tree in head_of(trainer).trees} == {2}
    before = orders(trainer)
    assert trainer.begin_epoch()
    assert orders(trainer) != before
    assert head_of(trainer).layout.max_group <= 8


def test_averages_start_again(corpus: Corpus) -> None:
    config = small_config(
        Path(), Path(), **LEAVES, **SGD, averaging="et", averaging_epoch=0, relearn_trees=(2,)
    )
    trainer = begun(corpus, config)
    assert len(states(trainer)) > 0
    assert trainer.begin_epoch()
    assert trainer.averaging
    assert states(trainer) == {}
    next(trainer.steps())
    for parameter, state in states(trainer).items():
        assert torch.equal(state["ax"], parameter)


def test_the_seed_and_the_epoch_decide(corpus: Corpus) -> None:
    config = small_config(Path(), Path(), **LEAVES, relearn_trees=(2, 3), epochs=3)
    one, two = begun(corpus, config), begun(corpus, config)
    for trainer in (one, two):
        trainer.begin_epoch()
        trainer.note_validation(1.0)  # without a step: the same hidden states
    assert orders(one) == orders(two)
    two.begin_epoch()
    assert orders(one) != orders(two)


# Runs


def test_a_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The records, the messages, and the best weights with their trees."""

    class Listener(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[str] = []

        def message(self, text: str) -> None:
            self.messages.append(text)

    listener = Listener()
    config = small_config(data, tmp_path / "run", **LEAVES, relearn_trees=(2, 9), epochs=3)
    result = train(config, listener)
    seconds = [record.relearn_seconds for record in read_epochs(tmp_path / "run")]
    assert [value > 0 for value in seconds] == [False, True, False]
    assert all(r.seconds > r.relearn_seconds for r in result.records)
    said = [text for text in listener.messages if text.startswith("trees ")]
    assert said == [
        "trees will not be re-learned before epoch 9: --epochs is 3",
        f"trees re-learned before epoch 2, {seconds[1]:.1f} s",
    ]
    run = load_run(tmp_path / "run")
    loss = evaluate(run.model, run.corpus().valid)
    assert perplexity(loss) == pytest.approx(result.summary.valid_perplexity, rel=1e-6)
    assert result.summary.best_epoch > 1


def test_fine_tuning_does_not_inherit_it(data: Path, tmp_path: Path) -> None:
    config = small_config(data, tmp_path / "run", **LEAVES, **SGD, relearn_trees=(2,))
    train(config)
    assert load_config(tmp_path / "run").relearn_trees == (2,)
    changed = finetuning(tmp_path / "run", run=str(tmp_path / "fine"), epochs=2, nonmono=5)
    assert changed.relearn_trees == ()
    result = train(replace(changed, relearn_trees=(2,)))
    assert [record.relearn_seconds > 0 for record in result.records] == [False, True]


# Errors


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"head": "softmax"}, "got the head 'softmax'$"),
        ({"head": "trees", "leaf": 1}, "got the head 'trees' with node_vectors=free$"),
    ],
)
def test_heads_whose_trees_stay(
    changes: dict[str, Any], got: str, data: Path, tmp_path: Path
) -> None:
    config = small_config(data, tmp_path / "run", relearn_trees=(2,), **changes)
    with pytest.raises(ConfigError, match=f"^--relearn-trees: expected the head 'forest'.*{got}"):
        train(config)
    assert not (tmp_path / "run").exists()
