"""Folders of models: the plain model's, and those of heads with parameters of their own, as
transformers alone and other processes load them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hstree.deferred import DeferredHead
from hstree.heads import AdaptiveSoftmax, MixtureOfSoftmaxes, TreeEnsemble
from hstree.trees import build_ensemble

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the packages import
    import transformers
    from integrations.model_configs import build
    from integrations.small_models import (
        D,
        V,
        assert_same_weights,
        draw_ids,
        gpt2,
        llama,
        loaded,
        small,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GPT2Config,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )

    from hstree.transformers import (
        CONFIG_KEY,
        HeadConfig,
        accelerate_lm_head,
        from_pretrained,
        replace_lm_head,
    )

pytestmark = pytest.mark.usefixtures("computed")

IDS = draw_ids(2, 6)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """As after training."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# Without parameters of its own: the plain folder

CHANGES: dict[str, Any] = {
    "None": replace_lm_head,
    "softmax": lambda model: replace_lm_head(model, "softmax", z_loss=1e-4),
    "sampled": lambda model: replace_lm_head(model, "sampled", frequencies=range(V, 0, -1)),
    "accelerated": accelerate_lm_head,
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM"])
@pytest.mark.parametrize("from_files", [False, True])
def test_the_folder_is_the_plain_models(
    name: str, how: str, from_files: bool, tmp_path: Path
) -> None:
    """File by file; the class of the model loads it."""
    model = small(name)
    if from_files:
        model = loaded(model, tmp_path / "start")
    reference = copy.deepcopy(model)
    CHANGES[how](model)
    for options in ({}, {"max_shard_size": "4KB"}):
        for each, folder in ((model, "own"), (reference, "plain")):
            each.save_pretrained(tmp_path / folder, **options)
        assert content(tmp_path / "own") == content(tmp_path / "plain")
    again, report = type(model).from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not any(report.values())
    assert_same_weights(again, model)
    with pytest.raises(ValueError, match="path: expected a model with a head of hstree"):
        from_pretrained(tmp_path / "own")


@pytest.mark.parametrize("head", [None, "mos"])
def test_a_layer_that_the_model_keeps_in_float32(head: str | None, tmp_path: Path) -> None:
    build("HYV4ForCausalLM").to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    options = {"dtype": torch.bfloat16}
    model = transformers.HYV4ForCausalLM.from_pretrained(tmp_path / "plain", **options)
    replace_lm_head(model, head)
    expected = model(IDS).logits + 0
    model.save_pretrained(tmp_path / "own")
    load = from_pretrained if head else type(model).from_pretrained
    again = load(tmp_path / "own", **options)
    for each in (model, again):
        assert {p.dtype for p in each.lm_head.parameters()} == {torch.float32}
        assert each.model.embed_tokens.weight.dtype == torch.bfloat16
    assert (again(IDS).logits + 0).equal(expected)


# With parameters of its own


def trees(model: PreTrainedModel) -> TreeEnsemble:
    vectors = [model.get_output_embeddings().weight.detach().float().numpy()]
    made = build_ensemble("cluster", V, 2, None, vectors, 3, 8, True)
    head = TreeEnsemble(D, V, made, gate="context", subset_size=8, sparse=True)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def tied_trees(model: PreTrainedModel) -> TreeEnsemble:
    made = build_ensemble("huffman", V, 2, list(range(1, V + 1)), clusters=8)
    embedding = model.get_input_embeddings()
    return TreeEnsemble(D, V, made, embedding=embedding, subset_size=8)


def adaptive(model: PreTrainedModel) -> AdaptiveSoftmax:
    order = torch.arange(V).flip(0)
    return AdaptiveSoftmax(D, V, cutoffs=(5, 20), div_value=2.0, order=order)


OWN: dict[str, Any] = {
    "trees": lambda model: replace_lm_head(model, trees(model)),
    "tied trees": lambda model: replace_lm_head(model, tied_trees(model)),
    "mos": lambda model: replace_lm_head(model, MixtureOfSoftmaxes(D, V, components=2)),
    "mos-plif": lambda model: replace_lm_head(
        model, "mos-plif", components=2, function_options={"intervals": 9}
    ),
    "adaptive": lambda model: replace_lm_head(model, adaptive(model)),
    "forest": lambda model: replace_lm_head(
        model, "forest", clusters=4, negatives=8, frequencies=range(V, 0, -1)
    ),
}
SOME = [("LlamaForCausalLM", kind) for kind in OWN] + [
    ("GPT2LMHeadModel", "trees"),
    ("GPT2LMHeadModel", "tied trees"),
    ("GPTNeoXForCausalLM", "trees"),
    ("GPTNeoXForCausalLM", "forest"),
    ("BertForMaskedLM", "mos"),
]


@pytest.mark.parametrize(("name", "kind"), SOME)
@pytest.mark.parametrize("from_files", [False, True])
def test_saved_and_loaded_it_is_the_same_model(
    name: str, kind: str, from_files: bool, tmp_path: Path
) -> None:
    """Also of models that transformers saves under the names they were loaded by (GPT-NeoX)."""
    model = small(name)
    if from_files:
        model = loaded(model, tmp_path / "start")
    perturbed(OWN[kind](model))
    model.save_pretrained(tmp_path / "one")
    again = from_pretrained(tmp_path / "one")
    assert type(again) is type(model)
    assert not any(module.training for module in again.modules())
    assert_same_weights(again, model)
    layer = again.get_output_embeddings()
    assert isinstance(layer, DeferredHead)
    embedding = again.get_input_embeddings().weight
    assert (kind == "tied trees") == any(p is embedding for p in layer.head.parameters())
    found = []
    for each in (model, again):
        torch.manual_seed(5)
        found.append(each.train()(input_ids=IDS, labels=IDS))
        found[-1].loss.backward()
    assert found[0].loss.equal(found[1].loss)
    assert (found[0].logits + 0).equal(found[1].logits + 0)
    for own, other in zip(again.parameters(), model.parameters(), strict=True):
        if other.grad is not None:
            assert own.grad.to_dense().equal(other.grad.to_dense())
    again.eval().save_pretrained(tmp_path / "two")
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_a_model_saved_in_parts(tmp_path: Path) -> None:
    """By the arguments of save_pretrained."""
    model = perturbed(OWN["trees"](llama()))
    expected = model(IDS).logits + 0
    state = {
        name: tensor + 1 if tensor.is_floating_point() else tensor
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(tmp_path / "state", state_dict=state)
    for name, tensor in from_pretrained(tmp_path / "state").state_dict().items():
        assert tensor.equal(state[name])
    model.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) >= 2
    assert (from_pretrained(tmp_path / "shards")(IDS).logits + 0).equal(expected)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "config.json").exists()
    with pytest.raises(ValueError, match=r"push_to_hub: expected False, got True; call model.push"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "4KB"}])
