"""``hstree train``."""

from __future__ import annotations

import argparse
from typing import Any

from hstree.runs import RESUMABLE, ConfigError, TrainConfig
from hstree.runs.flags import add_config_arguments, config_values
from hstree.runs.settings import flag_name
from hstree.training.presets import PRESETS

_DESCRIPTION = """\
Train an LSTM language model and leave a run folder with its settings, vocabulary, metrics, learning
curve and best weights. Without arguments: the docstrings and help topics of this Python
installation, four clustered trees, about 3 minutes on two CPU cores. --preset takes the published
settings of an AWD-LSTM, which need a GPU and hours; --finetune starts from the best weights of
another run. Ctrl-C and SIGTERM save the state and stop; --resume goes on from the last state that
was saved, whatever stopped the run. Several processes: torchrun -m -- hstree.cli train.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("train", help="train a language model", description=_DESCRIPTION)
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="NAME",
        help="published settings, each of which a flag replaces: " + ", ".join(PRESETS),
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with this run from where it stopped; of the other settings only "
        + ", ".join(f"--{flag_name(name)}" for name in RESUMABLE)
        + " can change",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings as JSON and exit"
    )
    add_config_arguments(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.training import default_reporter, format_summary, is_main_process, resume, train

    if arguments.resume is not None:
        for name in ("preset", "print_config"):
            if getattr(arguments, name):
                raise ConfigError(f"--{flag_name(name)}: expected this or --resume, got both")
        result = resume(arguments.resume, default_reporter(), **config_values(arguments))
    else:
        config = _config(arguments)
        if arguments.print_config:
            print(config.to_json(), end="")
            return 0
        result = train(config, default_reporter())
    if not is_main_process():
        return 0
    print()
    print(format_summary(result.summary))
    print()
    print(f"{result.summary.seconds:.0f} s in all; the run is in {result.run}")
    return 0


def _config(arguments: argparse.Namespace) -> TrainConfig:
    from hstree.training import finetuning, preset

    values = config_values(arguments)
    run = values.pop("finetune", None)
    if arguments.preset is not None and run is not None:
        raise ConfigError("--preset: expected this or --finetune, got both")
    if arguments.preset is not None:
        return preset(arguments.preset, **values)
    return TrainConfig(**values) if run is None else finetuning(run, **values)
