"""Flags of the commands with values that are valid or hostile."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

# Every run has one or two steps of a tiny model.
SMALL = {
    "--embedding-size": ["6"],
    "--hidden-size": ["8"],
    "--epochs": ["1"],
    "--batch-size": ["4"],
    "--bptt": ["12"],
    "--warmup": ["1"],
    "--n-trees": ["2"],
    "--device": ["cpu"],
}

EXTREMES = ["1e300", "1e-300", "1e30", "1e6", "5e-324"]
NOT_NUMBERS = ["", "x", "nan", "1e", "-", "½", "1,2"]
BAD_NUMBERS = ["-1", "2.5", "1e400", *NOT_NUMBERS]
"""No counts."""
COUNT = ["1", "2", "7"], ["0", "-1", "2.5", "1e400", "9" * 30, *NOT_NUMBERS]
SHARE = ["0", "0.3", "0.99"], ["-0.1", "1", "1.5", "inf", "1e400", *NOT_NUMBERS]
POSITIVE = ["1e-3", "1", "20"], ["0", "-1", "inf", "-inf", *EXTREMES, *NOT_NUMBERS]
NOT_NEGATIVE = ["0", "1e-3", "2"], ["-1", "inf", *EXTREMES, *NOT_NUMBERS]
SWITCH: tuple[list[str], list[str]] = [""], []

# Valid and hostile values by flag; a switch has the value "".
TRAIN: dict[str, tuple[list[str], list[str]]] = {
    "--min-count": COUNT,
    "--max-vocabulary": (["4", "9", "1000"], ["0", "3", "-5", *NOT_NUMBERS]),
    "--tokenizer": ([], ["missing.json", "", "."]),
    "--embedding-size": (["1", "9"], COUNT[1]),
    "--hidden-size": (["1", "9"], COUNT[1]),
    "--layers": (["1", "2"], COUNT[1]),
    "--context-size": (["1", "6"], COUNT[1]),
    "--dropout": SHARE,
    "--dropout-input": SHARE,
    "--dropout-hidden": SHARE,
    "--dropout-embedding": SHARE,
    "--weight-dropout": SHARE,
    "--embedding-noise": NOT_NEGATIVE,
    "--tied": SWITCH,
    "--n-trees": (["1", "3"], ["0", "-1", "2.5", *NOT_NUMBERS]),
    "--clusters": (["2", "3", "500", "9" * 30], ["0", "1", "-1", "2.5", *NOT_NUMBERS]),
    "--binary": SWITCH,
    "--gate": (["uniform", "constant", "context"], ["other", ""]),
    "--recipe": (["cluster", "huffman", "random"], ["other", ""]),
    "--subset-size": (["1", "4"], ["500", *COUNT[1]]),
    "--sparse": SWITCH,
    "--all-classes": (["0", "0.5", "1"], ["-0.1", "1.5", "x"]),
    "--head-option": (
        ["subset_size=4", "seed=3", "label_smoothing=0.1"],
        [
            "",
            "=",
            "x",
            "x=1",
            "gate=other",
            "subset_size=0",
            "label_smoothing=2",
            "seed=-1",
            "label_smoothing=1" + "0" * 400,
            "z_loss=1e300",
        ],
    ),
    "--batch-size": (["1", "4"], ["100000", *COUNT[1]]),
    "--accumulate": (["1", "2"], ["3", *COUNT[1]]),
    "--bptt": (["1", "6", "9" * 30], ["0", "-1", "2.5", *NOT_NUMBERS]),
    "--variable-bptt": SWITCH,
    "--bptt-margin": (["0", "20"], ["-1", "x", "1.5"]),
    "--optimizer": (["adamw", "sgd"], ["adam", ""]),
    "--learning-rate": (["1e-3", "1"], POSITIVE[1]),
    "--head-learning-rate-factor": (["1", "8"], POSITIVE[1]),
    "--weight-decay": NOT_NEGATIVE,
    "--clip": NOT_NEGATIVE,
    "--schedule": (["cosine", "linear", "constant"], ["step"]),
    "--warmup": (["0", "5"], ["-1", "x", "1.5"]),
    "--alpha": NOT_NEGATIVE,
    "--beta": NOT_NEGATIVE,
    "--averaging": (["none"], ["nt", "et", "always"]),
    "--nonmono": (["0", "5"], ["-1", "x"]),
    "--averaging-epoch": (["0", "5"], ["-1", "x"]),
    "--finetune": ([], ["missing", "", "."]),
    "--finetune-learning-rate": POSITIVE,
    "--resume": ([], ["missing", "", "."]),
    "--preset": ([], ["other", ""]),
    "--seed": (["0", "7", str(2**62)], ["-1", str(2**62 + 1), "x"]),
    "--device": (["cpu", "auto"], ["cuda", "tpu"]),
    "--precision": (["float32", "bfloat16"], ["float64", ""]),
    "--save-interval": (["0", "600"], ["-1", "nan"]),
    "--unknown": ([], ["", "1"]),
}

EVALUATE: dict[str, tuple[list[str], list[str]]] = {
    "--streams": (["1", "7", "3,1"], ["1,2,3", "100000", *COUNT[1][:-1]]),
    "--json": SWITCH,
    "--data": ([], ["missing", ""]),
    "--threads": (["1"], ["0", "1025", "x"]),
}

GENERATE: dict[str, tuple[list[str], list[str]]] = {
    "--prompt": (["", "the", "the cat no-such-word", "é " * 50], []),
    "--words": (["1", "5"], COUNT[1]),
    "--samples": (["1", "3"], COUNT[1]),
    "--temperature": (["0.5", "1", "3"], POSITIVE[1]),
    "--top-k": (["1", "3", "100000"], COUNT[1]),
    "--top-p": (["0.1", "1"], ["0", "1.1", *NOT_NUMBERS]),
    "--seed": (["0", "5"], ["x", "1.5"]),
    "--threads": (["1"], ["0", "1025", "x"]),
}

DESCRIBE: dict[str, tuple[list[str], list[str]]] = {
    "--levels": (["1", "3", "99"], COUNT[1]),
    "--index": (["0", "1"], ["-1", "2", "x"]),
    "--word": (["the", "."], ["no-such-word", ""]),
}


@st.composite
def some_flags(draw: Any, known: dict[str, tuple[list[str], list[str]]]) -> list[str]:
    """Up to four flags, at most one of them hostile."""
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=4, unique=True))
    hostile = draw(st.sampled_from([None, *[name for name in names if known[name][1]]]))
    flags: list[str] = []
    for name in names:
        values = known[name][name == hostile]
        if not values:
            continue
        value = draw(st.sampled_from(values))
        switch = known[name] is SWITCH
        flags += [name] if switch else [f"{name}={value}"]
    return flags