def test_a_variant(shards: dict[str, Any], tmp_path: Path) -> None:
    model = perturbed(OWN["trees"](llama()))
    model.save_pretrained(tmp_path, variant="half", **shards)
    assert_same_weights(from_pretrained(tmp_path, variant="half"), model)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        from_pretrained(tmp_path)


def test_arguments_are_those_of_transformers(tmp_path: Path) -> None:
    """Of the config, and of the weights; what transformers refuses, is refused."""
    model = perturbed(OWN["trees"](llama()))
    model.save_pretrained(tmp_path)
    again, report = from_pretrained(
        tmp_path,
        use_cache=False,
        attention_dropout=0.5,
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not any(report.values())
    assert (again.config.use_cache, again.config.attention_dropout) == (False, 0.5)
    assert again.model.layers[0].self_attn.attention_dropout == 0.5
    torch.testing.assert_close(again(IDS).logits + 0, model(IDS).logits + 0)
    with pytest.raises(ValueError, match="state_dict"):
        from_pretrained(tmp_path, state_dict=model.state_dict())
    with pytest.raises(TypeError, match="nothing"):
        from_pretrained(tmp_path, nothing=3)
    with pytest.raises(OSError, match="nothing"):
        from_pretrained(tmp_path / "nothing")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32, "auto"])
def test_dtypes(dtype: Any, tmp_path: Path) -> None:
    model = perturbed(OWN["trees"](gpt2().to(torch.bfloat16)))
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    wide = dtype == torch.float32
    assert {parameter.dtype for parameter in again.parameters()} == {
        torch.float32 if wide else torch.bfloat16
    }
    logits, expected = again(IDS).logits + 0, model(IDS).logits + 0
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=0.5 * wide, rtol=0.1 * wide)


@pytest.mark.parametrize("make", [gpt2, llama, lambda: small("MambaForCausalLM")])
@pytest.mark.parametrize("trust", [None, False])
def test_transformers_alone_refuses_it(make: Any, trust: Any, tmp_path: Path) -> None:
    """With and without the class of the model: never another lm_head."""
    model = OWN["trees"](make())
    model.save_pretrained(tmp_path)
    path = str(tmp_path)
    for auto in (AutoModelForCausalLM, AutoConfig):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            auto.from_pretrained(path, trust_remote_code=trust)
    code = (tmp_path / "modeling_hstree.py").read_text(encoding="utf-8")
    assert "pip install 'hstree[transformers]'" in code
    for load in (type(model).from_pretrained, type(model.config).from_pretrained):
        with pytest.raises(Exception, match=r"pip install 'hstree\[transformers\]'"):
            load(path)


def test_trusted_transformers_load_it(tmp_path: Path) -> None:
    model = perturbed(OWN["tied trees"](gpt2()))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, use_cache=False)
    assert type(again) is type(model)
    assert not again.config.use_cache
    assert_same_weights(again, model)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(config) is HeadConfig
    with pytest.raises(ValueError, match=r"config: expected .* got HeadConfig; make the model"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def test_the_config_is_restored(tmp_path: Path) -> None:
    plain, model = gpt2(), OWN["trees"](gpt2())
    assert model.config.to_dict() == plain.config.to_dict()
    model.save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again.config) is GPT2Config
    expected, own = plain.config.to_dict(), again.config.to_dict()
    for name in ("architectures", "dtype", "_name_or_path"):
        expected.pop(name, None), own.pop(name, None)
    assert own == expected


