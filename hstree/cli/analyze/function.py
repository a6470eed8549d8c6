"""``hstree analyze function``."""

from __future__ import annotations

import argparse
from typing import Any

from ..arguments import add_config_arguments, config_values
from ..results import add_output_argument, publish, results_folder
from ..runs import run_corpus, run_names

_DESCRIPTION = """\
The increasing function f of heads that are a softmax of f(logits), such as PLIF, GSS, SigSoftmax,
monotonic networks and mixtures with these, against the identity: f over the range that the logits
of the test text take, histograms of its slopes and of the logits. A plain softmax, whose f is the
identity, shows its logits. Without --data: the text that each run was trained on.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "function", help="the function that a head applies to its logits", description=_DESCRIPTION
    )
    parser.add_argument("directories", metavar="RUN", nargs="+", help="run folders of hstree train")
    add_config_arguments(parser, only=("data", "device", "threads"))
    add_output_argument(parser, "results/function")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.analysis import (
        check_function_head,
        function_data,
        function_notes,
        function_picture,
        function_tables,
        view_function,
    )
    from hstree.training import TrainConfig, choose_device, load_run, set_threads

    settings = TrainConfig(**config_values(arguments))
    set_threads(settings)
    names = run_names(arguments.directories)
    device = choose_device(settings.device)
    runs = {
        name: load_run(path, device)
        for name, path in zip(names, arguments.directories, strict=True)
    }
    for name, run in runs.items():
        try:
            check_function_head(run.model)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    texts = {name: run_corpus(run, settings.data) for name, run in runs.items()}
    folder = results_folder(arguments)
    views = {name: view_function(run.model, texts[name].test) for name, run in runs.items()}
    notes = [
        f"{name}: {len(texts[name].test) - 1:,} contexts of the test text of {texts[name].name}"
        for name in names
    ]
    publish(
        folder,
        "function",
        "The function that a head applies to its logits",
        function_tables(views),
        {name: function_data(view) for name, view in views.items()},
        {"function-of-the-logits.png": function_picture(views)},
        notes + function_notes(views),
        rows=[
            {"run": name, "function": view.function, "logit": x, "value": y}
            for name, view in views.items()
            for x, y in zip(view.x.tolist(), view.value.tolist(), strict=True)
        ],
    )
    return 0
