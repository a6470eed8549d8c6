"""The rules of AWD-LSTM's training, restated in plain PyTorch and followed for twenty steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from lm.training.runs import Recorder
from lm.training.toy import SGD, small_config, write_corpus
from torch import Tensor

from hstree.lm.config import TRAINING_NOISE, TrainConfig, preset
from hstree.lm.data import Corpus, load_corpus
from hstree.lm.run import load_run
from hstree.lm.train import Trainer, averaged_weights, build_model, evaluate, train

EPOCHS, STREAMS, BPTT, LAYERS, COMPONENTS = 2, 8, 12, 2, 3
RATE, HEAD_FACTOR, DECAY, ALPHA, BETA, SEED = 3.0, 0.5, 1e-3, 2.0, 1.0, 7


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data", sentences=190)


def settings(data: Path, head: str, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {
        "epochs": EPOCHS,
        "batch_size": STREAMS,
        "bptt": BPTT,
        "variable_bptt": True,
        "layers": LAYERS,
        "context_size": 12,
        "tied": True,
        "head": head,
        "head_option": (f"components={COMPONENTS}",) if head == "mos" else (),
        "dropout": 0.0,
        "dropout_input": 0.0,
        "dropout_hidden": 0.0,
        **SGD,
        "learning_rate": RATE,
        "head_learning_rate_factor": HEAD_FACTOR,
        "weight_decay": DECAY,
        "alpha": ALPHA,
        "beta": BETA,
        "seed": SEED,
    }
    run = Path(changes.pop("run", "unused"))
    return small_config(data, run, **(options | changes))


# The restatement


def lstm_layer(weights: dict[str, Tensor], layer: int, inputs: Tensor, state: Any) -> Any:
    name = f"backbone.lstms.{layer}."
    h, c = state
    outputs = []
    for x in inputs @ weights[name + "weight_ih_l0"].T + weights[name + "bias_ih_l0"]:
        gates = x + h @ weights[name + "weight_hh_l0"].T + weights[name + "bias_hh_l0"]
        i, f, g, o = gates.chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs), (h.detach(), c.detach())


def softmax_log_prob(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    return F.log_softmax(hidden @ weights["decoder"].T + weights["head.bias"], dim=-1)


def mos_log_prob(weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    latent = hidden @ weights["head.latent.weight"].T + weights["head.latent.bias"]
    latent = latent.tanh().unflatten(-1, (len(weights["head.prior.weight"]), -1))
    prior = F.softmax(hidden @ weights["head.prior.weight"].T, dim=-1)
    of_components = F.softmax(latent @ weights["decoder"].T + weights["head.bias"], dim=-1)
    return (prior.unsqueeze(-1) * of_components).sum(-2).log()


def window_length(generator: np.random.Generator, bptt: int) -> int:
    base = bptt if generator.random() < 0.95 else bptt / 2
    return max(5, int(generator.normal(base, 5)))


def follow(
    weights: dict[str, Tensor],
    tokens: npt.NDArray[np.int32],
    log_prob: Callable[[dict[str, Tensor], Tensor], Tensor],
    config: TrainConfig,
    epochs: int,
) -> tuple[list[float], list[int], dict[str, Tensor]]:
    """Losses and window lengths of all steps, and the averages, or the weights if there are none.

    ``config``: numbers alone; averaging begins after ``averaging_epoch``.
    """
    trained = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    streams = config.batch_size
    n, steps = len(tokens) - 1, -(-(len(tokens) - 1) // streams)
    padded = np.full(streams * steps + 1, -1)
    padded[: n + 1] = tokens
    place = np.arange(streams)[None] * steps + np.arange(steps)[:, None]
    inputs = torch.from_numpy(np.where(place < n, padded[place], 0))
    targets = torch.from_numpy(padded[place + 1])

    generator = np.random.default_rng(config.seed)
    losses: list[float] = []
    lengths: list[int] = []
    sums: dict[str, Tensor] = {}
    averaged_steps, previous_rate = 0, 0.0
    for epoch in range(epochs):
        recurrent = [trained[f"backbone.lstms.{i}.weight_hh_l0"] for i in range(config.layers)]
        state = [(weight.new_zeros(streams, weight.shape[1]),) * 2 for weight in recurrent]
        begin = 0
        while begin < steps:
            length = window_length(generator, config.bptt)
            window = slice(begin, begin + length)

            view = trained | {"decoder": trained["backbone.embedding.weight"]}
            x = trained["backbone.embedding.weight"][inputs[window]]
            for layer in range(config.layers):
                x, state[layer] = lstm_layer(view, layer, x, state[layer])
            loss = F.nll_loss(
                log_prob(view, x).flatten(0, 1), targets[window].flatten(), ignore_index=-1
            )
            objective = loss + config.alpha * (x**2).mean()
            if len(x) > 1:
                objective = objective + config.beta * ((x[1:] - x[:-1]) ** 2).mean()
            gradients = torch.autograd.grad(objective, list(trained.values()))
            norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients))
            scale = min(1.0, config.clip / (float(norm) + 1e-6))

            rate = config.learning_rate * length / config.bptt
            averaging = epoch >= config.averaging_epoch
            # torch.optim.ASGD takes the learning rate of the step before, the first its own.
            used = previous_rate if averaging and averaged_steps else rate
            previous_rate = rate
            with torch.no_grad():
                for (name, weight), gradient in zip(trained.items(), gradients, strict=True):
                    own = config.head_learning_rate_factor if name.startswith("head.") else 1.0
                    weight -= used * own * (gradient * scale + config.weight_decay * weight)
                    if averaging and averaged_steps:  # the mean leaves out the first step
                        sums[name] = sums.get(name, 0.0) + weight
            averaged_steps += averaging
            losses.append(loss.item())
            lengths.append(length)
            begin += length
    if not averaged_steps:
        return losses, lengths, {name: weight.detach() for name, weight in trained.items()}
    return losses, lengths, {name: value / (averaged_steps - 1) for name, value in sums.items()}


@pytest.mark.parametrize("averaging_epoch", [EPOCHS, 1, 0], ids=["sgd", "switch", "asgd"])
@pytest.mark.parametrize(
    ("head", "log_prob"), [("softmax", softmax_log_prob), ("mos", mos_log_prob)]
)
def test_twenty_steps(
    head: str,
    log_prob: Callable[[dict[str, Tensor], Tensor], Tensor],
    averaging_epoch: int,
    data: Path,
) -> None:
    """In float64, so that the losses agree however the rounding errors grow."""
    corpus = load_corpus(data)
    config = settings(data, head, averaging="et", averaging_epoch=averaging_epoch)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics()).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected, lengths, averages = follow(weights, corpus.train, log_prob, config, EPOCHS)
    assert len(expected) >= 20
    assert min(lengths) == 5
    assert max(lengths) > 1.5 * BPTT

    losses: list[float] = []
    trainer = Trainer(model, corpus, config)
    assert trainer.averaging == (averaging_epoch == 0)
    for epoch in range(1, EPOCHS + 1):
        losses += [step.loss for step in trainer.steps()]
        trainer.note_validation(1.0)
        assert trainer.averaging == (epoch >= averaging_epoch)
    assert losses == pytest.approx(expected, rel=1e-9)
    if averaging_epoch == EPOCHS:  # averaging would begin with the next epoch
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, averages[name], rtol=1e-9, atol=1e-9)
        return
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with averaged_weights(trainer.optimizers):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, averages[name], rtol=1e-6, atol=1e-8)
            assert not torch.equal(parameter, before[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


# The same at full size

PTB_STEPS = 20
HOW_TO_RUN = (
    "needs Penn Treebank: pytest tests/lm/training/test_rules.py --ptb FOLDER -k full_size -rP"
)


@pytest.fixture(scope="module")
def ptb(request: pytest.FixtureRequest) -> Corpus:
    folder = request.config.getoption("--ptb")
    if folder is None:
        pytest.skip(HOW_TO_RUN)
    return load_corpus(folder)


@pytest.mark.parametrize(
    ("dtype", "averaging_epoch"),
    [(torch.float32, 1), (torch.float32, 0), (torch.float64, 1)],
    ids=["float32-sgd", "float32-asgd", "float64-sgd"],
)
@pytest.mark.parametrize(
    ("head", "log_prob"), [("softmax", softmax_log_prob), ("mos", mos_log_prob)]
)
def test_full_size(
    head: str,
    log_prob: Callable[[dict[str, Tensor], Tensor], Tensor],
    dtype: torch.dtype,
    averaging_epoch: int,
    ptb: Corpus,
) -> None:
    """The presets ptb-softmax and ptb-mos without dropout, for one epoch of twenty windows."""
    no_dropout: dict[str, Any] = dict.fromkeys(TRAINING_NOISE, 0.0)
    if head == "mos":
        no_dropout["head_option"] = ("latent_dropout=0",)
    config = preset(
        f"ptb-{head}", epochs=1, device="cpu", averaging_epoch=averaging_epoch, **no_dropout
    )
    generator = np.random.default_rng(config.seed)
    drawn = [window_length(generator, config.bptt) for _ in range(PTB_STEPS)]
    corpus = replace(ptb, train=ptb.train[: config.batch_size * sum(drawn) + 1])
    model = build_model(config, len(ptb.vocabulary), ptb.statistics()).to(dtype)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    losses = [step.loss for step in Trainer(model, corpus, config).steps()]
    expected, lengths, _ = follow(weights, corpus.train, log_prob, config, 1)
    print("| step | length | hstree | restated | difference |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for step, row in enumerate(zip(lengths, losses, expected, strict=True), start=1):
        length, ours, restated = row
        print(f"| {step} | {length} | {ours:.7f} | {restated:.7f} | {ours - restated:.1e} |")
    assert lengths == drawn
    assert losses == pytest.approx(expected, abs=1e-5, rel=0)


# When averaging begins


def begins(data: Path, losses: list[float], **changes: Any) -> int | None:
    """Number of the last epoch before averaging, of scripted validation losses."""
    corpus = load_corpus(data)
    config = settings(data, "softmax", epochs=len(losses), **changes)
    model = build_model(config, len(corpus.vocabulary), corpus.statistics())
    trainer = Trainer(model, corpus, config)
    if trainer.averaging:
        return 0
    for epoch, loss in enumerate(losses, start=1):
        trainer.position.epoch = epoch
        assert trainer.note_validation(loss) is False
        if trainer.averaging:
            (optimizer,) = trainer.optimizers
            assert isinstance(optimizer, torch.optim.ASGD)
            assert {group["t0"] for group in optimizer.param_groups} == {0.0}
            assert {group["lambd"] for group in optimizer.param_groups} == {0.0}
            return epoch
    return None


@pytest.mark.parametrize(
    ("losses", "nonmono", "expected"),
    [  # Of epochs 1, 2, ...
        # Always better: never.
        ([9, 8, 7, 6, 5, 4, 3, 2], 5, None),
        # Worse than the first epoch, but the last five are not looked at until the seventh.
        ([5, 6, 6, 6, 6, 6, 6, 6], 5, 7),
        # At the eighth the best of epochs 1 and 2 counts, 4.
        ([5, 4, 4.5, 4.5, 4.5, 4.5, 4.5, 4.5], 5, 8),
        # Equal is not worse.
        ([5, 5, 5, 5, 5, 5, 5, 5], 5, None),
        # A better epoch among the last nonmono does not count.
        ([5, 4, 3, 4.5, 4.5], 2, 5),
        ([5, 4, 3, 3.5], 0, 4),
    ],
)
def test_nt_asgd(losses: list[float], nonmono: int, expected: int | None, data: Path) -> None:
    assert begins(data, losses, averaging="nt", nonmono=nonmono) == expected
    assert begins(data, losses, averaging="none", nonmono=0) is None
    for epoch in (0, 1, len(losses) + 1):  # whatever the losses
        begun = begins(data, losses, averaging="et", averaging_epoch=epoch, nonmono=0)
        assert begun == (epoch if epoch <= len(losses) else None)


def test_averages_are_validated_and_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[Trainer] = []
    original = Trainer.__init__

    def spy(self: Trainer, *args: object) -> None:
        trainers.append(self)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "__init__", spy)

    recorder = Recorder()
    run = tmp_path / "run"
    changes = {"clip": 1.0, "learning_rate": 20.0, "weight_decay": 0.0, "alpha": 0, "beta": 0}
    changes |= {"averaging": "et", "averaging_epoch": 1, "epochs": 4}
    config = settings(data, "softmax", run=str(run), **changes)
    result = train(config, recorder)
    assert [record.averaged for record in result.records] == [False, True, True, True]
    assert "averaging of the weights begins after epoch 1" in recorder.messages
    assert result.records[3].best
    kept, corpus = load_run(run).model, load_corpus(data)
    assert evaluate(kept, corpus.valid) == result.records[3].valid_loss
    (trainer,) = trainers
    assert evaluate(trainer.model, corpus.valid) != result.records[3].valid_loss
    with averaged_weights(trainer.optimizers):
        for name, parameter in kept.state_dict().items():
            assert torch.equal(parameter, trainer.model.state_dict()[name]), name