# Damaged files


def _set(key: str, value: Any) -> Any:
    def damage(config: dict[str, Any]) -> None:
        config[CONFIG_KEY][key] = value

    return damage


DAMAGES: dict[str, Any] = {
    "text": lambda config: config.update({CONFIG_KEY: "trees"}),
    "list": lambda config: config.update({CONFIG_KEY: [1]}),
    "no name": lambda config: config[CONFIG_KEY].pop("name"),
    "no config": lambda config: config[CONFIG_KEY].pop("config"),
    "another name": _set("name", "nothing"),
    "another head": _set("name", "mos"),
    "a number as name": _set("name", 3),
    "another model": _set("body_type", "nothing"),
    "no model": _set("body_type", None),
    "a number as model": _set("body_type", 3),
    "no class": lambda config: config.pop("architectures"),
    "another class": lambda config: config.update(architectures=["Nothing"]),
    "an empty config": _set("config", {}),
    "a text as size": lambda config: config[CONFIG_KEY]["config"].update(n_classes="x"),
    "another size": lambda config: config[CONFIG_KEY]["config"].update(n_classes=V + 1),
    # Compared with the files before memory is allocated.
    "a large size": lambda config: config[CONFIG_KEY]["config"].update(n_classes=200_000_000),
    "an unknown option": lambda config: config[CONFIG_KEY]["config"].update(nothing=1),
    "no names": lambda config: config[CONFIG_KEY].pop("tensors"),
    "another tensor": lambda config: config[CONFIG_KEY]["tensors"].append("nothing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_names_the_file(damage: str, tmp_path: Path) -> None:
    OWN["trees"](gpt2()).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    DAMAGES[damage](config)
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"(?s)^{tmp_path}.*: expected .* got ") as error:
        from_pretrained(tmp_path)
    if damage not in ("no names", "another tensor"):
        assert str(error.value).startswith(f"{file}: ")


def drop(file: Path) -> None:
    tensors = load_file(file)
    kept = {name: t.clone() for name, t in tensors.items() if not name.endswith("roots.weight")}
    assert len(kept) == len(tensors) - 1
    save_file(kept, file, {"format": "pt"})


def shorten(file: Path) -> None:
    tensors = load_file(file)
    cut = {n: t[:-1].clone() if n.endswith("roots.weight") else t for n, t in tensors.items()}
    save_file(cut, file, {"format": "pt"})


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [drop, shorten, truncate, Path.unlink])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "4KB"}])
def test_damaged_weights_name_the_folder(
    damage: Any, shards: dict[str, Any], tmp_path: Path
) -> None:
    OWN["trees"](llama()).save_pretrained(tmp_path, **shards)
    files = sorted(tmp_path.glob("*.safetensors"))
    file = next(file for file in files if any(n.endswith("roots.weight") for n in load_file(file)))
    damage(file)
    with pytest.raises(OSError if damage is Path.unlink else ValueError) as error:
        from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


# Other processes

ELSEWHERE = """
import sys, warnings; warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline
folder, what = sys.argv[1:]
if what == "without hstree":
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "hstree":
                raise ModuleNotFoundError("No module named 'hstree'", name="hstree")
    sys.meta_path.insert(0, Finder())
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except ImportError as error:
        print(error)
else:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__ == "transformers.models.gpt2.modeling_gpt2"
    torch.save(model(torch.arange(12).view(2, 6)).logits + 0, f"{folder}/logits.pt")
    text = pipeline("text-generation", folder, trust_remote_code=True)
    (out,) = text("w3 w4", max_new_tokens=4, do_sample=False)
    print(out["generated_text"])
    half = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.bfloat16
    )
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    try:
        AutoModel.from_pretrained(folder, trust_remote_code=True)
    except ValueError:
        pass
    else:
        raise AssertionError("a model without its head")
"""


def elsewhere(folder: Path, what: str) -> str:
    """Standard output of a new process that loads the folder, with a cache of its own."""
    environment = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), what],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trees", "mos", "tied trees"])
def test_another_process_loads_it_with_transformers(kind: str, tmp_path: Path) -> None:
    model = perturbed(OWN[kind](gpt2()))
    model.save_pretrained(tmp_path)
    words = models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
    fast.save_pretrained(tmp_path)
    text = elsewhere(tmp_path, "with hstree")
    logits = model(torch.arange(12).view(2, 6)).logits + 0
    assert torch.load(tmp_path / "logits.pt").equal(logits)
    new = model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False)[0, 2:]
    assert text.split()[-3:] == [f"w{token}" for token in new.tolist()][-3:]


@pytest.mark.slow
def test_without_hstree_the_command_that_installs_it(tmp_path: Path) -> None:
    OWN["mos"](gpt2()).save_pretrained(tmp_path)
    assert "Run `pip install hstree`" in elsewhere(tmp_path, "without hstree")
