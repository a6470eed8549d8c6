"""Word similarity: files of sets and vectors, correlations, table, picture and command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hstree.__main__ import main
from hstree.heads import Softmax
from hstree.lab import model_embeddings, word_similarity
from hstree.lab.words import (
    Embeddings,
    Pair,
    confidence_interval,
    mean_similarity,
    read_similarity_sets,
    similarity_picture,
    spearman,
    word_similarity_table,
)
from hstree.lm.model import AWDLSTM, LanguageModel
from hstree.lm.run import load_run

# Lines in the form of each distribution, made up; all say the same.
PAIRS = (("tiger", "cat", 7.35), ("Jerusalem", "Israel", 8.0))
FORMS = {
    "spaces, CRLF, a tab at the end": "tiger cat 7.35\t\r\nJerusalem  Israel 8.00\r\n",
    "set1.csv, columns of the judges": "Word 1,Word 2,Human (mean),1,2,3\n"
    "tiger,cat,7.35,9,7,8\nJerusalem,Israel,8.00,10,8,6\n",
    "quotes": '"word1","word2","score"\n"tiger","cat",7.35\n"Jerusalem","Israel",8.0\n',
    "semicolons": "tiger;cat;7.35\nJerusalem;Israel;8\n",
    "SimLex-999": "word1\tword2\tPOS\tSimLex999\tconc(w1)\tconcQ\n"
    "tiger\tcat\tN\t7.35\t2.72\t2\nJerusalem\tIsrael\tN\t8\t2.7\t1\n",
    "RW-STANFORD": "tiger\tcat\t7.35\t7\t6\t10\nJerusalem\tIsrael\t8.00\t8\t8\t8\n",
    "MEN, lemma form": "tiger-n cat-n 7.350000\nJerusalem-n Israel-j 8.000000\n",
    "comments, a mark of byte order": "\ufeff# human scores\n\ntiger cat 7.35\n  # and\n"
    "Jerusalem Israel 8\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_sets(form: str, tmp_path: Path) -> None:
    file = tmp_path / "EN-WS-2.txt"
    file.write_bytes(FORMS[form].encode())
    assert read_similarity_sets(file) == {"WS-2": PAIRS}


def test_marks_stay_unless_all_words_have_one(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    file.write_text("t-v film 3\nplan-b x-n 4\n")
    pairs = read_similarity_sets(file)["set"]
    assert pairs == (("t-v", "film", 3.0), ("plan-b", "x-n", 4.0))


def test_files_that_are_no_sets(tmp_path: Path) -> None:
    file = tmp_path / "set.txt"
    for content, message in (
        (b"gem jewel 3.8\ngem jewel\n", "line 2: expected word1 word2 score, got 'gem jewel'"),
        (b"gem jewel 3.8\n\ngem jewel much\n", "line 3: expected word1 word2 score"),
        (b"gem jewel 3.8\ngem\tjewel\tnan\n", "line 2: expected word1 word2 score"),
        (b"a b score\na b score\n", "line 2: expected word1 word2 score"),
        (b"t\ttiger\tcat\t7.35\nt\tgem\tjewel\t1\n", "line 2: expected word1 word2 score"),
        (b"gem jewel\n", "line 1: expected word1 word2 score"),
        (b"\tjewel\t3\n\tjewel\t3\n", "line 1: expected word1 word2 score, got 'jewel"),
        (b"word1 word2 score\n", "expected lines word1 word2 score, got none"),
        (b"gem j\xffwel 3\n", "expected UTF-8 text, but byte 5 is not"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(str(file))) as caught:
            read_similarity_sets(file)
        assert message in str(caught.value)


def test_folder_of_sets(tmp_path: Path) -> None:
    for name in ("EN-B.tsv", "A.csv", "C.TXT"):
        (tmp_path / name).write_text("a\tb\t1\n")
    (tmp_path / "README.md").write_text("what these are")
    assert list(read_similarity_sets(tmp_path)) == ["A", "C", "B"]
    assert list(read_similarity_sets(tmp_path / "EN-B.tsv")) == ["B"]
    (tmp_path / "empty").mkdir()
    for place, message in (("empty", "expected files that end in .txt"), ("none", "no such file")):
        with pytest.raises(ValueError, match=f"{place}: {message}"):
            read_similarity_sets(tmp_path / place)


def average_ranks(values: list[float]) -> list[float]:
    """Ranks from 1; of equal values, the mean of the places that they take."""
    return [
        sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2
        for value in values
    ]


def test_spearman_with_ties() -> None:
    from scipy.stats import t

    generator = np.random.default_rng(0)
    for _ in range(20):
        first = generator.integers(0, 5, 30).astype(float)
        second = first + generator.integers(0, 6, 30)
        rho, p_value = spearman(first, second)
        ranks = [average_ranks(series.tolist()) for series in (first, second)]
        expected = float(np.corrcoef(ranks)[0, 1])
        assert rho == pytest.approx(expected, abs=1e-12)
        statistic = expected * math.sqrt(28 / (1 - expected**2))
        assert p_value == pytest.approx(2 * t.sf(abs(statistic), 28), rel=1e-9)


def test_spearman_where_it_is_not_defined() -> None:
    for first, second in (([], []), ([1.0], [2.0]), ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])):
        assert all(map(math.isnan, spearman(first, second)))
    rho, p_value = spearman([1, 2], [2, 1])
    assert rho == pytest.approx(-1)
    assert math.isnan(p_value)


def test_confidence_interval() -> None:
    low, high = confidence_interval(0.0, 103)
    assert (low, high) == pytest.approx((-math.tanh(0.1959964), math.tanh(0.1959964)))
    assert confidence_interval(-0.3, 40) == pytest.approx(
        [-bound for bound in reversed(confidence_interval(0.3, 40))]
    )
    for rho, n in ((0.5, 3), (1.0, 30), (-1.0, 30), (math.nan, 30)):
        assert all(map(math.isnan, confidence_interval(rho, n)))


Sets = dict[str, list[Pair]]
WORDS = ["cat", "dog", "car", "bus", "Paris", "nowhere", "sun"]


@pytest.fixture
def made_up() -> tuple[Sets, Embeddings]:
    """Ten pairs of which three do not count: PARIS is not there in any case but its own, nowhere
    has no direction, and lion no vector."""
    generator = np.random.default_rng(3)
    vectors = generator.normal(size=(len(WORDS), 4)).astype(np.float32)
    vectors[WORDS.index("nowhere")] = 0
    pairs = [("cat", "Dog"), ("CAR", "bus"), ("Paris", "sun"), ("cat", "car"), ("dog", "bus")]
    pairs += [("sun", "cat"), ("cat", "cat"), ("PARIS", "cat"), ("nowhere", "cat")]
    pairs += [("lion", "cat")]
    scores = (9.0, 8.0, 3.0, 1.0, 1.0, 2.5, 10.0, 1.0, 2.0, 3.0)
    scored = {"made up": [(a, b, s) for (a, b), s in zip(pairs, scores, strict=True)]}
    index = {word: row for row, word in enumerate(WORDS)}
    return scored, Embeddings("model", index, vectors)


def test_word_similarity(made_up: tuple[Sets, Embeddings]) -> None:
    from scipy.stats import spearmanr

    judged, embeddings = made_up
    ((found,),) = word_similarity(judged, [embeddings])
    assert (found["set"], found["model"]) == ("made up", "model")
    assert (found["pairs"], found["missing"]) == (10, 3)
    weight = torch.from_numpy(embeddings.vectors).double()
    places = [(0, 1), (2, 3), (4, 6), (0, 2), (1, 3), (6, 0), (0, 0)]
    similarities = [float(torch.cosine_similarity(weight[a], weight[b], 0)) for a, b in places]
    expected = spearmanr([score for *_, score in judged["made up"][:7]], similarities)
    assert found["rho"] == pytest.approx(expected.statistic, abs=1e-12)
    assert found["p_value"] == pytest.approx(expected.pvalue, abs=1e-12)
    assert (found["low"], found["high"]) == confidence_interval(found["rho"], 7)


def test_common_pairs(made_up: tuple[Sets, Embeddings]) -> None:
    judged, embeddings = made_up
    index = {word: row for word, row in embeddings.index.items() if word != "sun"}
    fewer = Embeddings("fewer", index, embeddings.vectors)
    (own,) = word_similarity(judged, [embeddings, fewer])
    (common,) = word_similarity(judged, [embeddings, fewer], common=True)
    assert [each["missing"] for each in own] == [3, 5]
    assert [each["missing"] for each in common] == [5, 5]
    assert common[0] | {"model": "fewer"} == common[1] == own[1]
    assert common[0]["rho"] != own[0]["rho"]


def test_nothing_is_known(made_up: tuple[Sets, Embeddings]) -> None:
    judged, embeddings = made_up
    nothing = Embeddings("nothing", {}, np.zeros((0, 4), np.float32))
    result = word_similarity(judged | {"again": judged["made up"]}, [embeddings, nothing])
    assert result[0][1]["missing"] == 10
    means = [*mean_similarity(result, False), *mean_similarity(result, True)]
    assert all(map(math.isnan, means))
    table = word_similarity_table(result)
    assert table.header[2:4] == ("missing in model", "missing in nothing")
    assert table.rows[0][-1] == "-"
    assert len(similarity_picture(result).axes[0].get_yticks()) == 2


def test_means_leave_out_sets_that_not_all_have() -> None:
    rhos, missing = [[0.1, 0.2], [0.5, 0.6], [0.9, math.nan]], [[90, 90], [70, 70], [0, 99]]
    result = [
        [{"rho": rho, "pairs": 100, "missing": m} for rho, m in zip(*of, strict=True)]
        for of in zip(rhos, missing, strict=True)
    ]
    assert mean_similarity(result, False) == pytest.approx((0.3, 0.4))
    assert mean_similarity(result, True) == pytest.approx((0.4, 0.5))


def test_vectors_of_a_model() -> None:
    backbone = AWDLSTM(30, 6, 8, context_size=6)
    words = [f"w{number}" for number in range(30)]
    found = model_embeddings(LanguageModel(backbone, Softmax(6, 30)), words, "run")
    assert found.row("W7") == 7
    assert np.array_equal(found.vectors, backbone.embedding.weight.detach().numpy())


# The command

JUDGED = [("Cat", "dog", 9.0), ("eats", "sleeps", 5.5), ("fish", "meat", 7.0), ("town", "old", 1.0)]
UNKNOWN = [("cat", "zebra", 3.0), ("lion", "tiger", 8.0)]


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    folder = tmp_path / "sets"
    folder.mkdir()
    lines = [f"{first}\t{second}\t{score}\n" for first, second, score in JUDGED + UNKNOWN]
    (folder / "EN-TOY-6.txt").write_text("".join(lines))
    (folder / "other.csv").write_text("word1,word2,mean\n" + "cat,dog,1\nfish,cat,2\n")
    return folder


@pytest.mark.usefixtures("runs")
def test_page_figures_and_picture(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "results"
    command = ["analyze", "words", "softmax", "trees", "--benchmarks", str(sets)]
    assert main([*command, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((output / "words.json").read_text())["correlations"]
    for name, record in zip(("softmax", "trees"), found, strict=False):
        run = load_run(name)
        weight = run.model.backbone.embedding.weight.detach()
        similarities = []
        for first, second, _ in JUDGED:
            a, b = (weight[run.vocabulary[word]] for word in (first.lower(), second))
            similarities.append(float(torch.cosine_similarity(a, b, 0)))
        rho, p_value = spearman([score for _, _, score in JUDGED], similarities)
        assert (record["set"], record["model"]) == ("TOY-6", name)
        assert (record["pairs"], record["missing"]) == (6, 2)
        assert record["rho"] == pytest.approx(rho, abs=1e-12)
        assert record["p_value"] == pytest.approx(p_value, abs=1e-12)
        assert f"{rho:.3f}" in printed
    assert found[2]["p_value"] is None  # two pairs
    page = (output / "words.md").read_text()
    assert "| TOY-6 | 6 | 2 |" in page
    assert "![words similarity](words-similarity.png)" in page
    assert (output / "words-similarity.png").read_bytes().startswith(b"\x89PNG")
