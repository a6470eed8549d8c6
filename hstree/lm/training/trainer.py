"""The training loop: truncated backpropagation through time, from any step of any epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hstree.heads.class_sampler import ClassSampler
from hstree.lm.data import Corpus, Streams
from hstree.lm.models import BackboneOutput, LanguageModel, State, activation_penalty, detach
from hstree.lm.runs import ConfigError, TrainConfig
from hstree.optim import clip_grad_norm_

from .distributed import Processes
from .optimizer import (
    build_optimizers,
    non_monotone,
    scheduled_learning_rate,
    set_learning_rate,
    window_lengths,
)


class TrainingError(RuntimeError):
    """Training cannot continue: the loss or a weight is not finite, or memory ran out."""


@dataclass
class Position:
    """The position of training, between two steps."""

    epoch: int = 0  # counted from 1; 0 before the first
    time_step: int = 0  # of the streams, at which the next window begins
    step: int = 0  # optimizer steps since the beginning
    loss: float = 0.0  # sum over the targets of the epoch so far, in nats
    tokens: int = 0  # number of these targets
    seconds: float = 0.0  # of the steps of the epoch
    learning_rate: float = 0.0  # of the last step, for a window of ``bptt`` time steps

    @property
    def train_loss(self) -> float:
        """Mean negative log-likelihood over the current epoch, in nats per token, without penalties
        and options of the loss; the estimate of a head that samples classes in training."""
        return self.loss / self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Mean over the steps of the current epoch."""
        return self.tokens / self.seconds


class Step(NamedTuple):
    """A finished optimizer step: its epoch, counted from 1, the mean negative log-likelihood of its
    window, in nats per token, without penalties and options of the loss, and its targets."""

    epoch: int
    loss: float
    tokens: int


def process_seed(seed: int, rank: int) -> int:
    """A different seed for every process, so that dropout masks differ."""
    return seed + 1_000_003 * rank


