"""Damaged and foreign files: each is refused with its name, or read to something that works."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fuzz.scale import cases
from fuzz.some_heads import HEAD_SETTINGS, HeadSetting, build
from hstree.heads import head_names, load_head
from hstree.lab.study import StudyError, read_study
from hstree.lm.config import ConfigError, TrainConfig, read_settings
from hstree.lm.data import Vocabulary
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.run import CheckpointError, load_model, model_writer
from hstree.trees import Tree, build_ensemble


def some(count: int) -> settings:
    """One folder serves all cases of a test."""
    shared = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=cases(count), suppress_health_check=shared)


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 3, 10**6, 2**31, 2**63, 10**21, 10**400, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "softmax", "x\x1b[31m", [], [[]], {}, {"a": 1}, [0, 1, 2]),
]
"""What may stand anywhere in a file of another program."""


DTYPES = ["F32", "I32", "I64", "BOOL", "U8", "BF16"]


def spoilt(data: st.DataObject, value: Any) -> Any:
    """The value with one part of it replaced, removed or added."""
    if isinstance(value, dict) and value and data.draw(st.booleans(), "enter"):
        key = data.draw(st.sampled_from(sorted(value)), "key")
        kind = data.draw(st.sampled_from(["inside", "inside", "remove", "rename"]), "kind")
        rest = {name: part for name, part in value.items() if name != key}
        if kind == "inside":
            return rest | {key: spoilt(data, value[key])}
        return rest if kind == "remove" else rest | {key + "x": value[key]}
    if isinstance(value, list) and value and data.draw(st.booleans(), "enter"):
        at = data.draw(st.integers(0, len(value) - 1), "at")
        return [*value[:at], spoilt(data, value[at]), *value[at + 1 :]]
    return data.draw(st.sampled_from(ODD), "odd")


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """A few bytes changed, removed or put in, or the end cut off."""
    out = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        at = data.draw(st.integers(0, max(len(out) - 1, 0)), "at")
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "insert", "remove"]), "kind")
        byte = data.draw(st.integers(0, 255), "byte")
        if kind == "cut":
            del out[at:]
        elif kind == "insert":
            out[at:at] = bytes([byte]) * data.draw(st.integers(1, 40), "count")
        elif kind == "remove":
            del out[at : at + byte]
        elif out:
            at = min(at, len(out) - 1)
            out[at] = out[at] ^ (1 << byte % 8) if kind == "flip" else byte
    return bytes(out)


def respelled(data: st.DataObject, content: bytes) -> bytes:
    """A safetensors file with another header: its JSON texts, types or shapes changed."""
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header["__metadata__"]
    names = [name for name in header if name != "__metadata__"]
    if names and data.draw(st.integers(0, 2), "where") == 0:
        tensor = header[data.draw(st.sampled_from(names), "tensor")]
        if data.draw(st.booleans(), "type"):
            tensor["dtype"] = data.draw(st.sampled_from(DTYPES))
        else:
            tensor["shape"] = data.draw(st.sampled_from([tensor["shape"][::-1], [], [2**40], [0]]))
    else:
        key = data.draw(st.sampled_from(sorted(metadata)), "text")
        try:
            metadata[key] = json.dumps(spoilt(data, json.loads(metadata[key])))
        except ValueError:  # plain text
            metadata[key] = str(data.draw(st.sampled_from(ODD), "odd"))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def changed(data: st.DataObject, content: bytes) -> bytes:
    how = data.draw(st.sampled_from([damaged, respelled]), "how")
    return how(data, content)


def refused(path: Path, read: Callable[[Path], Any], error: type[Exception]) -> Any:
    """What is read, or None if it is refused by the documented error, which names the file."""
    try:
        return read(path)
    except error as caught:
        message = str(caught)
    assert str(path) in message
    assert len(message) < 8000
    return None


@cache
def head_file(setting: HeadSetting) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "head.safetensors")
        build(setting)[0].save(path)
        return path.read_bytes()


@some(120)
@given(HEAD_SETTINGS, st.data())
def test_heads(tmp_path: Path, setting: HeadSetting, data: st.DataObject) -> None:
    path = tmp_path / "head.safetensors"
    path.write_bytes(changed(data, head_file(setting)))
    head = refused(path, load_head, ValueError)
    if head is None:
        return
    assert head.name in head_names()
    hidden = torch.zeros(2, head.in_features, dtype=next(head.parameters()).dtype)
    log_prob = head.eval().log_prob(hidden)
    assert log_prob.shape == (2, head.n_classes)


@some(40)
@given(st.data())
def test_trees(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.tree"
    (tree,) = build_ensemble("random", 23, 1, clusters=5)
    tree.save(path)
    path.write_bytes(changed(data, path.read_bytes()))
    read = refused(path, Tree.load, ValueError)
    if read is not None:
        assert sorted(read.order) == list(range(read.n_classes))


@some(40)
@given(st.data())
def test_models(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "model.safetensors"
    setting = HeadSetting("trees", 4, 9, 0.5, True, "mean", -100, False, 0.0, 0.0, 3)
    model = LanguageModel(AWDLSTM(9, 4, 4), build(setting)[0].float())
    model_writer(model)(path)
    path.write_bytes(changed(data, path.read_bytes()))
    read = refused(path, load_model, CheckpointError)
    if read is not None:
        assert isinstance(read, LanguageModel)


@some(40)
@given(st.data())
def test_vocabularies(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "vocabulary.txt"
    content = Vocabulary(["<unk>", "<eos>", "a", "bé"], [5, 4, 3, 2]).to_bytes()
    count = data.draw(st.sampled_from(["3", "9" * 21, "9" * 5000, "-1", "٣", "²", "1e3", ""]))
    content = content.replace(b"3", count.encode())
    path.write_bytes(damaged(data, content) if data.draw(st.booleans()) else content)
    read = refused(path, Vocabulary.load, ValueError)
    if read is not None:
        assert read.to_bytes().decode().split("\n") == path.read_text().split("\n") or "٣" in count


@some(60)
@given(st.data())
def test_settings(tmp_path: Path, data: st.DataObject) -> None:
    config = TrainConfig(head="trees", data="x", run="y")
    path = tmp_path / "config.json"
    if data.draw(st.booleans(), "bytes"):
        path.write_bytes(damaged(data, config.to_json().encode()))
    else:
        path.write_text(json.dumps(spoilt(data, json.loads(config.to_json()))))
    settings = refused(path, read_settings, ConfigError)
    if settings is not None:
        with suppress(ConfigError):
            assert TrainConfig(**settings).to_json()


STUDY = """seeds = [1, 2]
baseline = "softmax"
rank = {rows = 100}
[settings]
epochs = 3
[[models]]
head = "softmax"
[[models]]
name = "gss"
head = "gss"
learning_rate = [1.0, 2]
head_options = {c = [-1.5, 0], k = 2}
"""
TOML = ["1979-05-27", "9" * 30, "9" * 5000, "nan", "inf", "[]", "[[1]]", "{}", '"\\u001b"', "-1"]


@some(60)
@given(st.data())
def test_studies(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "study.toml"
    lines = STUDY.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1), "line")
    key, equals, _ = lines[at].partition("= ")
    if equals and data.draw(st.booleans(), "value"):
        lines[at] = key + equals + data.draw(st.sampled_from(TOML), "odd")
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path.write_bytes(damaged(data, STUDY.encode()))
    study = refused(path, read_study, StudyError)
    if study is not None:
        assert study.models


@pytest.mark.parametrize("depth", [10, 100_000])
def test_deeply_nested(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * depth + "]" * depth)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_settings(path)
    path = tmp_path / "study.toml"
    path.write_text("seeds = " + "[" * depth + "]" * depth)
    with pytest.raises(StudyError, match=r"study\.toml"):
        read_study(path)
