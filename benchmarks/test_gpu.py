"""What benchmarks.gpu counts and prints, and a whole run of it at a tiny size, on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import gpu
from hstree.heads.tree_layout import stack_tables
from hstree.trees import build_ensemble

TINY = replace(gpu.QUICK, rows=40, features=24, classes=60, subset=8, elements=4096, rounds=2)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the function itself."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@pytest.mark.parametrize("subset", [8, None])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_traffic_equals_a_count_row_by_row(subset: int | None, itemsize: int) -> None:
    random = np.random.default_rng(0)
    rows, in_features, classes, n_trees = 37, 100, 30, 3
    cpu, max_depth, _ = stack_tables(
        build_ensemble("huffman", classes, n_trees, 1.0 / np.arange(1, classes + 1))
    )
    tables = {name: cpu[name].numpy() for name in ("path_offset", "path", "leaf_position")}
    target = random.integers(0, classes, rows)
    index = None
    if subset is not None:
        index = np.stack(
            [np.sort(random.choice(in_features, subset, False)) for _ in range(n_trees)]
        )
    features = subset or in_features
    got = gpu.traffic(target, tables, index, in_features, features, max_depth, itemsize)

    def nodes_in_tiles(tree: int, order: list[int]) -> list[set[int]]:
        spans = [tables["path_offset"][tree, y : y + 2] for y in order]
        paths = [{int(entry) >> 1 for entry in tables["path"][begin:end]} for begin, end in spans]
        return [set().union(*paths[first : first + 16]) for first in range(0, rows, 16)]

    orders = [sorted(target, key=lambda y: tables["leaf_position"][t, y]) for t in range(n_trees)]
    visits, visited, tile_nodes, group_nodes, sectors = 0, 0, 0, 0, 0
    for tree in range(n_trees):
        tiles = nodes_in_tiles(tree, orders[tree])
        visits += sum(int(np.diff(tables["path_offset"][tree, y : y + 2])[0]) for y in target)
        visited += len(set().union(*tiles))
        tile_nodes += sum(map(len, tiles))
        group_nodes += sum(map(len, nodes_in_tiles(tree, orders[0])))
        subset_of = range(in_features) if index is None else index[tree]
        sectors += len({int(feature) * itemsize // 32 for feature in subset_of})
    assert (got.visits, got.visited, got.tile_nodes) == (visits, visited, tile_nodes)
    assert got.group_nodes == group_nodes
    assert visited < tile_nodes < visits
    scores = 4 * rows * n_trees * (max_depth + 1)
    inputs, weights = rows * in_features * itemsize, visited * features * itemsize
    gradient = weights + visited * itemsize
    assert got.compulsory == {
        "forward": inputs + weights + scores,
        "backward": 2 * inputs + weights + scores + gradient + 16 * visited,
    }
    gathered = 32 * rows * sectors
    assert got.kernels == {
        "path_forward_kernel": gathered + tile_nodes * features * itemsize + scores,
        "path_backward_input_kernel": group_nodes * features * itemsize + inputs + scores,
        "path_backward_weight_kernel": gathered + scores + gradient,
    }


@pytest.mark.usefixtures("no_compiler")
def test_whole_run_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = gpu.run(TINY, "cpu")
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(results))
    contests = [*results["path"], results["wide"]]
    assert [part["recipe"] for part in results["path"]] == ["huffman", "random"]
    for part in contests:
        for name, entry in part["contestants"].items():
            assert "error" not in entry, name
            assert all(len(seconds) == 2 for seconds in entry["seconds"].values())
    for part in results["path"]:
        assert part["contestants"][gpu.OURS]["relative_error"] < 1e-2
        named = {*part["contestants"], *part["missing"]}
        assert named >= {gpu.EAGER, gpu.COMPILED, gpu.CHUNKED, "Liger", "cut-cross-entropy"}
        assert "quack-kernels" in named
    assert results["wide"]["contestants"]["TreeEnsemble"]["relative_error"] < 1e-2
    assert results["plif"]["relative_error"] < 1e-5

    assert gpu.main(["--table", str(file)]) == 0
    printed = capsys.readouterr().out
    for name in (gpu.EAGER, "TreeEnsemble", "hstree, dense gradients", "PLIF forward / streaming"):
        assert name in printed
    for name in results["path"][0]["missing"]:
        assert name in printed


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_contestant_that_is_wrong_is_named_and_not_timed(fault: str) -> None:
    weight = torch.ones(3, requires_grad=True)

    def loss() -> Tensor:
        if fault == "raises":
            raise ValueError("no such kernel")
        return 2 * weight.sum()

    losses = {"good": (weight.sum, [weight]), "bad": (loss, [weight])}
    result = gpu.measure(losses, {"good": 3.0, "bad": 3.0}, replace(TINY, dtype="float32"), "cpu")
    assert len(result["good"]["seconds"]["both"]) == TINY.rounds
    assert "seconds" not in result["bad"]
    message = {"raises": "ValueError: no such kernel", "wrong": "loss 6, expected 3"}[fault]
    assert result["bad"]["error"] == message


def test_targets_from_figures() -> None:
    """Ratios of medians; None where a figure is missing."""

    def entry(both: list[float], peak: int | None = None) -> dict[str, Any]:
        return {"seconds": {"forward": both, "backward": both, "both": both}, "peak_bytes": peak}

    part = {
        "recipe": "huffman",
        "contestants": {
            gpu.EAGER: entry([30.0, 50.0, 40.0], 1000),
            gpu.COMPILED: entry([20.0]),
            gpu.CHUNKED: {"error": "out of memory"},
            gpu.OURS: entry([1.0, 0.5, 2.0], 40),
        },
        "traffic": {"compulsory": {"forward": 300, "backward": 700}},
    }
    results = {
        "copy_bytes_per_second": 4000.0,
        "path": [part],
        "plif": {
            "bytes": {"forward": 800, "backward": 1200},
            "seconds": {"forward": 0.3, "backward": 0.6},
        },
        "wide": {
            "contestants": {
                "TreeEnsemble": entry([2.0]),
                gpu.EAGER: entry([8.0]),
                "AdaptiveLogSoftmaxWithLoss": {"error": "out of memory"},
            }
        },
    }
    reached = {row["title"]: row["reached"] for row in gpu.targets(results)}
    assert reached == {
        "huffman: fastest flat loss / hstree": 20.0,
        f"huffman: peak extra memory of hstree / {gpu.EAGER}": 0.04,
        "huffman: hstree / compulsory traffic": 4.0,
        "huffman: dense / row-sparse gradients": None,
        "PLIF forward / streaming": pytest.approx(1.5),
        "PLIF backward / streaming": pytest.approx(2.0),
        f"wide nodes: {gpu.EAGER} / TreeEnsemble": 4.0,
        "wide nodes: AdaptiveLogSoftmaxWithLoss / TreeEnsemble": None,
    }


def test_kernels_by_name() -> None:
    ours = "void hstree::(anonymous namespace)::path_forward_kernel<__nv_bfloat16, true>(Tables)"
    assert gpu.kernel_name(ours) == "path_forward_kernel"
    assert gpu.kernel_name("void hstree::segment_reduce_kernel<float>()") == "segment_reduce_kernel"
    assert gpu.kernel_name("void at::native::reduce_kernel<512>()") == "sort and the rest"


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--out", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err == "benchmarks.gpu needs a CUDA GPU, and torch sees none here\n"
    assert not captured.out
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows: expected at least 1, got 0"),
        (["--features", "8", "--subset", "9"], "--subset: expected at most 8, got 9"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert message in capsys.readouterr().err