class _Objective(nn.Module):
    """What a step minimizes, for the streams of one process or a part of them: a module, as
    DistributedDataParallel wants."""

    def __init__(self, model: LanguageModel, config: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.config = config

        def head_loss(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            output, loss = model.head(hidden, target)
            return loss, -output.detach().sum() / (target != model.head.ignore_index).sum()

        self.head_loss = torch.compile(head_loss, dynamic=True) if config.compile else head_loss

    def forward(
        self, tokens: Tensor, target: Tensor, state: State | None, loss_share: float, share: float
    ) -> tuple[Tensor, Tensor, State]:
        """``loss_share`` times the mean loss plus ``share`` times the penalties; its value and
        ``loss_share`` times the mean negative log-likelihood, float64 [2]; the state without its
        history."""
        with torch.autocast(
            tokens.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"
        ):
            read: BackboneOutput = self.model.backbone(tokens, state)
            loss, nll = self.head_loss(read.hidden, target)
        objective = share * activation_penalty(read, self.config.alpha, self.config.beta)
        # The mean over no targets is NaN, but DistributedDataParallel needs a graph.
        if loss_share > 0:
            loss, nll = loss_share * loss, loss_share * nll
        else:
            loss = nll = 0.0 * read.dropped.sum()
        objective = objective + loss
        values = torch.stack([objective.detach(), nll.detach()]).double()
        return objective, values, detach(read.state)


class Trainer:
    """Trains a model on a corpus.

    Args:
        model: the model, on the training device.
        corpus: class ids of the model.
        config: batch size, windows, optimizer, learning rates, schedule, clipping, penalties,
            averaging, epochs, the share of steps with all classes.
        processes: the processes that share the batch; each calls the same methods.

    Attributes:
        position: position in the training text, and figures of the current epoch.
        in_epoch: whether the current epoch has begun and has not been validated yet.
        averaging: whether averaged SGD has begun.

    Raises:
        ValueError: the training text is too small for the batch, averaged SGD does not support the
            head, or it samples no classes to begin with.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        config: TrainConfig,
        processes: Processes | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = model.backbone.embedding.weight.device
        self.processes = processes or Processes(0, 1, self.device)
        head = model.head
        self._samples = isinstance(head, ClassSampler) and head.negatives is not None
        # Other heads do not read the setting.
        if config.all_classes and isinstance(head, ClassSampler) and not self._samples:
            raise ConfigError(
                "--all-classes: expected --head-option negatives=N with the head "
                f"{config.head!r}, got it without negatives"
            )
        self.streams = Streams(
            corpus.train,
            config.batch_size * self.processes.size,
            ignore_index=model.head.ignore_index,
        )
        self.windows = -(-len(self.streams) // config.bptt)
        self.steps_per_epoch = self.windows  # an estimate if lengths are random
        if config.variable_bptt:
            self.steps_per_epoch = max(1, round(len(self.streams) / (0.975 * config.bptt)))
        self.lengths = np.random.default_rng(config.seed) if config.variable_bptt else None
        self.optimizers = build_optimizers(model, config)
        self.averaging = False
        self.valid_losses: list[float] = []
        if config.averaging != "none" or config.finetune is not None:
            averaged = build_optimizers(model, config, averaged=True)  # raises if a group is sparse
            from_start = config.averaging == "et" and config.averaging_epoch == 0
            if from_start or config.finetune is not None:
                self.optimizers, self.averaging = averaged, True
        full_streams = (len(corpus.train) - 1) // len(self.streams)
        always_targets = (
            full_streams > self.streams.batch_size - config.batch_size // config.accumulate
        )
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.objective = self.processes.wrap(
            _Objective(model, config),
            may_skip_parameters=head.may_skip_parameters or not always_targets,
        )
        self.position = Position()
        self.states: list[State | None] = [None] * config.accumulate
        self.in_epoch = False

    def _begin_epoch(self) -> None:
        position = self.position
        self.in_epoch = True
        position.epoch += 1
        position.time_step = position.tokens = 0
        position.loss = position.seconds = 0.0
        self.states = [None] * self.config.accumulate

    def steps(self) -> Iterator[Step]:
        """Make one pass over the training text, or the rest of a pass after :meth:`restore`.
        :meth:`state` can be saved between two steps. Raises TrainingError if the loss is not
        finite."""
        position = self.position
        if not self.in_epoch:
            self._begin_epoch()
        self.model.train()
        remaining = len(self.streams) - position.time_step
        config = self.config
        for length in window_lengths(remaining, config.bptt, self.lengths, config.bptt_margin):
            yield self._step(length)

    def note_validation(self, loss: float) -> bool:
        """End the epoch, record its validation loss, and start averaging if it is time. Returns
        whether training ends, since fine-tuning has stopped improving."""
        self.in_epoch = False
        self.valid_losses.append(loss)
        worse = non_monotone(self.valid_losses, self.config.nonmono)
        if self.config.finetune is not None:
            return worse
        late = self.position.epoch >= self.config.averaging_epoch
        due = {"none": False, "nt": worse, "et": late}[self.config.averaging]
        if due and not self.averaging:
            self.averaging = True
            self.optimizers = build_optimizers(self.model, self.config, averaged=True)
        return False

    def _step(self, length: int) -> Step:
        config, position, begin = self.config, self.position, time.perf_counter()
        windows_before = (position.epoch - 1) * self.windows + position.time_step / config.bptt
        rate = scheduled_learning_rate(config, windows_before, config.epochs * self.windows)
        set_learning_rate(self.optimizers, rate * (length / config.bptt))
        if self._samples:
            self.model.head.samples_in_training = self._samples_after(windows_before)
        tokens, target = self.streams.window(position.time_step, length)
        counted = target != self.model.head.ignore_index
        n_targets = int(counted.sum())
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        width = config.batch_size // config.accumulate
        size = self.processes.size
        for part in range(config.accumulate):
            first = self.processes.rank * config.batch_size + part * width
            columns = slice(first, first + width)
            # Gradients are averaged over the processes; the factor turns the mean into a sum.
            loss_share = size * (int(counted[:, columns].sum()) / n_targets)
            with self._no_exchange() if part + 1 < config.accumulate else nullcontext():
                objective, values, self.states[part] = self.objective(
                    tokens[:, columns].to(self.device),
                    target[:, columns].to(self.device),
                    self.states[part],
                    loss_share,
                    1.0 / config.accumulate,
                )
                objective.backward()
            total += values
        if config.clip > 0:
            clip_grad_norm_(self.parameters, config.clip)
        objective_value, loss = (value / size for value in self.processes.sum(*total.tolist()))
        if not math.isfinite(objective_value):
            raise self._diverged(f"the loss became {objective_value}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        position.time_step += length
        position.step += 1
        position.loss += loss * n_targets
        position.tokens += n_targets
        position.seconds += time.perf_counter() - begin
        position.learning_rate = rate
        return Step(position.epoch, loss, n_targets)

    def _samples_after(self, windows: float) -> bool:
        """Whether the step after these windows samples classes."""
        config = self.config
        return self._samples and windows < (1 - config.all_classes) * config.epochs * self.windows

    @property
    def sampled(self) -> bool:
        """Whether steps of the current epoch sampled classes."""
        return self._samples_after((self.position.epoch - 1) * self.windows)

    def _no_exchange(self) -> Any:
        if isinstance(self.objective, DistributedDataParallel):
            return self.objective.no_sync()
        return nullcontext()

    def check_weights(self) -> None:
        finite = [parameter.isfinite().all() for parameter in self.parameters]
        if not bool(torch.stack(finite).all()):
            raise self._diverged("weights are no longer finite")

    def _diverged(self, what: str) -> TrainingError:
        position, config = self.position, self.config
        return TrainingError(
            f"{what} in epoch {position.epoch}, step {position.step + 1}; "
            f"try a lower --learning-rate (now {config.learning_rate:g}) "
            f"or a lower --clip (now {config.clip:g})"
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The training state between two steps, without the weights of the model, for
        :meth:`restore`: tensors, and everything else as JSON would hold it. It has the optimizers
        with their averages, random states and LSTM states of all processes, and the position."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        for i, optimizer in enumerate(self.optimizers):
            for index, values in optimizer.state_dict()["state"].items():
                for key, value in values.items():
                    name = f"optimizer.{i}.{index}.{key}"
                    if isinstance(value, Tensor):
                        tensors[name] = value
                    else:
                        numbers[name] = value
        for part, state in enumerate(self.states):
            for layer, pair in enumerate(state or ()):
                for name, tensor in zip("hc", pair, strict=True):
                    every = self.processes.gather(tensor)
                    tensors[f"lstm.{part}.{layer}.{name}"] = torch.stack(every)
        tensors["random.cpu"] = torch.stack(self.processes.gather(torch.get_rng_state()))
        if self.device.type == "cuda":
            own = torch.cuda.get_rng_state(self.device)
            tensors["random.cuda"] = torch.stack(self.processes.gather(own))
        return tensors, {
            "processes": self.processes.size,
            "position": asdict(self.position),
            "in_epoch": self.in_epoch,
            "averaging": self.averaging,
            "valid_losses": list(self.valid_losses),
            "optimizers": numbers,
            "lengths": None if self.lengths is None else self.lengths.bit_generator.state,
        }

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a :meth:`state`. The caller restores the weights of the model.

        Raises:
            ValueError: the state belongs to another number of processes.
            KeyError, IndexError, TypeError, RuntimeError: the state belongs to another model.
        """
        if values["processes"] != self.processes.size:
            raise ValueError(
                f"--resume: expected {values['processes']} processes as before, "
                f"got {self.processes.size}"
            )
        self.position = Position(**values["position"])
        self.in_epoch = values["in_epoch"]
        self.valid_losses = list(values["valid_losses"])
        if values["averaging"] and not self.averaging:
            self.averaging = True
            self.optimizers = build_optimizers(self.model, self.config, averaged=True)
        if self.lengths is not None:
            self.lengths.bit_generator.state = values["lengths"]
        states: list[dict[int, dict[str, Any]]] = [{} for _ in self.optimizers]
        found = {name: t for name, t in tensors.items() if name.startswith("optimizer.")}
        for name, value in (found | values["optimizers"]).items():
            _, i, index, key = name.split(".", 3)
            states[int(i)].setdefault(int(index), {})[key] = value
        for optimizer, state in zip(self.optimizers, states, strict=True):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state, "param_groups": groups})
        rank = self.processes.rank
        layers = range(self.model.backbone.layers)

        def saved(part: int, layer: int, name: str) -> Tensor:
            return tensors[f"lstm.{part}.{layer}.{name}"][rank].to(self.device, copy=True)

        self.states = [
            tuple((saved(part, layer, "h"), saved(part, layer, "c")) for layer in layers)
            if f"lstm.{part}.0.h" in tensors
            else None
            for part in range(self.config.accumulate)
        ]
        torch.set_rng_state(tensors["random.cpu"][rank].clone())
        if self.device.type == "cuda" and "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"][rank].clone(), self.device)
        elif self.device.type == "cuda":  # saved on a CPU
            torch.cuda.manual_seed(process_seed(self.config.seed, rank))
